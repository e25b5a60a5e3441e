#include "server/engine_host.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/model/self_check.h"
#include "kernels/core/error.h"
#include "kernels/cpu/thread_pool.h"
#include "server/exit_codes.h"
#include "server/memory_request.h"

namespace k3 {
namespace {

// FNV-1a, 64 bit.
class Fingerprint {
 public:
  void Add(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < size; ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001b3ull;
  }
  void Add(uint64_t value) { Add(&value, sizeof(value)); }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

// The GPU's KDA works in chunks of so many tokens, and at once on sequences of at most so many: where a prompt is cut
// shows in its last bits.
constexpr int32_t kChunkedKdaTokens = 64;
constexpr int32_t kStepKdaTokens = 8;

constexpr size_t kSampleBytes = 4096;
constexpr uint64_t kSamplesPerFile = 64;

std::string FolderName(const std::string& dir) {
  std::filesystem::path path = std::filesystem::path(dir).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  return path.filename().string();
}

uint64_t LayoutTag(const ServedModel& served, const CacheGeometry& geometry) {
  Fingerprint print;
  print.Add(served.weights_version.data(), served.weights_version.size());
  print.Add(static_cast<uint64_t>(geometry.page_size));
  print.Add(static_cast<uint64_t>(geometry.page_dtype));
  print.Add(static_cast<uint64_t>(geometry.state_dtype));
  print.Add(static_cast<uint64_t>(geometry.conv_dtype));
  return print.value();
}

}  // namespace

std::vector<int32_t> EosTokenIds(const ModelConfig& config, const SamplingDefaults& defaults,
                                 const Tokenizer& tokenizer) {
  std::vector<int32_t> ids = tokenizer.stop_ids();
  ids.push_back(config.eos_token_id);
  ids.insert(ids.end(), defaults.eos_token_ids.begin(), defaults.eos_token_ids.end());
  std::erase_if(ids, [&](int32_t id) { return id < 0 || id >= config.vocab_size; });
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

std::string WeightsVersion(const LoadedModel& model, std::optional<int64_t> seed) {
  if (seed.has_value()) return absl::StrCat("random-", *seed);
  Fingerprint print;
  for (size_t i = 0; i < model.checkpoint->num_shards(); ++i) {
    const MappedFile& file = model.checkpoint->shard_file(i);
    print.Add(file.size());
    // The header lies at the front and comes whole up to a sample; the data are looked at here and there.
    const uint64_t stride = std::max<uint64_t>(file.size() / kSamplesPerFile, kSampleBytes);
    for (uint64_t at = 0; at < file.size(); at += stride) {
      print.Add(file.data() + at, static_cast<size_t>(std::min<uint64_t>(kSampleBytes, file.size() - at)));
    }
  }
  return absl::StrFormat("%016x", print.value());
}

std::unique_ptr<EngineHost> EngineHost::Load(const ServerConfig& config, const std::function<void(double)>& progress,
                                             EngineObserver* observer, Failure* failure) {
  std::unique_ptr<EngineHost> host(new EngineHost());
  try {
    absl::Status status = host->OpenDevice(config);
    if (!status.ok()) {
      *failure = {kExitUsage, std::string(status.message())};
      return nullptr;
    }
  } catch (const DeviceError& error) {
    *failure = {kExitNoDevice, error.what()};
    return nullptr;
  }
  try {
    absl::Status status = host->LoadModel(config, progress, failure);
    if (status.ok()) status = host->StartEngine(config, observer, failure);
    if (status.ok()) return host;
    failure->message = std::string(status.message());
  } catch (const DeviceError& error) {
    *failure = {kExitDeviceFault, error.what()};
  }
  return nullptr;
}

absl::Status EngineHost::OpenDevice(const ServerConfig& config) {
  const bool is_cpu = config.device == "cpu" || (config.device == "auto" && CudaDeviceCount() == 0);
  if (const absl::Status status = CheckDeviceConflicts(config, is_cpu); !status.ok()) return status;
  if (config.tensor_parallel_size != 1 || config.data_parallel_size != 1) {
    return absl::InvalidArgumentError(absl::StrCat("--tensor-parallel-size ", config.tensor_parallel_size,
                                                   " --data-parallel-size ", config.data_parallel_size,
                                                   ": this build serves with one rank"));
  }
  // A setting that would change nothing must not look as if it did.
  if (config.moe_routing != "exact") {
    return absl::InvalidArgumentError(
        absl::StrCat("--moe-routing ", config.moe_routing, ": this build routes exactly only"));
  }
  if (is_cpu) {
    CpuOptions options;
    options.threads = static_cast<int>(config.threads.value_or(0));
    ops_ = MakeCpuOps(options);
  } else {
    CudaOptions options;
    options.device = config.gpus.empty() ? 0 : config.gpus.front();
    options.compute_dtype = config.compute_dtype == "fp32" ? DType::kF32 : DType::kBF16;
    options.batch_invariant = config.batch_invariant;
    ops_ = MakeCudaOps(options);
  }
  if (config.profile_steps.has_value()) {
    auto profiled = std::make_unique<ProfiledOps>(std::move(ops_));
    profile_ = profiled.get();
    ops_ = std::move(profiled);
  }
  return absl::OkStatus();
}

absl::Status EngineHost::LoadModel(const ServerConfig& config, const std::function<void(double)>& progress,
                                   Failure* failure) {
  failure->exit_code = kExitBadCheckpoint;
  const std::string& dir = config.model_dir;
  absl::StatusOr<ModelConfig> model_config = LoadModelConfig(dir);
  if (!model_config.ok()) return model_config.status();
  model_config->latent_norm_eps = static_cast<float>(config.latent_norm_eps);
  model_config->biased_router_weights = config.kl_router_weights == "biased";

  // The small files first: a missing tokenizer must not be found out after minutes of loading.
  served_ = std::make_shared<ServedModel>();
  absl::StatusOr<SamplingDefaults> defaults = LoadSamplingDefaults(dir);
  if (!defaults.ok()) return defaults.status();
  served_->defaults = *std::move(defaults);
  auto tokenizer = Tokenizer::Load(config.tokenizer_dir.empty() ? dir : config.tokenizer_dir);
  if (!tokenizer.ok()) {
    return absl::Status(tokenizer.status().code(),
                        absl::StrCat(std::string(tokenizer.status().message()), " (--tokenizer names another folder)"));
  }
  served_->tokenizer = *std::move(tokenizer);
  if (served_->tokenizer->vocab_size() > model_config->vocab_size) {
    return absl::DataLossError(absl::StrCat("the tokenizer has ", served_->tokenizer->vocab_size(),
                                            " ids, the model's vocab_size is ", model_config->vocab_size));
  }
  served_->renderer = std::make_shared<ChatRenderer>(served_->tokenizer);
  for (const int32_t id : served_->defaults.eos_token_ids) {
    if (id >= 0 && id < model_config->vocab_size) continue;
    return absl::DataLossError(absl::StrCat(dir, "/generation_config.json: eos_token_id ", id,
                                            " is outside the vocabulary of ", model_config->vocab_size));
  }
  served_->eos_token_ids = EosTokenIds(*model_config, served_->defaults, *served_->tokenizer);
  if (auto grammar_engine = MakeGrammarEngine(*served_->tokenizer, static_cast<int32_t>(model_config->vocab_size),
                                              served_->eos_token_ids)) {
    served_->grammars = std::make_shared<GrammarPool>(GrammarPool::Options(), std::move(grammar_engine));
  }
  served_->names = config.served_model_names;
  served_->root = FolderName(dir);
  served_->created = static_cast<int64_t>(std::time(nullptr));
  served_->device = ops_->device_name();

  // Whether it can fit is known before anything large is read.
  std::unique_ptr<Checkpoint> headers;
  if (!config.random_weights_seed.has_value()) {
    auto opened = Checkpoint::Open(dir);
    if (!opened.ok()) return opened.status();
    headers = *std::move(opened);
  }
  const size_t free_before = ops_->FreeMemory();
  MemoryRequest request = MakeMemoryRequest(config, ops_->is_cpu(), ops_->is_cpu() ? free_before : ops_->TotalMemory());
  request.checkpoint = headers.get();
  request.ops = ops_.get();
  if (const absl::Status status = Plan(*model_config, request, failure); !status.ok()) return status;

  LoadOptions load;
  load.threads = static_cast<int>(config.threads.value_or(UsableCpus()));
  load.progress = [&progress](const LoadProgress& at) { progress(at.percent()); };
  if (config.random_weights_seed.has_value()) load.random_seed = static_cast<uint64_t>(*config.random_weights_seed);
  auto loaded = LoadWeights(dir, *model_config, *ops_, load);
  if (!loaded.ok()) return loaded.status();
  loaded_ = *std::move(loaded);
  if (!ops_->is_cpu()) {  // measured now; the CPU's weights are partly the file's own pages
    const size_t free_after = ops_->FreeMemory();
    request.loaded_weights_bytes = free_before > free_after ? free_before - free_after : 0;
    if (const absl::Status status = Plan(*model_config, request, failure); !status.ok()) return status;
  }
  served_->weights_version = WeightsVersion(*loaded_, config.random_weights_seed);
  model_ = std::make_unique<Model>(loaded_->config, loaded_->weights, *ops_);
  return SelfCheck(*model_, *ops_);
}

absl::Status EngineHost::Plan(const ModelConfig& model_config, const MemoryRequest& request, Failure* failure) {
  absl::StatusOr<MemoryPlan> plan = PlanMemory(model_config, request);
  if (!plan.ok()) {
    failure->exit_code = kExitUsage;
    return plan.status();
  }
  plan_ = *std::move(plan);
  if (plan_.fits_memory) return absl::OkStatus();
  failure->exit_code = kExitDoesNotFit;
  return absl::ResourceExhaustedError(absl::StrCat("does not fit: ", plan_.problem));
}

absl::Status EngineHost::StartEngine(const ServerConfig& config, EngineObserver* observer, Failure* failure) {
  failure->exit_code = kExitDoesNotFit;
  const MemoryPlan& plan = plan_;
  if (!config.max_model_len.has_value() && plan.max_model_len < loaded_->config.max_position_embeddings) {
    spdlog::info("--max-model-len is {}: what one sequence can use of the pools; the model's own limit is {}",
                 plan.max_model_len, loaded_->config.max_position_embeddings);
  }
  ExecutorOptions options;
  if (!ops_->is_cpu()) options.decode_sizes = Executor::DecodeSizes(plan.bounds.sequences);
  options.profile = profile_;
  options.on_profile = [](const ProfiledOps& profile) { spdlog::info("profile: {}", profile.Result().Text()); };
  absl::StatusOr<std::unique_ptr<Executor>> executor =
      Executor::Create(*model_, *ops_, plan.bounds, plan.geometry, std::move(options));
  if (!executor.ok()) return executor.status();
  executor_ = *std::move(executor);
  if (!ops_->is_cpu()) {
    absl::StatusOr<WarmUpReport> warm_up = executor_->WarmUp();
    if (!warm_up.ok()) {
      failure->exit_code = kExitDeviceFault;
      return warm_up.status();
    }
    spdlog::info(
        "warm-up: {} decode graphs of {} to {} sequences with {} operations in {:.2f} s, {} MiB of device memory",
        warm_up->graphs, warm_up->smallest, warm_up->largest, warm_up->nodes, warm_up->seconds, warm_up->bytes >> 20);
  }
  if (profile_ != nullptr) profile_->Start(*config.profile_steps);

  EngineConfig engine;
  engine.vocab_size = static_cast<int32_t>(loaded_->config.vocab_size);
  engine.eos_token_ids = served_->eos_token_ids;
  engine.max_model_len = static_cast<int32_t>(plan.max_model_len);
  engine.max_num_seqs = static_cast<int32_t>(plan.max_num_seqs);
  engine.max_num_batched_tokens = static_cast<int32_t>(plan.max_num_batched_tokens);
  engine.prefill_chunk =
      static_cast<int32_t>(std::min<int64_t>(config.prefill_chunk.value_or(0), plan.max_num_batched_tokens));
  if (config.batch_invariant && !ops_->is_cpu()) {
    engine.prefill_alignment = kChunkedKdaTokens;
    engine.short_tail = kStepKdaTokens;
  }
  engine.max_queue = static_cast<int32_t>(config.max_queue);
  engine.page_size = static_cast<int32_t>(config.page_size);
  engine.latent_pages = static_cast<int32_t>(plan.latent_pages);
  engine.state_slots = static_cast<int32_t>(plan.state_slots);
  engine.snapshot_slots = static_cast<int32_t>(plan.snapshot_slots);
  engine.page_bytes = static_cast<int64_t>(plan.page_bytes);
  engine.state_bytes = static_cast<int64_t>(plan.slot_bytes);
  engine.enable_prefix_caching = config.enable_prefix_caching;
  engine.snapshot_interval = static_cast<int32_t>(config.snapshot_interval);
  engine.layout_tag = LayoutTag(*served_, plan.geometry);
  engine.verify_hits = config.verify_hits;
  failure->exit_code = kExitUsage;
  absl::StatusOr<std::unique_ptr<Engine>> started = Engine::Create(std::move(engine), *executor_, observer);
  if (!started.ok()) return started.status();
  engine_ = *std::move(started);
  served_->engine = engine_.get();
  spdlog::info("model={} device={} weights_version={} max_model_len={} max_num_seqs={} eos={}", served_->names.front(),
               served_->device, served_->weights_version, plan.max_model_len, plan.max_num_seqs,
               absl::StrJoin(served_->eos_token_ids, ","));
  return absl::OkStatus();
}

}  // namespace k3
