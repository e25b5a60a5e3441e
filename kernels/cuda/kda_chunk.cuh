#pragma once

#include "kernels/cuda/kda_common.cuh"
#include "kernels/cuda/launch.cuh"

// The tables and the scratch of the chunked KDA path (prefill): sequences are cut into chunks of at most 64 tokens,
// chunks into rounds that fit the scratch, and the chunks of a sequence within a round (a run) into segments that are
// walked in parallel.
namespace k3::cuda {

constexpr int kChunkRows = 64;
constexpr int kChunkDim = 128;
constexpr int kChunkTaps = 4;
constexpr int kMaxKdaRounds = 512;

// Chunk ends lie where the absolute position is a multiple of 64, so that results do not depend on how a prompt was
// split into steps (at multiples of 64), and after every row that is to be snapshot.
struct KdaChunk {
  int begin, end;  // packed rows
  int sequence;
  int snapshot;  // states are to be stored after it
};

struct KdaSegment {
  int chunk_begin, chunk_end;
  int sequence;
  int first, last;  // of its run
};

struct KdaPlan {
  int chunks;
  int segment_begin[kMaxKdaRounds + 1];  // first segment of each round, then their number
};

// What the preparation leaves of one (chunk, head), in the order in which the lanes of the recurrence take it: blocks
// of 32 lanes x 16 bytes, each holding the two 16-bit B fragments of two neighbouring 8-wide column tiles.
struct KdaChunkData {
  uint4 minus_w[4][8][32];     // [16 tokens][16 channels]: -W, contraction over channels
  uint4 restored_k[4][8][32];  // [16 tokens][16 channels]: k exp(G_C - G), contraction over tokens
  float decay[kChunkDim];      // exp(G_C)
  uint4 decayed_q[4][8][32];   // [16 tokens][16 channels]: q exp(G), contraction over channels
  uint4 scores[10][32];        // lower 16 x 16 tiles of M by rows, contraction over the earlier tokens
  uint4 u[8][4][32];           // [16 value columns][16 tokens]: U transposed, accumulator fragments
};
constexpr uint32_t kKdaStateBytes = offsetof(KdaChunkData, decayed_q);  // enough to advance a state
constexpr uint32_t kKdaOutputBytes = offsetof(KdaChunkData, u);
static_assert(kKdaStateBytes % 16 == 0 && kKdaOutputBytes % 16 == 0 && sizeof(KdaChunkData) % 128 == 0);

// The state at the border of two segments and what a segment does to it, [K, V] fp32 each.
struct KdaSegmentData {
  float in[kChunkDim * kChunkDim];          // state before the segment
  float zero[kChunkDim * kChunkDim];        // result from a zero state
  float transition[kChunkDim * kChunkDim];  // P: out = P in + zero
};

// A part of a round that is one run, not cut into segments: its chunks [begin, begin + chunks). The recurrence of one
// slice runs beside the preparation of the next, which starts as soon as all blocks of the former have started.
struct KdaSlice {
  int begin, chunks;
};

struct KdaScratch {
  KdaPlan* plan;
  KdaChunk* chunks;        // [tokens]
  KdaSegment* segments;    // [tokens]
  int* extra;              // [snapshots + 1], at most one a token: plan only
  int* aligned;            // [sequences + 1]: plan only
  KdaChunkData* data;      // [round_chunks][heads]
  KdaSegmentData* border;  // [max_segments][heads], by segment of the round
  int round_chunks;
  int max_segments;
  size_t bytes;
};

// Largest `value` over the threads up to this one, and over all.
__device__ __forceinline__ int BlockMaxScan(int value, int* shared, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value = max(value, other);
  }
  __syncthreads();
  if (lane == 31) shared[warp] = value;
  __syncthreads();
  total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    if (w < warp) value = max(value, shared[w]);
    total = max(total, shared[w]);
  }
  return value;
}

// One block. Fills plan, chunks and segments for the sequences of more than `step_tokens` tokens. Chunks end at aligned
// positions and at sequences' ends, which are counted, and at other snapshots' rows ("extra" cuts), which are merged
// in.
__global__ void KdaPlanKernel(SequenceBatch batch, int step_tokens, int segment_chunks, int rounds,
                              KdaScratch scratch) {
  int* shared = DynamicShared<int>();
  const int threads = blockDim.x;
  KdaChunk* chunks = scratch.chunks;

  const auto is_long = [&](int sequence) {
    return batch.token_begin[sequence + 1] - batch.token_begin[sequence] > step_tokens;
  };
  // Whether snapshot i cuts a chunk where the positions do not, and is the first of its row to do so.
  const auto is_extra = [&](int i) {
    const int row = batch.snapshot_row[i];
    if (row == kNoRow) return false;
    const int sequence = batch.sequence_of_token[row];
    return is_long(sequence) && (batch.position[row] + 1) % kChunkRows != 0 &&
           row + 1 != batch.token_begin[sequence + 1] && (i == 0 || batch.snapshot_row[i - 1] != row);
  };

  // extra[i]: extra cuts among the snapshots before i.
  int total, extras = 0;
  for (int base = 0; base < batch.num_snapshots; base += threads) {
    const int i = base + threadIdx.x;
    const bool extra = i < batch.num_snapshots && is_extra(i);
    const int through = extras + BlockScan(extra, shared, total);
    if (i < batch.num_snapshots) scratch.extra[i] = through - extra;
    extras += total;
  }
  if (threadIdx.x == 0) scratch.extra[batch.num_snapshots] = extras;
  __syncthreads();
  const auto extras_before = [&](int row) { return extras == 0 ? 0 : scratch.extra[FirstSnapshot(batch, row)]; };

  // aligned[s]: chunk ends by position, or by the sequence's end, before sequence s.
  int aligned = 0;
  for (int base = 0; base < batch.num_sequences; base += threads) {
    const int sequence = base + threadIdx.x;
    int own = 0;
    if (sequence < batch.num_sequences && is_long(sequence)) {
      const int context = batch.context[sequence];
      const int end = context + batch.token_begin[sequence + 1] - batch.token_begin[sequence];
      own = (end + kChunkRows - 1) / kChunkRows - context / kChunkRows;
    }
    const int through = aligned + BlockScan(own, shared, total);
    if (sequence < batch.num_sequences) scratch.aligned[sequence] = through - own;
    aligned += total;
  }
  if (threadIdx.x == 0) scratch.aligned[batch.num_sequences] = aligned;
  __syncthreads();

  // Every cut finds the place of its chunk: the number of cuts before it.
  const int count = aligned + extras;
  for (int i = threadIdx.x; i < aligned; i += threads) {
    int sequence = 0, high = batch.num_sequences - 1;  // the last whose first aligned cut is at most i
    while (sequence < high) {
      const int middle = (sequence + high + 1) / 2;
      if (scratch.aligned[middle] <= i) {
        sequence = middle;
      } else {
        high = middle - 1;
      }
    }
    const int begin = batch.token_begin[sequence];
    const int end = min(batch.token_begin[sequence + 1], begin + (i - scratch.aligned[sequence] + 1) * kChunkRows -
                                                             batch.context[sequence] % kChunkRows);
    const int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, end - 1) : 0;
    chunks[i + extras_before(end - 1)] = {0, end, sequence,
                                          snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] == end - 1};
  }
  for (int i = threadIdx.x; extras > 0 && i < batch.num_snapshots; i += threads) {
    if (!is_extra(i)) continue;
    const int row = batch.snapshot_row[i];
    const int sequence = batch.sequence_of_token[row];
    const int context = batch.context[sequence];
    const int aligned_before = scratch.aligned[sequence] + batch.position[row] / kChunkRows - context / kChunkRows;
    chunks[aligned_before + scratch.extra[i]] = {0, row + 1, sequence, 1};
  }
  __syncthreads();

  // Chunk begins, and segments: a run starts with a sequence or a round, a segment every `segment_chunks` of it.
  int run_begin = 0, segments = 0;
  for (int base = 0; base < count; base += threads) {
    const int c = base + threadIdx.x;
    const auto starts_run = [&](int chunk) {
      return chunk == 0 || chunk % scratch.round_chunks == 0 || chunks[chunk].sequence != chunks[chunk - 1].sequence;
    };
    bool run_start = false;
    if (c < count) {
      run_start = starts_run(c);
      const bool continues = c > 0 && chunks[c].sequence == chunks[c - 1].sequence;
      chunks[c].begin = continues ? chunks[c - 1].end : batch.token_begin[chunks[c].sequence];
    }
    const int begin = max(run_begin, BlockMaxScan(run_start ? c : 0, shared, total));
    run_begin = max(run_begin, total);
    const bool segment_start = c < count && (c - begin) % segment_chunks == 0;
    const int index = segments + BlockScan(segment_start, shared, total) - 1;
    segments += total;
    if (c < count) {
      const bool run_end = c + 1 == count || starts_run(c + 1);
      KdaSegment& segment = scratch.segments[index];
      if (segment_start) {
        segment.chunk_begin = c;
        segment.sequence = chunks[c].sequence;
        segment.first = run_start;
        if (c % scratch.round_chunks == 0) scratch.plan->segment_begin[c / scratch.round_chunks] = index;
      }
      if (run_end || (c + 1 - begin) % segment_chunks == 0) {
        segment.chunk_end = c + 1;
        segment.last = run_end;
      }
    }
  }
  for (int round = threadIdx.x; round <= rounds; round += threads) {
    if (round * scratch.round_chunks >= count) scratch.plan->segment_begin[round] = segments;
  }
  if (threadIdx.x == 0) scratch.plan->chunks = count;
}

}  // namespace k3::cuda
