#include "server/commands/verify.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "engine/lend_experts.h"
#include "engine/model/golden_check.h"
#include "engine/rank_group.h"
#include "kernels/cpu/thread_pool.h"
#include "server/commands/verify_server.h"
#include "server/exit_codes.h"
#include "server/flags.h"
#include "server/nccl_world.h"

namespace k3 {
namespace {

constexpr double kCpuTolerance = 1e-4;
constexpr double kCudaTolerance = 2e-2;
constexpr double kCudaFp32Tolerance = 1e-3;
constexpr double kFreeRoutingShare = 0.9;  // of equal experts, where rounding may flip a choice

struct VerifyOptions {
  std::string model_dir;
  std::string golden;
  std::string device = "auto";
  std::string compute_dtype = "auto";
  int64_t chunk = 4096;
  std::string routing = "auto";
  std::optional<double> tolerance;
  std::optional<int64_t> threads;
  bool batch_invariant = false;
  int64_t tensor_parallel = 1;
  int64_t data_parallel = 1;
  int64_t expert_leaves = 0;
  std::string transport = "all-gather";
  bool logits_hash = false;
  double latent_norm_eps = 1e-6;
  std::string kl_router_weights = "unbiased";
  std::string expert_activations = "full";
  VerifyServerOptions server;
  bool help = false;
};

void DeclareFlags(FlagSet& flags, VerifyOptions& options) {
  flags.Group("Verify");
  flags.String("golden", &options.golden, "FILE", "safetensors file with the reference results");
  flags.Choice("device", &options.device, {"auto", "cpu", "cuda"}, "where to run the model");
  flags.Choice("compute-dtype", &options.compute_dtype, {"auto", "bf16", "fp32"}, "activations on CUDA (auto: bf16)");
  flags.Int("chunk", &options.chunk, {1, 1 << 20}, "prompt tokens per forward call");
  flags.Choice("routing", &options.routing, {"auto", "free", "golden"},
               "expert choices of prompt positions: the model's own or the golden's (auto: free on the CPU and with "
               "--compute-dtype fp32, golden otherwise)");
  flags.Number("tolerance", &options.tolerance, {0, 1e6},
               "largest relative norm error of a prompt (auto: 1e-4 on the CPU, 2e-2 on CUDA, 1e-3 there in fp32)");
  flags.Int("threads", &options.threads, {1, 1024}, "CPU threads");
  flags.Bool("batch-invariant", &options.batch_invariant, "CUDA: fixed tiles, splits and sums over GPUs");
  flags.Int("tensor-parallel", &options.tensor_parallel, {1, 1024}, "ranks that share each prompt");
  flags.Int("data-parallel", &options.data_parallel, {1, 1024},
            "groups of ranks; they take turns with the prompts, experts are spread over all");
  flags.Int("expert-leaves", &options.expert_leaves, {0, 1024},
            "groups of experts summed in one fixed tree: the same number gives the same bits on fewer ranks (0: one a "
            "rank)");
  flags.Bool("logits-hash", &options.logits_hash, "tell a hash of each prompt's logits: equal hashes, equal bits");
  flags.Choice("expert-transport", &options.transport, {"all-gather", "all-to-all"}, "how tokens reach other ranks");
  flags.Number("latent-norm-eps", &options.latent_norm_eps, {0, 1}, "eps of the MLA latent norms");
  flags.Choice("kl-router-weights", &options.kl_router_weights, {"unbiased", "biased"},
               "router weights of Kimi-Linear");
  flags.Choice("expert-activations", &options.expert_activations, {"full", "mxfp8"},
               "inputs of MXFP4 experts: as they are, or rounded to MXFP8 as their training saw them");
  flags.Group("Verify a running server instead of a model");
  flags.String("server", &options.server.url, "URL", "replay the HTTP contract against it, e.g. http://127.0.0.1:8000");
  flags.String("target", &options.server.target, "HOST:PORT", "replay the gRPC contract against it");
  options.server.access.DeclareFlags(flags);
  flags.Bool("help", &options.help, "this text");
}

absl::Status ParseArgs(const std::vector<std::string>& args, FlagSet& flags, VerifyOptions& options) {
  std::vector<std::string> positional;
  if (absl::Status status = flags.ParseArgs(args, &positional); !status.ok()) return status;
  if (absl::Status status = flags.Resolve(); !status.ok()) return status;
  if (options.help) return absl::OkStatus();
  if (!options.server.url.empty() || !options.server.target.empty()) {
    if (positional.empty() && options.golden.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("--server and --target check a running server: no MODEL_DIR, no --golden");
  }
  if (positional.size() != 1) {
    return absl::InvalidArgumentError("verify takes one model folder: k3serve verify MODEL_DIR --golden FILE");
  }
  if (options.golden.empty()) return absl::InvalidArgumentError("--golden FILE is missing");
  options.model_dir = positional[0];
  return absl::OkStatus();
}

int ExitCodeOf(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInternal ? kExitDeviceFault : kExitBadCheckpoint;
}

nlohmann::ordered_json ToJson(const GoldenPrompt& prompt, const GoldenResult& result) {
  return {{"prompt", prompt.name},
          {"rel_error", result.rel_error},
          {"worst_row", result.worst_row},
          {"worst_row_error", result.worst_row_error},
          {"greedy_compared", result.greedy_compared},
          {"greedy_equal", result.greedy_equal},
          {"experts_equal_share", result.experts_equal_share}};
}

// FNV-1a over the bits.
std::string HashOf(const std::vector<float>& logits) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const float logit : logits) hash = (hash ^ std::bit_cast<uint32_t>(logit)) * 0x100000001b3ull;
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

// What a prompt must reach, by device and routing.
struct Bar {
  double tolerance;
  bool exact;           // experts and greedy tokens must be equal
  double expert_share;  // at least, otherwise
  bool check_error;     // with free routing in bf16 a flipped expert moves its row by per cents: only the share counts
};

// One prompt on the ranks of a group, which must agree; the other groups lend their experts.
absl::StatusOr<GoldenResult> CheckPrompt(RankGroup& ranks, int32_t group, const GoldenPrompt& prompt,
                                         const GoldenCheckOptions& options) {
  std::vector<GoldenResult> results(static_cast<size_t>(ranks.local_ranks()));
  const int64_t chunk = std::clamp<int64_t>(options.chunk, 1, static_cast<int64_t>(prompt.tokens.size()));
  const absl::Status status =
      RunInGroup(ranks, group, chunk, [&](int local, const ForwardNotice& announce) -> absl::Status {
        GoldenCheckOptions own = options;
        own.before_forward = announce;
        auto result = CheckGolden(ranks.model(local), ranks.ops(local), prompt, own);
        if (!result.ok()) return result.status();
        results[static_cast<size_t>(local)] = *std::move(result);
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  GoldenResult* first = nullptr;
  for (int local = 0; local < ranks.local_ranks(); ++local) {
    if (ranks.data_rank_of(local) != group) continue;
    GoldenResult& result = results[static_cast<size_t>(local)];
    if (first == nullptr) {
      first = &result;
    } else if (result.logits != first->logits) {
      return absl::InternalError(absl::StrCat("prompt ", prompt.name, ": ranks ", ranks.rank_of(local), " and ",
                                              ranks.rank_of(local) - ranks.tensor_rank_of(local),
                                              " computed different logits"));
    }
  }
  return std::move(*first);
}

int Verify(const VerifyOptions& options, RankGroup& ranks, std::ostream& out, std::ostream& err) {
  absl::StatusOr<ModelConfig> config = LoadModelConfig(options.model_dir);
  if (!config.ok()) {
    err << config.status().message() << "\n";
    return kExitBadCheckpoint;
  }
  config->latent_norm_eps = static_cast<float>(options.latent_norm_eps);
  config->biased_router_weights = options.kl_router_weights == "biased";
  if (const absl::Status set = SetExpertActivations(options.expert_activations, *config); !set.ok()) {
    err << set.message() << "\n";
    return kExitUsage;
  }
  const absl::StatusOr<std::vector<GoldenPrompt>> prompts = LoadGolden(options.golden);
  if (!prompts.ok()) {
    err << prompts.status().message() << "\n";
    return kExitBadCheckpoint;
  }
  LoadOptions load;
  load.print_progress = false;
  if (const absl::Status loaded = ranks.Load(options.model_dir, *config, load); !loaded.ok()) {
    err << loaded.message() << "\n";
    return ExitCodeOf(loaded);
  }

  const Ops& ops = ranks.ops();
  const bool fp32 = ops.activation_dtype() == DType::kF32;
  const bool golden_routing = options.routing == "golden" || (options.routing == "auto" && !fp32);
  Bar bar{};
  bar.tolerance = options.tolerance.value_or(ops.is_cpu() ? kCpuTolerance : fp32 ? kCudaFp32Tolerance : kCudaTolerance);
  bar.exact = ops.is_cpu();
  bar.expert_share = golden_routing ? 1.0 : kFreeRoutingShare;
  bar.check_error = fp32 || golden_routing;

  bool passed = true;
  double max_error = 0;
  for (size_t number = 0; number < prompts->size(); ++number) {
    const GoldenPrompt& prompt = (*prompts)[number];
    const int32_t group = static_cast<int32_t>(number) % ranks.layout().data;
    const absl::StatusOr<GoldenResult> result = CheckPrompt(
        ranks, group, prompt, {.chunk = options.chunk, .golden_routing = golden_routing, .before_forward = nullptr});
    if (!result.ok()) {
      err << result.status().message() << "\n";
      return ExitCodeOf(result.status());
    }
    bool good = std::isfinite(result->rel_error);
    if (bar.check_error) good = good && result->rel_error <= bar.tolerance;
    if (bar.exact) {
      good = good && result->greedy_equal == result->greedy_compared && result->experts_equal_share == 1.0;
    } else {
      good = good && result->experts_equal_share >= bar.expert_share;
    }
    passed = passed && good;
    max_error = std::isfinite(result->rel_error) ? std::max(max_error, result->rel_error) : result->rel_error;
    nlohmann::ordered_json line = ToJson(prompt, *result);
    if (options.logits_hash) line["logits_hash"] = HashOf(result->logits);
    out << line.dump() << std::endl;
  }
  out << nlohmann::ordered_json{{"passed", passed}, {"prompts", prompts->size()}, {"max_rel_error", max_error}}.dump()
      << std::endl;
  return passed ? kExitOk : kExitNotPassed;
}

}  // namespace

int RunVerify(const std::vector<std::string>& args, std::ostream& out, std::ostream& err) {
  VerifyOptions options;
  FlagSet flags;
  DeclareFlags(flags, options);
  if (absl::Status status = ParseArgs(args, flags, options); !status.ok()) {
    err << "k3serve verify: " << status.message() << "\n";
    return kExitUsage;
  }
  if (options.help) {
    out << "Usage: k3serve verify MODEL_DIR --golden FILE [flags]\n"
           "       k3serve verify [--server URL] [--target HOST:PORT]\n\n"
           "Runs the prompts of a golden file through the model and compares logits, experts and greedy tokens. Or "
           "replays "
           "the\nAPI contract against a running server and reports every check.\n"
        << flags.Help();
    return kExitOk;
  }

  if (!options.server.url.empty() || !options.server.target.empty()) return RunVerifyServer(options.server, out, err);

  const bool cuda = options.device == "cuda" || (options.device == "auto" && CudaDeviceCount() > 0);
  if (!cuda && options.compute_dtype == "bf16") {
    err << "--compute-dtype bf16: the CPU computes in fp32 throughout\n";
    return kExitUsage;
  }
  RankGroup::Options layout;
  layout.layout.tensor = static_cast<int32_t>(options.tensor_parallel);
  layout.layout.data = static_cast<int32_t>(options.data_parallel);
  layout.layout.expert_leaves = static_cast<int32_t>(options.expert_leaves);
  if (options.transport == "all-to-all") layout.transport = ExpertTransport::kAllToAll;
  const int ranks = layout.layout.ranks();
  layout.make_ops = [&](int local) {
    if (!cuda) {
      return MakeCpuOps({.threads = std::max(1, static_cast<int>(options.threads.value_or(UsableCpus())) / ranks)});
    }
    CudaOptions device;
    device.device = local;
    device.compute_dtype = options.compute_dtype == "fp32" ? DType::kF32 : DType::kBF16;
    device.batch_invariant = options.batch_invariant;
    return MakeCudaOps(device);
  };
  if (cuda && ranks > 1) layout.make_world = NcclWorld(ranks, options.batch_invariant || options.expert_leaves > 0);
  const absl::StatusOr<std::unique_ptr<RankGroup>> group = RankGroup::Create(std::move(layout));
  if (!group.ok()) {
    err << group.status().message() << "\n";
    return group.status().code() == absl::StatusCode::kInternal ? kExitNoDevice : kExitUsage;
  }
  try {
    return Verify(options, **group, out, err);
  } catch (const DeviceError& error) {
    err << error.what() << "\n";
    return kExitDeviceFault;
  }
}

}  // namespace k3
