#include "server/engine_host.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/self_check.h"
#include "engine/socket_communicator.h"
#include "kernels/comm/nccl.h"
#include "kernels/core/error.h"
#include "kernels/cpu/thread_pool.h"
#include "server/exit_codes.h"
#include "server/memory_request.h"
#include "server/model_name.h"
#include "server/nccl_world.h"
#include "server/version.h"

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

constexpr auto kJoinPatience = std::chrono::minutes(10);  // images are pulled at different speeds
constexpr auto kLastResort = std::chrono::seconds(8);

constexpr size_t kSampleBytes = 4096;
constexpr uint64_t kSamplesPerFile = 64;

// What all processes must agree on about the choice of experts.
std::string RoutingText(const ServerConfig& config) {
  const std::optional<BalanceOptions> balance = MakeBalanceOptions(config);
  if (!balance.has_value()) return "exact";
  const QuantileOptions& control = balance->control;
  return absl::StrCat(config.moe_routing, " over ", balance->groups, " with ", control.kappa, " ", control.window, " ",
                      control.update_steps, " ", control.decay_shift, " ", control.eta, " ", control.max_delta, " ",
                      control.epoch_updates, " ", control.guards ? "guards" : "no guards", " cap ",
                      balance->soft_cap.value_or(0), " ", balance->soft_cap_tau, " ", config.routing_replay);
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

// A vocabulary without names for its special tokens is taken for K3's, which has its own chat format.
absl::Status CheckTokenNames(const ModelConfig& config, const std::string& tokenizer_dir) {
  const std::string file = tokenizer_dir + "/tokenizer_config.json";
  std::error_code error;
  if (std::filesystem::exists(file, error)) return absl::OkStatus();
  if (config.model_type != "kimi_k3") {
    return absl::NotFoundError(absl::StrCat(file, ": cannot be opened; it names the special tokens of ",
                                            config.model_type, " (--tokenizer names another folder)"));
  }
  spdlog::info("{}: none, special tokens are called as in the released K3", file);
  return absl::OkStatus();
}

}  // namespace

std::vector<int32_t> EosTokenIds(const ModelConfig& config, const SamplingDefaults& defaults,
                                 const Tokenizer& tokenizer) {
  std::vector<int32_t> ids = tokenizer.stop_ids();
  ids.insert(ids.end(), config.eos_token_ids.begin(), config.eos_token_ids.end());
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
                                             EngineObserver* observer, std::shared_ptr<ProfileSwitch> profile,
                                             Failure* failure) {
  std::unique_ptr<EngineHost> host(new EngineHost());
  host->profile_switch_ = std::move(profile);
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

absl::Status EngineHost::OpenBalance(const ServerConfig& config) {
  balance_ = MakeBalanceOptions(config);
  if (!balance_.has_value()) return absl::OkStatus();
  if (!config.routing_replay.empty()) {
    const std::string& text = config.routing_replay;
    const size_t colon = text.rfind(':');
    const size_t dot = text.rfind('.');
    int32_t rank = -1;
    uint64_t number = 0;
    if (colon == std::string::npos || dot == std::string::npos || dot < colon ||
        !absl::SimpleAtoi(text.substr(colon + 1, dot - colon - 1), &rank) ||
        !absl::SimpleAtoi(text.substr(dot + 1), &number) || rank < 0 || number == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--routing-replay must be FILE:RANK.EPOCH, e.g. epochs.log:0.17, not \"", text, "\""));
    }
    auto epoch = EpochLog::Find(text.substr(0, colon), rank, number);
    if (!epoch.ok()) return absl::InvalidArgumentError(std::string(epoch.status().message()));
    balance_->fixed = std::make_shared<BiasEpoch>(*std::move(epoch));
  }
  if (!config.routing_log.empty()) {
    // Every process logs what its own ranks make.
    const int process = config.place.process;
    auto log = EpochLog::Open(process == 0 ? config.routing_log : absl::StrCat(config.routing_log, ".", process));
    if (!log.ok()) return log.status();
    epoch_log_ = *std::move(log);
    balance_->log = epoch_log_.get();
  }
  return absl::OkStatus();
}

absl::Status EngineHost::OpenDevice(const ServerConfig& config) {
  const bool is_cpu = config.device == "cpu" || (config.device == "auto" && CudaDeviceCount() == 0);
  if (const absl::Status status = CheckDeviceConflicts(config, is_cpu); !status.ok()) return status;
  if (const absl::Status status = OpenBalance(config); !status.ok()) return status;
  const ProcessPlace& place = config.place;
  RankGroup::Options options;
  options.layout.tensor = static_cast<int32_t>(config.tensor_parallel_size);
  options.layout.data = static_cast<int32_t>(config.data_parallel_size);
  options.transport = TransportOf(config);
  const int ranks = options.layout.ranks();
  options.local_ranks = ranks / place.processes;
  // On the CPU a long step is slow rather than stuck, and ranks of one process have a limit where they meet.
  if (ranks > 1) {
    const std::chrono::seconds limit(config.rank_timeout * (is_cpu ? 5 : 1));
    if (is_cpu) options.timeout = limit;
    if (!is_cpu || place.processes > 1) options.step_timeout = limit;
  }
  options.first_rank = place.process * options.local_ranks;
  if (place.processes > 1) {
    const std::string agreement = absl::StrCat(
        "k3serve ", kVersion, " ", kCommit, ", ", ModelNameOf(config.model_dir), ", ", config.tensor_parallel_size, "x",
        config.data_parallel_size, " ranks on ", is_cpu ? "cpu" : "cuda", ", ", config.expert_transport, ", pages of ",
        config.page_size, " tokens, routing ", RoutingText(config));
    auto joined = ProcessGroup::Join(place, agreement, kJoinPatience);
    if (!joined.ok()) throw DeviceError(std::string(joined.status().message()));
    processes_ = *std::move(joined);
  }
  if (is_cpu) {
    const int threads = std::max(1, static_cast<int>(config.threads.value_or(UsableCpus())) / options.local_ranks);
    options.make_ops = [threads](int) { return MakeCpuOps({.threads = threads}); };
    if (processes_ != nullptr) {
      options.make_world = [ranks, port = place.master_port + 1](int rank, Ops&) {
        return SocketCommunicator::Join(rank, ranks, port);
      };
    }
  } else {
    options.make_ops = [&config, first = place.local_process * options.local_ranks](int local) {
      CudaOptions cuda;
      cuda.device = config.gpus.empty() ? first + local : config.gpus[static_cast<size_t>(local)];
      cuda.compute_dtype = config.compute_dtype == "fp32" ? DType::kF32 : DType::kBF16;
      cuda.batch_invariant = config.batch_invariant;
      return MakeCudaOps(cuda);
    };
    if (processes_ != nullptr) {
      NcclId id;
      if (processes_->leads()) id = MakeNcclId();
      auto ids = processes_->Exchange({id.bytes.data(), id.bytes.size()});
      if (!ids.ok()) throw DeviceError(std::string(ids.status().message()));
      std::copy_n(ids->front().begin(), std::min(ids->front().size(), id.bytes.size()), id.bytes.begin());
      options.make_world = [id, ranks, fixed = config.batch_invariant](int rank, Ops& ops) {
        return MakeNcclCommunicator(id, rank, ranks, ops, {.fixed_sums = fixed});
      };
    } else if (ranks > 1) {
      options.make_world = NcclWorld(ranks, config.batch_invariant);
    }
  }
  if (config.profile_steps.has_value() || profile_switch_ != nullptr) {
    options.make_ops = [this, make = std::move(options.make_ops)](int local) -> std::unique_ptr<Ops> {
      if (local > 0) return make(local);
      auto profiled = std::make_unique<ProfiledOps>(make(local), profile_switch_);
      profile_ = profiled.get();
      return profiled;
    };
  }
  absl::StatusOr<std::unique_ptr<RankGroup>> opened = RankGroup::Create(std::move(options));
  // What a device lacks comes as INTERNAL from the ranks' threads.
  if (opened.status().code() == absl::StatusCode::kInternal) throw DeviceError(std::string(opened.status().message()));
  if (!opened.ok()) return opened.status();
  ranks_ = *std::move(opened);
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
  if (absl::Status status = SetExpertActivations(config.expert_activations, *model_config); !status.ok()) {
    failure->exit_code = kExitUsage;
    return status;
  }

  if (balance_.has_value()) {
    const int32_t ranks = ranks_->layout().ranks();
    if (absl::Status status = ExpertBalance::Check(*model_config, *balance_, ranks, ranks_->ops().is_cpu());
        !status.ok()) {
      failure->exit_code = kExitUsage;
      return status;
    }
  }

  // The small files first: a missing tokenizer must not be found out after minutes of loading.
  served_ = std::make_shared<ServedModel>();
  absl::StatusOr<SamplingDefaults> defaults = LoadSamplingDefaults(dir);
  if (!defaults.ok()) return defaults.status();
  served_->defaults = *std::move(defaults);
  const std::string& tokenizer_dir = config.tokenizer_dir.empty() ? dir : config.tokenizer_dir;
  auto tokenizer = Tokenizer::Load(tokenizer_dir);
  if (!tokenizer.ok()) {
    return absl::Status(tokenizer.status().code(),
                        absl::StrCat(std::string(tokenizer.status().message()), " (--tokenizer names another folder)"));
  }
  served_->tokenizer = *std::move(tokenizer);
  if (absl::Status status = CheckTokenNames(*model_config, tokenizer_dir); !status.ok()) return status;
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
  served_->root = ModelNameOf(dir);
  served_->created = static_cast<int64_t>(std::time(nullptr));
  served_->device = ranks_->ops().device_name();

  // Whether it can fit is known before anything large is read.
  std::unique_ptr<Checkpoint> headers;
  if (!config.random_weights_seed.has_value()) {
    auto opened = Checkpoint::Open(dir);
    if (!opened.ok()) return opened.status();
    headers = *std::move(opened);
  }
  const size_t free_before = ranks_->ops().FreeMemory();
  MemoryRequest request = MakeMemoryRequest(config, ranks_->ops().is_cpu(),
                                            ranks_->ops().is_cpu() ? free_before : ranks_->ops().TotalMemory());
  request.checkpoint = headers.get();
  request.ops = &ranks_->ops();
  if (const absl::Status status = Plan(*model_config, request, failure); !status.ok()) return status;

  LoadOptions load;
  load.threads = static_cast<int>(config.threads.value_or(UsableCpus()));
  load.progress = [&progress](const LoadProgress& at) { progress(at.percent()); };
  if (config.random_weights_seed.has_value()) load.random_seed = static_cast<uint64_t>(*config.random_weights_seed);
  load.threads = std::max(1, load.threads / ranks_->local_ranks());
  if (const absl::Status status = Agree(ranks_->Load(dir, *model_config, load)); !status.ok()) {
    // A device's fault, as opposed to the files'.
    if (status.code() == absl::StatusCode::kInternal) throw DeviceError(std::string(status.message()));
    return status;
  }
  if (!ranks_->ops().is_cpu()) {  // measured now; the CPU's weights are partly the file's own pages
    const size_t free_after = ranks_->ops().FreeMemory();
    request.loaded_weights_bytes = free_before > free_after ? free_before - free_after : 0;
    if (const absl::Status status = Plan(*model_config, request, failure); !status.ok()) return status;
  }
  if (const absl::Status status = AgreeOnPools(); !status.ok()) return status;
  served_->weights_version = WeightsVersion(ranks_->loaded(), config.random_weights_seed);
  const absl::Status checked = SelfCheck(*ranks_);
  if (checked.code() == absl::StatusCode::kInternal) throw DeviceError(std::string(checked.message()));
  return checked;
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
  if (!config.max_model_len.has_value() && plan.max_model_len < ranks_->loaded().config.max_position_embeddings) {
    spdlog::info("--max-model-len is {}: what one sequence can use of the pools; the model's own limit is {}",
                 plan.max_model_len, ranks_->loaded().config.max_position_embeddings);
  }
  ExecutorOptions options;
  const bool is_cpu = ranks_->ops().is_cpu();
  if (!is_cpu) options.decode_sizes = Executor::DecodeSizes(plan.bounds.sequences);
  options.profile = profile_;
  options.balance = balance_;
  options.on_profile = [this](const ProfiledOps& profile) {
    const ProfileTable table = profile.Result();
    spdlog::info("profile: {}", table.Text());
    ranks_->AddCollectiveTimes(table);
  };
  if (const absl::Status status = ranks_->MakeExecutors(plan.bounds, plan.geometry, options); !status.ok()) {
    return status;
  }
  if (!is_cpu) {
    absl::StatusOr<WarmUpReport> warm_up = ranks_->WarmUp();
    if (!warm_up.ok()) {
      failure->exit_code = kExitDeviceFault;
      return warm_up.status();
    }
    spdlog::info(
        "warm-up: {} decode graphs of {} to {} sequences with {} operations in {:.2f} s, {} MiB of device memory",
        warm_up->graphs, warm_up->smallest, warm_up->largest, warm_up->nodes, warm_up->seconds, warm_up->bytes >> 20);
  }
  if (config.profile_steps.has_value()) profile_->Start(*config.profile_steps);

  if (processes_ != nullptr) {
    processes_->Watch([this](const std::string& why) { OnLost(why); });
    if (!processes_->leads()) return absl::OkStatus();
    process_runner_ = std::make_unique<ProcessRunner>(*ranks_, *processes_);
  }
  StepRunner& runner = process_runner_ != nullptr ? static_cast<StepRunner&>(*process_runner_) : ranks_->runner();

  EngineConfig engine;
  engine.vocab_size = static_cast<int32_t>(ranks_->loaded().config.vocab_size);
  engine.eos_token_ids = served_->eos_token_ids;
  engine.max_model_len = static_cast<int32_t>(plan.max_model_len);
  engine.max_num_seqs = static_cast<int32_t>(plan.max_num_seqs);
  engine.max_num_batched_tokens = static_cast<int32_t>(plan.max_num_batched_tokens);
  engine.prefill_chunk =
      static_cast<int32_t>(std::min<int64_t>(config.prefill_chunk.value_or(0), plan.max_num_batched_tokens));
  if (config.batch_invariant && !ranks_->ops().is_cpu()) {
    engine.prefill_alignment = kChunkedKdaTokens;
    engine.short_tail = kStepKdaTokens;
  }
  engine.data_parallel = static_cast<int32_t>(config.data_parallel_size);
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
  engine.bias_epochs = balance_.has_value() && balance_->adaptive;
  if (engine.bias_epochs && balance_->fixed != nullptr) engine.first_epoch = balance_->fixed->number;
  failure->exit_code = kExitUsage;
  absl::StatusOr<std::unique_ptr<Engine>> started = Engine::Create(std::move(engine), runner, observer);
  if (!started.ok()) return started.status();
  engine_ = *std::move(started);
  served_->engine = engine_.get();
  spdlog::info("model={} device={} weights_version={} max_model_len={} max_num_seqs={} eos={}", served_->names.front(),
               served_->device, served_->weights_version, plan.max_model_len, plan.max_num_seqs,
               absl::StrJoin(served_->eos_token_ids, ","));
  return absl::OkStatus();
}

EngineHost::~EngineHost() {
  engine_.reset();
  if (processes_ != nullptr && processes_->leads()) static_cast<void>(processes_->Send(ProcessGroup::kEnd, ""));
}

absl::Status EngineHost::Agree(const absl::Status& own) {
  if (processes_ == nullptr) return own;
  const auto words = processes_->Exchange(own.ok() ? std::string() : std::string(own.message()));
  if (!own.ok()) return own;
  if (!words.ok()) return words.status();
  for (size_t process = 0; process < words->size(); ++process) {
    if ((*words)[process].empty()) continue;
    return absl::FailedPreconditionError(absl::StrCat("process ", process, ": ", (*words)[process]));
  }
  return absl::OkStatus();
}

absl::Status EngineHost::AgreeOnPools() {
  if (processes_ == nullptr) return absl::OkStatus();
  int64_t own[] = {plan_.latent_pages, plan_.state_slots, plan_.snapshot_slots, plan_.max_num_seqs,
                   plan_.max_model_len};
  const auto words = processes_->Exchange({reinterpret_cast<const char*>(own), sizeof own});
  if (!words.ok()) return words.status();
  for (const std::string& word : *words) {
    int64_t theirs[std::size(own)];
    if (word.size() != sizeof theirs) return absl::DataLossError("a process tells no pool sizes");
    std::memcpy(theirs, word.data(), sizeof theirs);
    for (size_t i = 0; i < std::size(own); ++i) own[i] = std::min(own[i], theirs[i]);
  }
  plan_.latent_pages = own[0];
  plan_.state_slots = own[1];
  plan_.snapshot_slots = own[2];
  plan_.max_num_seqs = own[3];
  plan_.max_model_len = own[4];
  plan_.geometry.pages = static_cast<int32_t>(own[0]);
  plan_.geometry.slots = static_cast<int32_t>(own[1] + own[2]);
  return absl::OkStatus();
}

void EngineHost::OnLost(const std::string& why) {
  spdlog::critical("{}: ending", why);
  {
    std::lock_guard lock(lost_mutex_);
    if (!lost_.empty()) return;
    lost_ = why;
  }
  // Should anything still wait for the peer then, this process ends all the same.
  std::thread([] {
    std::this_thread::sleep_for(kLastResort);
    std::fflush(nullptr);
    std::_Exit(kExitDeviceFault);
  }).detach();
  ranks_->Abort(why);
}

std::string EngineHost::lost() const {
  std::lock_guard lock(lost_mutex_);
  return lost_;
}

int EngineHost::Follow() {
  spdlog::info("process {} of {} is ready: ranks {} to {}", processes_->place().process, processes_->place().processes,
               ranks_->rank_of(0), ranks_->rank_of(ranks_->local_ranks() - 1));
  const absl::Status status = FollowLeader(*ranks_, *processes_);
  if (status.ok()) {
    spdlog::info("the first process has ended the server");
    return kExitOk;
  }
  spdlog::error("{}", std::string(status.message()));
  return kExitDeviceFault;
}

}  // namespace k3
