#include "engine/memory_plan.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/executor.h"
#include "engine/model/tensor_table.h"
#include "engine/model/weights_loader.h"

namespace k3 {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr int64_t kContexts[] = {8192, 131072, 1048576};

constexpr int64_t kDefaultSequencesCpu = 64;
constexpr int64_t kDefaultSequencesGpu = 256;
constexpr int64_t kDefaultStepTokensCpu = 2048;
constexpr int64_t kDefaultStepTokensGpu = 8192;
constexpr uint64_t kDefaultCpuPoolBytes = 4 * kGiB;
constexpr int64_t kMaxLogitsRows = 256;

// Shares of the pools' memory where no flag decides. The rest is for pages.
constexpr double kLiveShare = 0.4;
constexpr double kSnapshotShare = 0.15;
constexpr int64_t kSnapshotsPerLiveSlot = 4;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

uint64_t StoredBytes(const TensorSpec& spec, bool mxfp4, const Checkpoint* checkpoint) {
  const uint64_t elements = static_cast<uint64_t>(spec.elements());
  if (spec.form == TensorForm::kExpert && mxfp4) return elements / 2 + elements / kMxfp4BlockSize;
  if (checkpoint != nullptr) {
    if (const auto at = checkpoint->Find(spec.name)) return checkpoint->Bytes(*at);
  }
  return (elements + static_cast<uint64_t>(spec.padding)) * SizeOf(spec.released);
}

// Packed or not is read from the names where there are files (spec 1.4).
bool IsPacked(const ModelConfig& config, int32_t layer, const Checkpoint* checkpoint) {
  if (checkpoint == nullptr) return config.mxfp4_experts;
  return checkpoint->Find(ExpertTensors(config, layer, 0)[0].name + "_packed").has_value();
}

std::string Gib(uint64_t bytes) { return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / kGiB); }

// Scratch memory of the CUDA kernels, for planning on a machine without one. Rounded up from what each op stages:
// KDA the convolved q, k, v, gates and the chunk matrices; MLA absorbed queries and latent outputs; the experts their
// gathered rows, activations and products (twice a balanced rank's share); sampling a copy of the logits. Attention
// residuals of two phases as outside batch-invariant mode.
ScratchSizes EstimateScratch(const ModelConfig& rank, const MemoryRequest& request, const StepBounds& bounds,
                             const WorkspaceRanks& ranks) {
  const double tokens = static_cast<double>(bounds.tokens);
  const double kda = tokens * rank.kda_channels() * 16;
  const double mla = tokens * rank.num_attention_heads * (2.0 * rank.kv_lora_rank + rank.qk_rope_head_dim) * 2;
  double moe = 0;
  if (rank.num_experts > 0) {
    const int64_t ranks = int64_t{1} * request.tensor_parallel * request.data_parallel;
    const double share = std::min(1.0, 2.0 / static_cast<double>(ranks));
    const double rows = tokens * request.data_parallel * rank.num_experts_per_token * share;
    moe = rows * (6.0 * rank.expert_width() + 4.0 * rank.moe_intermediate_size);
  }
  const double sample = static_cast<double>(bounds.logits_rows) * rank.vocab_size * 4;
  ScratchSizes sizes;
  sizes.shared = static_cast<size_t>(std::max({kda, mla, moe, sample}));
  if (!request.is_cpu && request.activation == DType::kBF16) {
    sizes.closed_mixes =
        Workspace::ClosedMixesBytes(rank, bounds, request.activation, ranks, [&](int64_t rows, int32_t closed) {
          return MeasuredAttnResForm(rows, rank.hidden_size, closed, kAttnResSites);
        });
  }
  return sizes;
}

class Planner {
 public:
  Planner(const ModelConfig& config, const MemoryRequest& request)
      : config_(config), request_(request), rank_config_(RankConfig(config, request.tensor_parallel)) {}

  MemoryPlan Run() {
    CountWeights();
    ChooseStep();
    SizeWorkspace();
    ChooseBudget();
    SizePools();
    CheckFit();
    FillLimits();
    for (int64_t context : kContexts) plan_.fits.push_back(Fit(context));
    return std::move(plan_);
  }

 private:
  void CountWeights() {
    plan_.model_bytes = RankWeightBytes(config_, 1, 1, request_.checkpoint).total();
    const int32_t ranks = request_.tensor_parallel * request_.data_parallel;
    plan_.rank_weights = RankWeightBytes(config_, request_.tensor_parallel, ranks, request_.checkpoint);
    plan_.weights_bytes = request_.loaded_weights_bytes.value_or(plan_.rank_weights.total());
    for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      if (!config_.IsMoe(layer)) continue;
      for (const TensorSpec& spec : ExpertTensors(config_, layer, 0)) {
        plan_.expert_bytes += StoredBytes(spec, IsPacked(config_, layer, request_.checkpoint), request_.checkpoint);
      }
      break;
    }
  }

  void ChooseStep() {
    const bool cpu = request_.is_cpu;
    plan_.max_num_batched_tokens =
        request_.max_num_batched_tokens.value_or(cpu ? kDefaultStepTokensCpu : kDefaultStepTokensGpu);
    // Every running sequence needs a token of the step.
    const int64_t step_limit = plan_.max_num_batched_tokens * request_.data_parallel;
    if (request_.max_num_seqs) {
      sequences_ = *request_.max_num_seqs;
    } else if (request_.state_slots) {
      sequences_ = std::min(*request_.state_slots * request_.data_parallel, step_limit);
    } else {
      sequences_ = std::min(cpu ? kDefaultSequencesCpu : kDefaultSequencesGpu, step_limit);
    }
    sequences_per_rank_ = CeilDiv(sequences_, request_.data_parallel);
  }

  void SizeWorkspace() {
    StepBounds& bounds = plan_.bounds;
    bounds.tokens = plan_.max_num_batched_tokens;
    // State slots that were asked for let one rank hold more than its even share.
    bounds.sequences = request_.state_slots ? std::min(*request_.state_slots, sequences_) : sequences_per_rank_;
    bounds.logits_rows = std::min({sequences_per_rank_, plan_.max_num_batched_tokens, kMaxLogitsRows});
    bounds.context = request_.max_model_len.value_or(config_.max_position_embeddings);
    const WorkspaceRanks ranks =
        WorkspaceRanks::Of({.tensor = request_.tensor_parallel, .data = request_.data_parallel}, request_.transport);
    ScratchSizes scratch;
    if (request_.ops != nullptr) {
      scratch = Workspace::ScratchBytes(rank_config_, bounds, *request_.ops, ranks);
    } else {
      scratch = EstimateScratch(rank_config_, request_, bounds, ranks);
      plan_.workspace_estimated = true;
    }
    plan_.closed_mix_bytes = scratch.closed_mixes;
    plan_.bank_bytes = Workspace::BankBytes(rank_config_, bounds, request_.activation, ranks);
    // The CPU has no decode steps of fixed size (EngineHost).
    const std::vector<int32_t> decode_sizes =
        request_.is_cpu ? std::vector<int32_t>() : Executor::DecodeSizes(bounds.sequences);
    plan_.workspace_bytes =
        Workspace::Bytes(rank_config_, bounds, request_.activation, scratch, ranks) - plan_.bank_bytes +
        Executor::StagingBytes(config_.vocab_size, bounds, static_cast<int32_t>(request_.page_size), decode_sizes);

    if (request_.balance.has_value()) {
      plan_.workspace_bytes += static_cast<uint64_t>(
          ExpertBalance::Bytes(config_, *request_.balance, request_.tensor_parallel * request_.data_parallel,
                               bounds.tokens, bounds.sequences));
    }

    CacheGeometry& geometry = plan_.geometry;
    geometry.page_size = static_cast<int32_t>(request_.page_size);
    geometry.page_dtype = request_.page_dtype;
    geometry.state_dtype = request_.state_dtype;
    geometry.conv_dtype = request_.activation;
    plan_.page_bytes = static_cast<uint64_t>(CacheStorage::PageBytes(rank_config_, geometry));
    plan_.slot_bytes = static_cast<uint64_t>(CacheStorage::SlotBytes(rank_config_, geometry));
  }

  void ChooseBudget() {
    fixed_bytes_ = plan_.weights_bytes + plan_.workspace_bytes + plan_.bank_bytes;
    if (!request_.is_cpu) {
      plan_.budget_bytes = static_cast<uint64_t>(request_.utilization * static_cast<double>(request_.memory_bytes));
    } else if (request_.pool_bytes) {
      plan_.budget_bytes = fixed_bytes_ + *request_.pool_bytes;
    } else {
      const uint64_t left = request_.memory_bytes > fixed_bytes_ ? request_.memory_bytes - fixed_bytes_ : 0;
      plan_.budget_bytes = fixed_bytes_ + std::min(kDefaultCpuPoolBytes, left / 2);
    }
    pool_bytes_ = plan_.budget_bytes > fixed_bytes_ ? plan_.budget_bytes - fixed_bytes_ : 0;
  }

  int64_t PagesFor(int64_t tokens) const { return CeilDiv(tokens, request_.page_size); }

  // How many of `bytes` fit a share of the pools.
  static int64_t Count(double bytes, uint64_t each) {
    if (bytes <= 0) return 0;
    if (each == 0) return std::numeric_limits<int32_t>::max();
    return static_cast<int64_t>(bytes / static_cast<double>(each));
  }

  int64_t PagesBeside(int64_t slots) const {
    const uint64_t taken = static_cast<uint64_t>(slots) * plan_.slot_bytes;
    return taken > pool_bytes_ ? 0 : Count(static_cast<double>(pool_bytes_ - taken), plan_.page_bytes);
  }

  void SizePools() {
    const double pools = static_cast<double>(pool_bytes_);
    int64_t live = request_.state_slots.value_or(
        std::clamp<int64_t>(Count(kLiveShare * pools, plan_.slot_bytes), 1, sequences_per_rank_));
    int64_t snapshots = 0;
    if (request_.snapshot_slots) {
      snapshots = *request_.snapshot_slots;
    } else if (request_.prefix_caching) {
      snapshots = std::min(Count(kSnapshotShare * pools, plan_.slot_bytes), kSnapshotsPerLiveSlot * live);
    }
    int64_t pages = request_.latent_pages.value_or(PagesBeside(live + snapshots));

    // A length that was asked for goes before snapshots and parallel sequences.
    const int64_t needed = request_.max_model_len ? PagesFor(*request_.max_model_len) : 1;
    if (!request_.latent_pages && pages < needed) {
      const double room = pools - static_cast<double>(needed) * static_cast<double>(plan_.page_bytes);
      const int64_t slots = Count(room, plan_.slot_bytes);
      if (!request_.state_slots) live = std::clamp<int64_t>(slots, 1, live);
      if (!request_.snapshot_slots) snapshots = std::clamp<int64_t>(slots - live, 0, snapshots);
      pages = PagesBeside(live + snapshots);
    }
    if (!request_.latent_pages) {
      // More than all slots could refer to would never be used.
      const int64_t useful = (live + snapshots) * PagesFor(config_.max_position_embeddings);
      pages = std::min<int64_t>({pages, useful, std::numeric_limits<int32_t>::max() / 2});
    }
    plan_.state_slots = live;
    plan_.snapshot_slots = snapshots;
    plan_.latent_pages = pages;
    plan_.geometry.pages = static_cast<int32_t>(pages);
    plan_.geometry.slots = static_cast<int32_t>(live + snapshots);
  }

  void CheckFit() {
    const int64_t length = request_.max_model_len.value_or(request_.page_size);
    const uint64_t pages = static_cast<uint64_t>(PagesFor(length));
    const uint64_t sequence = plan_.slot_bytes + pages * plan_.page_bytes;
    const uint64_t limit = request_.is_cpu ? std::min(plan_.budget_bytes, request_.memory_bytes) : plan_.budget_bytes;
    const std::string where = request_.is_cpu
                                  ? absl::StrCat("the machine has ", Gib(request_.memory_bytes), " free")
                                  : absl::StrCat("a GPU offers ", Gib(limit), " of ", Gib(request_.memory_bytes));
    if (fixed_bytes_ + sequence > limit) {
      plan_.problem = absl::StrCat(
          "weights (", Gib(plan_.weights_bytes), "), workspace (", Gib(plan_.workspace_bytes + plan_.bank_bytes),
          ") and one sequence of ", length, " tokens (", Gib(sequence), ") need ", Gib(fixed_bytes_ + sequence),
          " but ",
          request_.is_cpu && limit == plan_.budget_bytes
              ? absl::StrCat("the pools get ", Gib(pool_bytes_), " (--cpu-memory-gib) beside weights and workspace")
              : where);
    } else if (plan_.latent_pages < static_cast<int64_t>(pages)) {
      plan_.problem = absl::StrCat("one sequence of ", length, " tokens needs ", pages, " latent pages, there are ",
                                   plan_.latent_pages, request_.latent_pages ? " (--latent-pages)" : "");
    } else if (plan_.used_bytes() > limit) {
      plan_.problem = absl::StrCat("weights, workspace and the pools asked for (", plan_.latent_pages, " pages, ",
                                   plan_.state_slots, " + ", plan_.snapshot_slots, " slots) need ",
                                   Gib(plan_.used_bytes()), " but ",
                                   request_.is_cpu && limit == plan_.budget_bytes
                                       ? absl::StrCat("the pools get ", Gib(pool_bytes_), " (--cpu-memory-gib)")
                                       : where);
    }
    plan_.fits_memory = plan_.problem.empty();
  }

  void FillLimits() {
    plan_.max_num_seqs = std::min(sequences_, plan_.state_slots * request_.data_parallel);
    plan_.max_model_len = request_.max_model_len.value_or(
        std::min(config_.max_position_embeddings, plan_.latent_pages * request_.page_size));
  }

  std::string MemoryFlag() const { return request_.is_cpu ? "--cpu-memory-gib" : "--gpu-memory-utilization"; }

  ContextFit Fit(int64_t context) const {
    if (context > config_.max_position_embeddings) return {context, 0, "the model's own limit"};
    if (!plan_.fits_memory) return {context, 0, MemoryFlag()};
    if (request_.max_model_len && context > *request_.max_model_len) return {context, 0, "--max-model-len"};
    const int64_t by_pages = plan_.latent_pages / PagesFor(context);
    if (by_pages < plan_.state_slots) {
      return {context, by_pages * request_.data_parallel, request_.latent_pages ? "--latent-pages" : MemoryFlag()};
    }
    const bool asked = plan_.state_slots >= sequences_per_rank_;
    return {context, std::min(plan_.state_slots * request_.data_parallel, sequences_),
            asked                  ? "--max-num-seqs"
            : request_.state_slots ? "--state-slots"
                                   : MemoryFlag()};
  }

  const ModelConfig& config_;
  const MemoryRequest& request_;
  const ModelConfig rank_config_;
  MemoryPlan plan_;
  int64_t sequences_ = 0;  // asked for, over all ranks
  int64_t sequences_per_rank_ = 0;
  uint64_t fixed_bytes_ = 0;
  uint64_t pool_bytes_ = 0;
};

}  // namespace

WeightBytes RankWeightBytes(const ModelConfig& config, int32_t tensor_parallel, int32_t expert_ranks,
                            const Checkpoint* checkpoint) {
  WeightBytes bytes;
  const auto add = [&](const TensorSpec& spec) {
    if (spec.role == TensorRole::kLmHead && config.tie_word_embeddings &&
        (checkpoint == nullptr || !checkpoint->Find(spec.name))) {
      return;
    }
    const bool cut = spec.shard == TensorShard::kRows || spec.shard == TensorShard::kColumns;
    const uint64_t share = StoredBytes(spec, false, checkpoint) / (cut ? tensor_parallel : 1);
    const bool table = spec.role == TensorRole::kEmbedding || spec.role == TensorRole::kLmHead;
    (table ? bytes.embedding : bytes.other) += share;
  };
  for (const TensorSpec& spec : ModelTensors(config)) add(spec);
  for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    for (const TensorSpec& spec : LayerTensors(config, layer)) add(spec);
    if (!config.IsMoe(layer)) continue;
    const bool packed = IsPacked(config, layer, checkpoint);
    const uint64_t count = static_cast<uint64_t>(CeilDiv(config.num_experts, expert_ranks));
    for (const TensorSpec& spec : ExpertTensors(config, layer, 0)) {
      bytes.experts += count * StoredBytes(spec, packed, checkpoint);
    }
  }
  return bytes;
}

ModelConfig RankConfig(const ModelConfig& config, int32_t tensor_parallel) {
  ModelConfig rank = config;
  rank.kda_heads /= tensor_parallel;
  rank.num_attention_heads /= tensor_parallel;
  rank.intermediate_size /= tensor_parallel;
  rank.tensor_shares = tensor_parallel;
  return rank;
}

absl::StatusOr<MemoryPlan> PlanMemory(const ModelConfig& config, const MemoryRequest& request) {
  if (absl::Status status = CheckTensorParallel(config, request.tensor_parallel); !status.ok()) return status;
  return Planner(config, request).Run();
}

}  // namespace k3
