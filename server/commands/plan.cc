#include "server/commands/plan.h"

#include <memory>
#include <optional>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/model/tensor_match.h"
#include "kernels/kda_split.h"
#include "nlohmann/json.hpp"
#include "server/exit_codes.h"
#include "server/flags.h"
#include "server/memory_request.h"
#include "server/server_config.h"

namespace k3 {
namespace {

constexpr double kGiB = 1 << 30;
constexpr double kAssumedGpuGib = 139;  // an H200, where there is no GPU to ask

struct PlanOptions {
  ServerConfig config;
  std::string gpus;
  std::optional<double> gpu_memory_gib;
  bool json = false;
  bool help = false;
};

absl::Status ParseArgs(const std::vector<std::string>& args, FlagSet& flags, PlanOptions& options) {
  flags.Group("Plan");
  flags.Number("gpu-memory-gib", &options.gpu_memory_gib, {0.1, 1e6},
               "memory of one GPU, GiB (default: the device's, else 139)");
  flags.Bool("json", &options.json, "one JSON object instead of a table");
  flags.Bool("help", &options.help, "this text");
  AddLayoutFlags(flags, options.config, &options.gpus);
  std::vector<std::string> positional;
  if (absl::Status status = flags.ParseArgs(args, &positional); !status.ok()) return status;
  if (absl::Status status = flags.Resolve(); !status.ok()) return status;
  if (options.help) return absl::OkStatus();
  if (positional.size() != 1) {
    return absl::InvalidArgumentError("plan takes one model folder: k3serve plan MODEL_DIR");
  }
  options.config.model_dir = positional[0];
  return FinishLayoutFlags(flags, options.gpus, options.config);
}

// The device to plan for, when it is here: its memory and scratch sizes are then exact.
std::unique_ptr<Ops> FindDevice(const ServerConfig& config, bool is_cpu) {
  if (is_cpu) {
    CpuOptions options;
    options.threads = static_cast<int>(config.threads.value_or(0));
    return MakeCpuOps(options);
  }
  if (CudaDeviceCount() == 0) return nullptr;
  CudaOptions options;
  options.device = config.gpus.empty() ? 0 : config.gpus.front();
  options.compute_dtype = config.compute_dtype == "fp32" ? DType::kF32 : DType::kBF16;
  options.batch_invariant = config.batch_invariant;
  return MakeCudaOps(options);
}

std::string Gib(uint64_t bytes) { return absl::StrFormat("%10.2f GiB", static_cast<double>(bytes) / kGiB); }

std::string Size(uint64_t bytes) {
  if (bytes >= uint64_t{1} << 30) return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / kGiB);
  return absl::StrFormat("%.3f MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

std::string PlanTable(const PlanSubject& subject, const MemoryRequest& request, const MemoryPlan& plan) {
  const int32_t ranks = request.tensor_parallel * request.data_parallel;
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    absl::StrAppend(&text, absl::StrFormat("%-16s", name), value, "\n");
  };
  line("model", absl::StrCat(subject.model_dir, " (", subject.model_type, "), sizes from ",
                             subject.from_headers ? "the checkpoint's headers" : "config.json alone"));
  line("weights",
       absl::StrFormat("%.2f GB in all%s", static_cast<double>(plan.model_bytes) / 1e9,
                       plan.expert_bytes == 0 ? "" : absl::StrFormat(", %d bytes an expert", plan.expert_bytes)));
  if (request.is_cpu) {
    line("device", absl::StrCat("CPU with ", Size(request.memory_bytes), " free"));
  } else {
    line("device", absl::StrFormat("%d GPU%s (tensor parallel %d x data parallel %d) of %s, %.0f %% used", ranks,
                                   ranks == 1 ? "" : "s", request.tensor_parallel, request.data_parallel,
                                   Size(request.memory_bytes), request.utilization * 100));
  }
  absl::StrAppend(&text, "\n", request.is_cpu ? "memory" : "memory per GPU", "\n");
  const WeightBytes& weights = plan.rank_weights;
  line("  weights", absl::StrFormat("%s   experts %s, embedding and head %s, other %s", Gib(plan.weights_bytes),
                                    Size(weights.experts), Size(weights.embedding), Size(weights.other)));
  line("  workspace", absl::StrFormat("%s   steps of at most %d tokens%s", Gib(plan.workspace_bytes),
                                      plan.max_num_batched_tokens, plan.workspace_estimated ? ", estimated" : ""));
  if (!request.is_cpu && subject.kda_heads > 0) {
    line("    KDA", absl::StrCat("prefill of one sequence in segments: ",
                                 KdaSegmentsText(subject.kda_heads / request.tensor_parallel)));
  }
  line("  residual bank", Gib(plan.bank_bytes));
  if (plan.closed_mix_bytes > 0) {
    // Counted with the workspace.
    line("    mixes of it", absl::StrCat(Gib(plan.closed_mix_bytes), "   in the workspace; ", AttnResFormText()));
  }
  line("  state pool", absl::StrFormat("%s   %d live + %d snapshot slots of %s", Gib(plan.state_pool_bytes()),
                                       plan.state_slots, plan.snapshot_slots, Size(plan.slot_bytes)));
  line("  page pool", absl::StrFormat("%s   %d pages of %d tokens, %s each", Gib(plan.page_pool_bytes()),
                                      plan.latent_pages, request.page_size, Size(plan.page_bytes)));
  // On the CPU the pools are as large as they are told to be: what counts is the memory that is free.
  line("  total", request.is_cpu
                      ? absl::StrFormat("%s   of %s free", Gib(plan.used_bytes()), Size(request.memory_bytes))
                      : absl::StrFormat("%s   of %s", Gib(plan.used_bytes()), Size(plan.budget_bytes)));
  absl::StrAppend(&text, "\n", absl::StrFormat("%16s%12s   %s\n", "sequences of", "fit at once", "bound by"));
  for (const ContextFit& fit : plan.fits) {
    absl::StrAppend(&text, absl::StrFormat("%9d tokens%12d   %s\n", fit.context, fit.sequences, fit.binding));
  }
  absl::StrAppend(&text, "\n");
  if (plan.fits_memory) {
    line("limits", absl::StrFormat("--max-num-seqs %d --max-model-len %d --max-num-batched-tokens %d",
                                   plan.max_num_seqs, plan.max_model_len, plan.max_num_batched_tokens));
  } else {
    line("does not fit", plan.problem);
  }
  return text;
}

std::string PlanJson(const PlanSubject& subject, const MemoryRequest& request, const MemoryPlan& plan) {
  using Json = nlohmann::ordered_json;
  Json json;
  json["model"] = subject.model_dir;
  json["model_type"] = subject.model_type;
  json["sizes_from"] = subject.from_headers ? "headers" : "config";
  json["device"] = request.is_cpu ? "cpu" : "cuda";
  json["tensor_parallel"] = request.tensor_parallel;
  json["data_parallel"] = request.data_parallel;
  json["model_bytes"] = plan.model_bytes;
  json["expert_bytes"] = plan.expert_bytes;
  json["per_rank"] = {{"memory_bytes", request.memory_bytes},
                      {"budget_bytes", plan.budget_bytes},
                      {"weights_bytes", plan.weights_bytes},
                      {"expert_weights_bytes", plan.rank_weights.experts},
                      {"workspace_bytes", plan.workspace_bytes},
                      {"workspace_estimated", plan.workspace_estimated},
                      {"residual_bank_bytes", plan.bank_bytes},
                      {"closed_mix_bytes", plan.closed_mix_bytes},
                      {"state_pool_bytes", plan.state_pool_bytes()},
                      {"page_pool_bytes", plan.page_pool_bytes()},
                      {"used_bytes", plan.used_bytes()},
                      {"state_slot_bytes", plan.slot_bytes},
                      {"page_bytes", plan.page_bytes},
                      {"page_size", request.page_size},
                      {"latent_pages", plan.latent_pages},
                      {"state_slots", plan.state_slots},
                      {"snapshot_slots", plan.snapshot_slots}};
  json["max_num_seqs"] = plan.max_num_seqs;
  json["max_model_len"] = plan.max_model_len;
  json["max_num_batched_tokens"] = plan.max_num_batched_tokens;
  json["sequences"] = Json::array();
  for (const ContextFit& fit : plan.fits) {
    json["sequences"].push_back({{"context", fit.context}, {"count", fit.sequences}, {"bound_by", fit.binding}});
  }
  json["fits"] = plan.fits_memory;
  if (!plan.fits_memory) json["problem"] = plan.problem;
  return json.dump() + "\n";
}

int RunPlan(const std::vector<std::string>& args, std::ostream& out, std::ostream& err) {
  FlagSet flags;
  PlanOptions options;
  if (absl::Status status = ParseArgs(args, flags, options); !status.ok()) {
    err << "k3serve plan: " << status.message() << "\n";
    return kExitUsage;
  }
  if (options.help) {
    out << "Usage: k3serve plan MODEL_DIR [flags]\n" << flags.Help();
    return kExitOk;
  }
  const std::string& dir = options.config.model_dir;
  const auto fail = [&](const absl::Status& status) {
    err << "k3serve plan: " << status.message() << "\n";
    return kExitBadCheckpoint;
  };
  auto config = LoadModelConfig(dir);
  if (!config.ok()) return fail(config.status());
  std::unique_ptr<Checkpoint> checkpoint;
  if (!options.config.random_weights_seed && Checkpoint::Exists(dir)) {
    auto opened = Checkpoint::Open(dir);
    if (!opened.ok()) return fail(opened.status());
    checkpoint = *std::move(opened);
    if (auto match = MatchTensors(*checkpoint, *config); !match.ok()) return fail(match.status());
  }

  // A plan is for GPUs unless it is asked for the CPU: it is made on whatever machine is at hand.
  const bool is_cpu = options.config.device == "cpu";
  std::unique_ptr<Ops> ops;
  try {
    ops = FindDevice(options.config, is_cpu);
  } catch (const DeviceError& error) {
    err << "k3serve plan: " << error.what() << "; planning without it\n";
  }
  uint64_t memory = static_cast<uint64_t>(kAssumedGpuGib * kGiB);
  if (ops != nullptr) memory = is_cpu ? ops->FreeMemory() : ops->TotalMemory();
  if (!is_cpu && options.gpu_memory_gib) memory = static_cast<uint64_t>(*options.gpu_memory_gib * kGiB);
  MemoryRequest request = MakeMemoryRequest(options.config, is_cpu, memory);
  request.checkpoint = checkpoint.get();
  request.ops = ops.get();
  auto plan = PlanMemory(*config, request);
  if (!plan.ok()) {
    err << "k3serve plan: " << plan.status().message() << "\n";
    return kExitUsage;
  }
  const PlanSubject subject{dir, config->model_type, checkpoint != nullptr, config->kda_heads};
  out << (options.json ? PlanJson(subject, request, *plan) : PlanTable(subject, request, *plan));
  if (plan->fits_memory) return kExitOk;
  err << "k3serve plan: does not fit: " << plan->problem << "\n";
  return kExitDoesNotFit;
}

}  // namespace k3
