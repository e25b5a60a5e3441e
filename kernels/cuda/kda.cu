#include <algorithm>
#include <vector>

#include "kernels/cuda/kda_any.cuh"
#include "kernels/cuda/kda_compose.cuh"
#include "kernels/cuda/kda_fused.cuh"
#include "kernels/cuda/kda_step.cuh"
#include "kernels/cuda/kda_wide.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/kda_split.h"

namespace k3::cuda {
namespace {

constexpr int kStepLimit = 8;                 // sequences of at most so many tokens take the fused step (bf16)
constexpr int64_t kMostSnapshotHeads = 1024;  // (snapshot, head) pairs of split runs

void CheckKda(const Device& device, const KdaParams& p) {
  const SequenceBatch& batch = *p.batch;
  const int64_t width = static_cast<int64_t>(p.heads) * p.head_dim;
  K3_REQUIRE(p.heads > 0 && p.head_dim > 0 && p.head_dim <= 1024 && p.conv_width > 0 && p.conv_width <= 64,
             "heads, head_dim and conv_width must be positive and at most 1024 and 64, are " + std::to_string(p.heads) +
                 ", " + std::to_string(p.head_dim) + ", " + std::to_string(p.conv_width));
  K3_REQUIRE_MATRIX(p.qkv, device.act, batch.num_tokens, 3 * width);
  K3_REQUIRE_MATRIX(p.decay, device.act, batch.num_tokens, width);
  K3_REQUIRE_MATRIX(p.beta, device.act, batch.num_tokens, p.heads);
  K3_REQUIRE_MATRIX(p.gate, device.act, batch.num_tokens, width);
  K3_REQUIRE_MATRIX(p.out, device.act, batch.num_tokens, width);
  K3_REQUIRE(p.state_dtype == DType::kF32 || p.state_dtype == DType::kBF16,
             std::string("state_dtype must be F32 or BF16, is ") + Name(p.state_dtype));
  K3_REQUIRE(p.gate_kind != KdaGate::kBounded || (p.gate_lower_bound >= -5 && p.gate_lower_bound < 0),
             "gate_lower_bound must be in [-5, 0), is " + std::to_string(p.gate_lower_bound));
  K3_REQUIRE(p.dt_bias && p.a_log && p.state && p.scratch, "dt_bias, a_log, state or scratch is null");
  K3_REQUIRE((p.conv_taps == nullptr) == (p.norm_weight == nullptr),
             "conv_taps and norm_weight must both be given or both be null");
  K3_REQUIRE(p.conv_taps == nullptr || p.conv_width == 1 || p.conv_state != nullptr, "conv_state is null");
  K3_REQUIRE(batch.token_begin && batch.state_slot && batch.sequence_of_token && batch.position && batch.context &&
                 batch.host_token_begin && batch.host_context,
             "an array of the batch is null");
  K3_REQUIRE(batch.num_snapshots <= 2 * batch.num_tokens,
             "at most two snapshots a token, are " + std::to_string(batch.num_snapshots));
  K3_REQUIRE(batch.num_sequences > 0 && batch.num_sequences <= 65535,
             "num_sequences must be in [1, 65535], is " + std::to_string(batch.num_sequences));
}

// Whether the kernels for 128 channels and four taps may be used: they access states and tables 16 bytes at a time.
bool HasFastPath(const KdaParams& p) {
  return p.head_dim == kStepDim && (p.conv_width == kStepTaps || p.conv_taps == nullptr) && Aligned(p.state, 16) &&
         p.slot_stride % 16 == 0 && Aligned(p.conv_state, 16) && Aligned(p.conv_taps, 16) && Aligned(p.dt_bias, 16) &&
         Aligned(p.norm_weight, 16);
}

// Rows of q, k, v and the gates start on multiples of `elements` elements.
bool RowsAligned(const KdaParams& p, int64_t elements) {
  for (const MatrixView* view : {&p.qkv, &p.decay, &p.gate, &p.out}) {
    if (view->ld % elements != 0 || !Aligned(view->data, elements * SizeOf(view->dtype))) return false;
  }
  return true;
}

// Sequences of at most so many tokens take the fused step; without convolution and norm none does.
int StepLimit(const KdaParams& p) { return p.conv_taps != nullptr ? kStepLimit : 0; }

// How single tokens of more states than multiprocessors are spread over the device, by the number of states a
// multiprocessor (measured between 256 and 12,288 states). Up to kFewStates many blocks of few registers keep the
// memory busiest; of four a multiprocessor they are handed out unevenly, though, so that no more are let in than are
// needed.
constexpr int kFewStates = 12;
constexpr int kHeldQuads = 4;
constexpr int kHeldBlocks = 4;
constexpr int kWideBlocks = 2;

template <typename T, typename StateT>
void StepWide(const Device& device, const KdaParams& p, LaunchShape shape, cudaStream_t queue) {
  const int units = device.multiprocessors;
  const int64_t items = int64_t{p.batch->num_sequences} * p.heads;
  const bool few = items <= int64_t{kFewStates} * units;
  const bool one_wave = items <= int64_t{kWideBlocks} * units;
  shape.block = dim3(kWideThreads);
  if constexpr (sizeof(StateT) == sizeof(float)) {
    if (few) {
      shape.shared = sizeof(KdaWideShared<T, StateT, kHeldQuads>);
      // Leaves no room for a third block; a block takes 1 KiB more than it asks for.
      if (one_wave) shape.shared = std::max(shape.shared, device.shared_per_block / kWideBlocks - 1024);
      return Launch(&KdaWideKernel<T, StateT, kHeldQuads, kHeldBlocks>, shape, queue, "KdaStep", p, *p.batch,
                    (one_wave ? kWideBlocks : kHeldBlocks) * units, units, true);
    }
  }
  shape.shared = sizeof(KdaWideShared<T, StateT, 0>);
  Launch(&KdaWideKernel<T, StateT, 0, kWideBlocks>, shape, queue, "KdaStep", p, *p.batch, kWideBlocks * units, units,
         few);
}

template <typename T, typename StateT>
void Step(const Device& device, const KdaParams& p, int max_tokens, cudaStream_t queue) {
  const SequenceBatch& batch = *p.batch;
  bool single = true;
  for (int s = 0; s < batch.num_sequences; ++s) {
    single = single && batch.host_token_begin[s + 1] - batch.host_token_begin[s] == 1;
  }
  const bool aligned = RowsAligned(p, 4);
  const int64_t items = static_cast<int64_t>(batch.num_sequences) * p.heads;
  LaunchShape shape;
  shape.early = true;
  shape.grid = dim3(static_cast<unsigned>(p.heads), static_cast<unsigned>(batch.num_sequences));
  if (single && aligned && !device.batch_invariant && items > device.multiprocessors) {
    return StepWide<T, StateT>(device, p, shape, queue);
  }
  shape.block = dim3(kStepThreads);
  shape.shared = sizeof(KdaStepShared<T, kStepChunk>);
  auto* kernel = &KdaStepKernel<T, StateT, kStepChunk, true>;
  if (!aligned) {
    kernel = &KdaStepKernel<T, StateT, kStepChunk, false>;
  } else if (single) {
    shape.shared = sizeof(KdaStepShared<T, 1>);
    kernel = &KdaStepKernel<T, StateT, 1, true>;
  }
  Launch(kernel, shape, queue, "KdaStep", p, batch, max_tokens, p.slots_settled);
}

template <typename T, typename StateT>
void Any(const KdaParams& p, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch->num_sequences));
  shape.block = dim3(kAnyThreads);
  shape.shared = (5 * p.head_dim + 32) * sizeof(float);
  Launch(&KdaAnyKernel<T, StateT>, shape, queue, "KdaAny", p, *p.batch);
}

// Scratch of prefill, all for split runs. One function lays it out and thereby says its size. Not smaller for more
// tokens.
struct PrefillScratch {
  int64_t borders;    // that have room
  int64_t snapshots;  // (snapshot, head) pairs that have room
  KdaBorder* border;
  uint32_t* transition;
  uint16_t* queries;
  size_t bytes;
};
PrefillScratch LayoutPrefill(const Device& device, void* base, int64_t tokens, int64_t heads) {
  PrefillScratch scratch = {};
  size_t offset = 0;
  const auto take = [&](int64_t bytes) {
    void* piece = static_cast<char*>(base) + offset;
    offset += RoundUp(bytes, 256);
    return piece;
  };
  if (heads < device.multiprocessors && tokens >= 2 * kLeastKdaSegment && !device.batch_invariant) {
    scratch.borders = 3 * device.multiprocessors;
    scratch.snapshots = kMostSnapshotHeads;
    scratch.border = static_cast<KdaBorder*>(take(scratch.borders * static_cast<int64_t>(sizeof(KdaBorder))));
    scratch.transition = static_cast<uint32_t*>(take(scratch.snapshots * kTransitionWords * 4));
    scratch.queries = static_cast<uint16_t*>(take(tokens * heads * kTileDim * 2));
  }
  scratch.bytes = offset;
  return scratch;
}

// Long sequences of a step, longest first, and how they are split.
struct PrefillPlan {
  KdaOrder order;
  unsigned sequences = 0;  // of the grid
  KdaSplit split = {};
};

PrefillPlan PlanPrefill(const Device& device, const KdaParams& p) {
  const SequenceBatch& batch = *p.batch;
  PrefillPlan plan;
  std::vector<int> longs;
  const auto length = [&](int s) { return batch.host_token_begin[s + 1] - batch.host_token_begin[s]; };
  for (int s = 0; s < batch.num_sequences; ++s) {
    if (length(s) > StepLimit(p)) longs.push_back(s);
  }
  if (longs.empty()) return plan;
  std::stable_sort(longs.begin(), longs.end(), [&](int a, int b) { return length(a) > length(b); });
  plan.order.given = longs.size() <= KdaOrder::kMost;
  plan.sequences = static_cast<unsigned>(plan.order.given ? longs.size() : batch.num_sequences);
  if (!plan.order.given) return plan;
  std::copy(longs.begin(), longs.end(), plan.order.sequence);

  const PrefillScratch scratch = LayoutPrefill(device, p.scratch, batch.num_tokens, p.heads);
  if (!RowsAligned(p, 8) || batch.num_snapshots * int64_t{p.heads} > scratch.snapshots) return plan;
  const int64_t longest = length(longs[0]);
  double runs = 0;
  int64_t span = 0;  // from the first tile's begin
  for (const int s : longs) {
    runs += static_cast<double>(p.heads) * length(s) / static_cast<double>(longest);
    span = std::max<int64_t>(span, length(s) + batch.host_context[s] % kTileRows);
  }
  const KdaSegments lengths = ChooseKdaSegments(span, runs, p.conv_taps == nullptr, device.multiprocessors);
  if (lengths.first == 0) return plan;
  const int64_t segments = 1 + CeilDiv(std::max<int64_t>(span - lengths.first, 0), lengths.others);
  if (static_cast<int64_t>(longs.size()) * segments * p.heads > scratch.borders) return plan;
  plan.split = {static_cast<int>(lengths.first),
                static_cast<int>(lengths.others),
                static_cast<int>(segments),
                scratch.border,
                scratch.transition,
                scratch.queries};
  return plan;
}

template <bool kBounded, typename StateT>
auto* FusedKernel(bool core, bool split, bool aligned) {
  if (split) {
    return core ? &KdaFusedKernel<kBounded, true, false, true, true, StateT>
                : &KdaFusedKernel<kBounded, false, false, true, true, StateT>;
  }
  if (aligned) {
    return core ? &KdaFusedKernel<kBounded, true, false, false, true, StateT>
                : &KdaFusedKernel<kBounded, false, true, false, true, StateT>;
  }
  return core ? &KdaFusedKernel<kBounded, true, false, false, false, StateT>
              : &KdaFusedKernel<kBounded, false, true, false, false, StateT>;
}

template <typename StateT>
void Prefill(const Device& device, const KdaParams& p, cudaStream_t queue) {
  const PrefillPlan plan = PlanPrefill(device, p);
  if (plan.sequences == 0) return;
  const SequenceBatch& batch = *p.batch;
  const unsigned heads = static_cast<unsigned>(p.heads);
  const bool core = p.conv_taps == nullptr, split = plan.split.first > 0, aligned = RowsAligned(p, 8);
  const auto kernel = p.gate_kind == KdaGate::kBounded ? FusedKernel<true, StateT>(core, split, aligned)
                                                       : FusedKernel<false, StateT>(core, split, aligned);
  const unsigned parts = split ? 2 * static_cast<unsigned>(plan.split.segments) : 1;
  Launch(kernel,
         {.grid = dim3(heads, plan.sequences, parts), .block = dim3(kFusedThreads), .shared = sizeof(KdaFusedShared)},
         queue, "KdaFused", p, batch, plan.order, plan.split, StepLimit(p));
  if (split) {
    const bool teller = kTileDim / 16 * heads * plan.sequences <= static_cast<unsigned>(device.multiprocessors);
    Launch(teller ? &KdaComposeKernel<true, StateT> : &KdaComposeKernel<false, StateT>,
           {.grid = dim3(kTileDim / 16, heads, plan.sequences),
            .block = dim3(static_cast<unsigned>(ComposeThreads(teller))),
            .shared = sizeof(KdaComposeShared),
            .early = true},
           queue, "KdaCompose", p, batch, plan.order, plan.split);
    const int64_t blocks = int64_t{heads} * plan.sequences * CorrectBlocks(plan.split, !core, 1);
    const int turns = static_cast<int>(std::clamp<int64_t>(blocks / (2 * device.multiprocessors), 1, kCorrectTurns));
    Launch(core ? &KdaCorrectKernel<false> : &KdaCorrectKernel<true>,
           {.grid = dim3(heads, CorrectBlocks(plan.split, !core, turns), plan.sequences),
            .block = dim3(kCorrectThreads),
            .shared = sizeof(KdaCorrectShared),
            .early = true},
           queue, "KdaCorrect", p, batch, plan.order, plan.split, turns);
  }
  if (core) return;
  Launch(&KdaConvStateKernel,
         {.grid = dim3(heads, static_cast<unsigned>(batch.num_sequences)), .block = dim3(kConvStateThreads)}, queue,
         "KdaConvState", p, batch, kStepLimit);
}

template <typename StateT>
void KdaOfState(const Device& device, const KdaParams& p, cudaStream_t queue) {
  if (!HasFastPath(p) || (device.act == DType::kF32 && StepLimit(p) == 0)) {
    return device.act == DType::kBF16 ? Any<bf16, StateT>(p, queue) : Any<float, StateT>(p, queue);
  }
  if (device.act == DType::kF32) return Step<float, StateT>(device, p, 1 << 30, queue);
  Prefill<StateT>(device, p, queue);
  const SequenceBatch& batch = *p.batch;
  const int limit = StepLimit(p);
  for (int s = 0; s < batch.num_sequences && limit > 0; ++s) {
    if (batch.host_token_begin[s + 1] - batch.host_token_begin[s] <= limit)
      return Step<bf16, StateT>(device, p, limit, queue);
  }
}

}  // namespace

size_t KdaScratchBytes(const Device& device, int64_t tokens, int32_t heads, int32_t head_dim) {
  if (device.act != DType::kBF16 || head_dim != kTileDim) return 256;
  return std::max<size_t>(256, LayoutPrefill(device, nullptr, tokens, heads).bytes);
}

void Kda(const Device& device, const KdaParams& params, cudaStream_t queue) {
  K3_REQUIRE(params.batch != nullptr, "batch is null");
  if (params.batch->num_tokens == 0) return;
  CheckKda(device, params);
  params.state_dtype == DType::kF32 ? KdaOfState<float>(device, params, queue)
                                    : KdaOfState<bf16>(device, params, queue);
}

}  // namespace k3::cuda
