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

struct KdaScratch {
  KdaPlan* plan;
  KdaChunk* chunks;        // [tokens]
  KdaSegment* segments;    // [tokens]
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

// One block. Fills plan, chunks and segments for the sequences of more than `step_tokens` tokens.
__global__ void KdaPlanKernel(SequenceBatch batch, int step_tokens, int segment_chunks, int rounds,
                              KdaScratch scratch) {
  int* shared = DynamicShared<int>();
  const int threads = blockDim.x;
  KdaChunk* chunks = scratch.chunks;

  // Chunk ends, in row order.
  int count = 0;
  for (int base = 0; base < batch.num_tokens; base += threads) {
    const int row = base + threadIdx.x;
    bool end = false, snapshot = false;
    int sequence = 0;
    if (row < batch.num_tokens) {
      sequence = batch.sequence_of_token[row];
      const int next = batch.token_begin[sequence + 1];
      if (next - batch.token_begin[sequence] > step_tokens) {
        if (batch.num_snapshots > 0) {
          const int i = FirstSnapshot(batch, row);
          snapshot = i < batch.num_snapshots && batch.snapshot_row[i] == row;
        }
        end = snapshot || row + 1 == next || (batch.position[row] + 1) % kChunkRows == 0;
      }
    }
    int total;
    const int index = count + BlockScan(end, shared, total) - 1;
    if (end) chunks[index] = {0, row + 1, sequence, snapshot};
    count += total;
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
    int total;
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
