#include <algorithm>

#include "kernels/cuda/kda_any.cuh"
#include "kernels/cuda/kda_prepare.cuh"
#include "kernels/cuda/kda_recur.cuh"
#include "kernels/cuda/kda_step.cuh"
#include "kernels/cuda/kda_wide.cuh"
#include "kernels/cuda/op_table.h"

namespace k3::cuda {
namespace {

constexpr int kStepLimit = 8;              // sequences of at most so many tokens take the fused step (bf16)
constexpr int64_t kMaxChunkHeads = 16384;  // of one round: 1.1 GiB of chunk data
constexpr int64_t kMaxBorders = 512;       // (segment, head) pairs of one round whose borders have room
constexpr int kPlanThreads = 1024;

// Most chunks that sequences of together `tokens` tokens can have without snapshots: each long sequence may begin and
// end within a chunk.
int64_t ChunkBound(int64_t tokens, int64_t sequences) {
  const int64_t longs = std::min(sequences, tokens / (kStepLimit + 1));
  return longs == 0 ? 0 : tokens / kChunkRows + 2 * longs;
}

// One function lays out the scratch and thereby says its size. Not smaller for more tokens or sequences.
KdaScratch Layout(void* base, int64_t tokens, int64_t sequences, int64_t heads) {
  KdaScratch scratch = {};
  size_t offset = 0;
  const auto take = [&](size_t bytes) {
    void* piece = static_cast<char*>(base) + offset;
    offset += RoundUp(static_cast<int64_t>(bytes), 256);
    return piece;
  };
  const int64_t bound = ChunkBound(tokens, sequences);
  if (bound == 0) return scratch;
  scratch.round_chunks = static_cast<int>(std::min(bound, std::max<int64_t>(64, kMaxChunkHeads / heads)));
  // A run of one chunk needs no border.
  scratch.max_segments =
      static_cast<int>(std::min<int64_t>(scratch.round_chunks, std::max<int64_t>(1, kMaxBorders / heads)));
  scratch.plan = static_cast<KdaPlan*>(take(sizeof(KdaPlan)));
  scratch.chunks = static_cast<KdaChunk*>(take(tokens * sizeof(KdaChunk)));
  scratch.segments = static_cast<KdaSegment*>(take(tokens * sizeof(KdaSegment)));
  scratch.extra = static_cast<int*>(take((2 * tokens + 1) * sizeof(int)));
  scratch.aligned = static_cast<int*>(take((sequences + 1) * sizeof(int)));
  scratch.data = static_cast<KdaChunkData*>(take(scratch.round_chunks * heads * sizeof(KdaChunkData)));
  scratch.border = static_cast<KdaSegmentData*>(take(scratch.max_segments * heads * sizeof(KdaSegmentData)));
  scratch.bytes = offset;
  return scratch;
}

constexpr int kUnsplit = 1 << 30;
constexpr int kUnsliced = 1 << 24;
constexpr int kMostSliceChunks = 64;

// How the serial part is spread over the device.
struct RecurVariant {
  int warps;           // of a block: 8 / warps blocks share a (segment, head)
  int segment_chunks;  // length of a segment; kUnsplit: one segment a run
  int slice_chunks = kUnsliced;
};

// A round has about `runs` runs and at most `most_runs`, the longest of `longest` chunks.
RecurVariant ChooseRecur(const Device& device, int64_t runs, int64_t most_runs, int64_t longest, int64_t heads,
                         int64_t max_segments) {
  RecurVariant variant{kValueBlocks, kUnsplit};
  // The answer of a sequence must not depend on its company: whole heads a block even where that idles the device, as
  // blocks of fewer warps leave the gated norm to a kernel that adds squares of rounded outputs, in another order.
  if (device.batch_invariant) return variant;
  while (variant.warps > 2 && runs * heads * (kValueBlocks / variant.warps) * 2 <= device.multiprocessors) {
    variant.warps /= 2;
  }
  const int64_t blocks = runs * heads * (kValueBlocks / variant.warps);
  // Segments cost a second pass over the state products; they pay once most of the device would idle and runs are long.
  const int64_t want = std::min({max_segments / most_runs, 2 * device.multiprocessors / blocks, longest / 8});
  if (want >= 3) {
    variant.segment_chunks = static_cast<int>(CeilDiv(longest, want));
  } else if (most_runs == 1) {
    // Slices let the preparation run beside the recurrence. Four warps a block rather than two: that leaves the
    // preparation more multiprocessors of its own, and what the recurrence loses is hidden.
    variant.warps = std::max(variant.warps, 4);
    variant.slice_chunks = static_cast<int>(std::min<int64_t>(kMostSliceChunks, RoundUp(CeilDiv(longest, 3), 16)));
  }
  return variant;
}

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
  K3_REQUIRE(p.conv_taps && p.dt_bias && p.a_log && p.norm_weight && p.state && (p.conv_state || p.conv_width == 1) &&
                 p.scratch,
             "conv_taps, dt_bias, a_log, norm_weight, state, conv_state or scratch is null");
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
  return p.head_dim == kStepDim && p.conv_width == kStepTaps && Aligned(p.state, 16) && p.slot_stride % 16 == 0 &&
         Aligned(p.conv_state, 16) && Aligned(p.conv_taps, 16) && Aligned(p.dt_bias, 16) && Aligned(p.norm_weight, 16);
}

// Rows of q, k, v and the gates start on multiples of `elements` elements.
bool RowsAligned(const KdaParams& p, int64_t elements) {
  for (const MatrixView* view : {&p.qkv, &p.decay, &p.gate, &p.out}) {
    if (view->ld % elements != 0 || !Aligned(view->data, elements * SizeOf(view->dtype))) return false;
  }
  return true;
}

// The kernels for single tokens, by the number of states: up to one a multiprocessor KdaStepKernel is fastest, beyond
// KdaWideKernel (measured between 32 and 12,288 states), which from kAheadStates times as many on asks for states
// ahead, by one a multiprocessor.
constexpr int kAheadStates = 20;

template <typename T, typename StateT>
void Step(const Device& device, const KdaParams& p, int max_tokens, cudaStream_t queue) {
  const SequenceBatch& batch = *p.batch;
  bool single = true;
  for (int s = 0; s < batch.num_sequences; ++s) {
    single = single && batch.host_token_begin[s + 1] - batch.host_token_begin[s] <= 1;
  }
  const bool aligned = RowsAligned(p, 4);
  const int64_t items = static_cast<int64_t>(batch.num_sequences) * p.heads;
  LaunchShape shape;
  shape.early = true;
  shape.grid = dim3(static_cast<unsigned>(p.heads), static_cast<unsigned>(batch.num_sequences));
  shape.block = dim3(kStepThreads);
  shape.shared = sizeof(KdaStepShared<T, kStepChunk>);
  auto* kernel = &KdaStepKernel<T, StateT, kStepChunk, true>;
  if (!aligned) {
    kernel = &KdaStepKernel<T, StateT, kStepChunk, false>;
  } else if (single && (device.batch_invariant || items <= device.multiprocessors)) {
    shape.shared = sizeof(KdaStepShared<T, 1>);
    kernel = &KdaStepKernel<T, StateT, 1, true>;
  } else if (single) {
    shape.block = dim3(kWideThreads);
    shape.shared = sizeof(KdaWideShared<T>);
    const int ahead = items > int64_t{kAheadStates} * device.multiprocessors ? device.multiprocessors : 0;
    return Launch(&KdaWideKernel<T, StateT>, shape, queue, "KdaStep", p, batch, max_tokens, ahead);
  }
  Launch(kernel, shape, queue, "KdaStep", p, batch, max_tokens);
}

template <typename T, typename StateT>
void Any(const KdaParams& p, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch->num_sequences));
  shape.block = dim3(kAnyThreads);
  shape.shared = (5 * p.head_dim + 32) * sizeof(float);
  Launch(&KdaAnyKernel<T, StateT>, shape, queue, "KdaAny", p, *p.batch);
}

template <typename StateT>
void Chunked(const Device& device, const KdaParams& p, cudaStream_t queue) {
  const SequenceBatch& batch = *p.batch;
  int64_t chunks = batch.num_snapshots, longest = 0, longs = 0;
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int64_t begin = batch.host_context[s];
    const int64_t tokens = batch.host_token_begin[s + 1] - batch.host_token_begin[s];
    if (tokens <= kStepLimit) continue;
    const int64_t own = CeilDiv(begin + tokens, kChunkRows) - begin / kChunkRows;
    chunks += own;
    longest = std::max(longest, own);
    ++longs;
  }
  if (longs == 0) return;
  const KdaScratch scratch = Layout(p.scratch, batch.num_tokens, batch.num_sequences, p.heads);
  const int rounds = static_cast<int>(CeilDiv(chunks, scratch.round_chunks));
  K3_REQUIRE(rounds <= kMaxKdaRounds, "the step has " + std::to_string(chunks) + " chunks, at most " +
                                          std::to_string(int64_t{kMaxKdaRounds} * scratch.round_chunks) + " fit");
  // A round holds whole short sequences or a part of a long one.
  const int64_t most_runs = std::min<int64_t>(longs, scratch.round_chunks);
  const int64_t runs = std::min(most_runs, CeilDiv(scratch.round_chunks * longs, chunks) + 1);
  longest = std::min<int64_t>(longest + batch.num_snapshots, scratch.round_chunks);
  const RecurVariant variant = ChooseRecur(device, runs, most_runs, longest, p.heads, scratch.max_segments);
  const bool split = variant.segment_chunks != kUnsplit;
  const bool pairs_aligned = RowsAligned(p, 2), packs_aligned = RowsAligned(p, 8);
  const bool norm = variant.warps == kValueBlocks && packs_aligned;

  Launch(&KdaPlanKernel, {.grid = dim3(1), .block = dim3(kPlanThreads), .shared = 33 * sizeof(int)}, queue, "KdaPlan",
         batch, kStepLimit, variant.segment_chunks, rounds, scratch);
  const bool sliced = variant.slice_chunks < longest;
  const unsigned heads = static_cast<unsigned>(p.heads);
  const unsigned groups = static_cast<unsigned>(kValueBlocks / variant.warps);
  void (*prepare)(KdaParams, SequenceBatch, KdaScratch, int, bool);
  if (p.gate_kind == KdaGate::kBounded) {
    prepare = packs_aligned ? &KdaPrepareKernel<true, true> : &KdaPrepareKernel<true, false>;
  } else {
    prepare = packs_aligned ? &KdaPrepareKernel<false, true> : &KdaPrepareKernel<false, false>;
  }
  auto* recur = norm ? &KdaRecurKernel<true, true, false, StateT> : &KdaRecurKernel<true, false, false, StateT>;
  if (sliced) recur = norm ? &KdaRecurKernel<true, true, true, StateT> : &KdaRecurKernel<true, false, true, StateT>;
  for (int round = 0; round < rounds; ++round) {
    const int64_t round_chunks =
        std::min<int64_t>(scratch.round_chunks, chunks - int64_t{round} * scratch.round_chunks);
    const int64_t segments = std::min(round_chunks, most_runs * (split ? CeilDiv(longest, variant.segment_chunks) : 1));
    LaunchShape recur_shape;
    recur_shape.grid = dim3(groups, heads, static_cast<unsigned>(segments));
    recur_shape.block = dim3(static_cast<unsigned>(32 * variant.warps));
    recur_shape.shared = KdaRecurShared(norm);
    for (int64_t begin = 0; begin < round_chunks; begin += variant.slice_chunks) {
      const KdaSlice slice{static_cast<int>(begin), variant.slice_chunks};
      // The launch before is then the recurrence of another slice: of this round or, of other data, the last.
      const bool tail = begin > 0 || (sliced && round > 0);
      KdaScratch from = scratch;
      from.data += begin * p.heads;
      const int64_t rows = std::min<int64_t>(variant.slice_chunks, round_chunks - begin) + tail;
      Launch(prepare,
             {.grid = dim3(heads, static_cast<unsigned>(rows)),
              .block = dim3(kPrepareThreads),
              .shared = sizeof(KdaPrepareShared),
              .early = tail},
             queue, "KdaPrepare", p, batch, from, static_cast<int>(round * int64_t{scratch.round_chunks} + begin),
             tail);
      if (split) {
        LaunchShape shape = recur_shape;
        shape.grid.x *= 2;
        shape.shared = KdaRecurShared(false);
        Launch(&KdaRecurKernel<false, false, false, StateT>, shape, queue, "KdaTransitions", p, batch, scratch, round,
               slice, pairs_aligned);
        Launch(&KdaComposeKernel,
               {.grid = dim3(kValueBlocks, heads, static_cast<unsigned>(segments)),
                .block = dim3(kComposeThreads),
                .shared = kValueBlock * (kChunkDim + 4) * sizeof(float)},
               queue, "KdaCompose", scratch, p.heads, round);
      }
      Launch(recur, recur_shape, queue, "KdaRecur", p, batch, scratch, round, slice, pairs_aligned);
    }
    const int first = norm ? scratch.round_chunks : 0;
    const int rows = scratch.round_chunks - first + (round + 1 == rounds ? batch.num_sequences : 0);
    if (rows > 0) {
      Launch(&KdaFinishKernel, {.grid = dim3(heads, static_cast<unsigned>(rows)), .block = dim3(kFinishThreads)}, queue,
             "KdaFinish", p, batch, scratch, round, kStepLimit, RowsAligned(p, 4), first);
    }
  }
}

template <typename StateT>
void KdaOfState(const Device& device, const KdaParams& p, cudaStream_t queue) {
  if (!HasFastPath(p)) {
    return device.act == DType::kBF16 ? Any<bf16, StateT>(p, queue) : Any<float, StateT>(p, queue);
  }
  if (device.act == DType::kF32) return Step<float, StateT>(device, p, 1 << 30, queue);
  Chunked<StateT>(device, p, queue);
  const SequenceBatch& batch = *p.batch;
  for (int s = 0; s < batch.num_sequences; ++s) {
    if (batch.host_token_begin[s + 1] - batch.host_token_begin[s] <= kStepLimit)
      return Step<bf16, StateT>(device, p, kStepLimit, queue);
  }
}

}  // namespace

size_t KdaScratchBytes(const Device& device, int64_t tokens, int64_t sequences, int32_t heads, int32_t head_dim,
                       int32_t conv_width) {
  if (device.act != DType::kBF16 || head_dim != kChunkDim || conv_width != kChunkTaps) return 256;
  return std::max<size_t>(256, Layout(nullptr, tokens, sequences, heads).bytes);
}

void Kda(const Device& device, const KdaParams& params, cudaStream_t queue) {
  K3_REQUIRE(params.batch != nullptr, "batch is null");
  if (params.batch->num_tokens == 0) return;
  CheckKda(device, params);
  params.state_dtype == DType::kF32 ? KdaOfState<float>(device, params, queue)
                                    : KdaOfState<bf16>(device, params, queue);
}

}  // namespace k3::cuda
