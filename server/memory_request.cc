#include "server/memory_request.h"

namespace k3 {

ExpertTransport TransportOf(const ServerConfig& config) {
  return config.expert_transport == "all-to-all" ? ExpertTransport::kAllToAll : ExpertTransport::kAllGather;
}

MemoryRequest MakeMemoryRequest(const ServerConfig& config, bool is_cpu, uint64_t memory_bytes) {
  const auto dtype = [&](const std::string& name) {
    return is_cpu || name == "fp32" ? DType::kF32 : DType::kBF16;  // "auto" is bf16 on a GPU
  };
  MemoryRequest request;
  request.is_cpu = is_cpu;
  request.tensor_parallel = static_cast<int32_t>(config.tensor_parallel_size);
  request.data_parallel = static_cast<int32_t>(config.data_parallel_size);
  request.transport = TransportOf(config);
  request.activation = dtype(config.compute_dtype);
  request.page_dtype = dtype(config.kv_cache_dtype);
  request.state_dtype = dtype(config.kda_state_dtype);
  // On the CPU all ranks share one memory.
  const uint64_t sharing = is_cpu ? static_cast<uint64_t>(config.tensor_parallel_size * config.data_parallel_size) : 1;
  request.memory_bytes = memory_bytes / sharing;
  request.utilization = config.gpu_memory_utilization;
  if (config.cpu_memory_gib) {
    request.pool_bytes = static_cast<uint64_t>(*config.cpu_memory_gib * (1 << 30)) / sharing;
  }
  request.page_size = config.page_size;
  request.latent_pages = config.latent_pages;
  request.state_slots = config.state_slots;
  request.snapshot_slots = config.snapshot_slots;
  request.max_num_seqs = config.max_num_seqs;
  request.max_model_len = config.max_model_len;
  request.max_num_batched_tokens = config.max_num_batched_tokens;
  request.prefix_caching = config.enable_prefix_caching;
  request.balance = MakeBalanceOptions(config);
  return request;
}

std::optional<BalanceOptions> MakeBalanceOptions(const ServerConfig& config) {
  BalanceOptions options;
  options.adaptive = config.moe_routing == "local-quantile";
  if (!options.adaptive && !config.measure_routing) return std::nullopt;
  options.groups = static_cast<int32_t>(config.routing_virtual_ranks.value_or(0));
  options.control.kappa = config.routing_kappa;
  options.control.window = config.routing_window;
  options.control.update_steps = static_cast<int32_t>(config.routing_update_steps);
  options.control.decay_shift = static_cast<int32_t>(config.routing_decay);
  options.control.eta = config.routing_eta.value_or(config.routing_decay >= 3 ? 0.5 : 1.0);
  options.control.max_delta = config.routing_max_bias;
  options.control.epoch_updates = static_cast<int32_t>(config.routing_epoch_updates);
  options.control.guards = config.routing_guards;
  options.soft_cap = config.routing_soft_cap;
  options.soft_cap_tau = config.routing_soft_cap_tau;
  return options;
}

}  // namespace k3
