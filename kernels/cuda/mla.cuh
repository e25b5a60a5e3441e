#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/op_params.h"

// MLA in the absorbed form (spec 3.4): what all variants share, the append, and the variant for any shape and type.
// L latent, R rope dimension; a line is [c | k_pe] of L + R elements. A row is a (token, head) pair; a tile is up to 64
// consecutive rows of one sequence.
namespace k3::cuda {

constexpr int kMlaTileRows = 64;

// The rows of one launch: those of packed tokens [token_begin, token_end).
struct MlaRows {
  int token_begin, token_end;
  int heads;
  int tiles;
  int tiles_per_sequence;  // where every sequence has as many, else 0
  bool one_token_each;     // of every sequence: what is where follows without a load
};

struct MlaTile {
  int sequence;
  int row;    // first, counted from (token_begin, head 0)
  int count;  // rows
};

// Cache line of a position, or null for a page that the table marks as absent.
template <typename PageT>
__device__ __forceinline__ PageT* MlaLine(const MlaPages& pages, const SequenceBatch& batch, int sequence, int position,
                                          int line) {
  const int page = batch.page_table[sequence * batch.page_table_stride + position / pages.page_size];
  if (page < 0) return nullptr;
  return reinterpret_cast<PageT*>(static_cast<char*>(pages.data) + page * pages.page_stride) +
         static_cast<int64_t>(position % pages.page_size) * line;
}

// Rows of `sequence` in this launch; `row` receives the first.
__device__ __forceinline__ int MlaSequenceRows(const MlaRows& rows, const SequenceBatch& batch, int sequence,
                                               int& row) {
  if (rows.one_token_each) {
    row = sequence * rows.heads;
    return rows.heads;
  }
  const int begin = max(batch.token_begin[sequence], rows.token_begin);
  const int end = min(batch.token_begin[sequence + 1], rows.token_end);
  row = (begin - rows.token_begin) * rows.heads;
  return max(0, end - begin) * rows.heads;
}

// Tile number `index` of a sequence.
__device__ __forceinline__ MlaTile MlaTileOf(const MlaRows& rows, const SequenceBatch& batch, int sequence, int index) {
  MlaTile tile{};
  const int count = MlaSequenceRows(rows, batch, sequence, tile.row);
  tile.sequence = sequence;
  tile.row += index * kMlaTileRows;
  tile.count = min(kMlaTileRows, count - index * kMlaTileRows);
  return tile;
}

// Tile number `index` of the launch, found by one warp; all its lanes return it.
__device__ __forceinline__ MlaTile FindMlaTile(const MlaRows& rows, const SequenceBatch& batch, int index, int lane) {
  int sequence = 0;
  if (rows.tiles_per_sequence > 0) {
    sequence = index / rows.tiles_per_sequence;
    index %= rows.tiles_per_sequence;
  } else {
    int before = 0;
    for (int base = 0;; base += 32) {
      int row;
      const int tiles = base + lane < batch.num_sequences
                            ? (MlaSequenceRows(rows, batch, base + lane, row) + kMlaTileRows - 1) / kMlaTileRows
                            : 0;
      int sum = tiles;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += other;
      }
      const unsigned reached = __ballot_sync(kAllLanes, before + sum > index);
      if (reached != 0) {
        const int owner = __ffs(static_cast<int>(reached)) - 1;
        sequence = base + owner;
        index -= before + __shfl_sync(kAllLanes, sum - tiles, owner);
        break;
      }
      before += __shfl_sync(kAllLanes, sum, 31);
      if (base + 32 >= batch.num_sequences) return {};  // no such tile
    }
  }
  return MlaTileOf(rows, batch, sequence, index);
}

constexpr int kAppendThreads = 192;

// One block a token: norm of the latent, rope part as it is.
template <typename T, typename PageT>
__global__ void MlaAppendKernel(MlaAppendParams p, SequenceBatch batch) {
  __shared__ float partial[kAppendThreads / 32];
  const int token = blockIdx.x;
  const int line = p.latent_dim + p.rope_dim;
  PageT* to = MlaLine<PageT>(p.pages, batch, batch.sequence_of_token[token], batch.position[token], line);
  GridDependencyWait();
  GridDependencyRelease();
  if (to == nullptr) return;
  const T* from = static_cast<const T*>(p.kv_a.data) + token * p.kv_a.ld;
  float square = 0;
  for (int c = threadIdx.x; c < p.latent_dim; c += kAppendThreads)
    square = fmaf(ToFloat(from[c]), ToFloat(from[c]), square);
  const float scale = rsqrtf(BlockSum(square, partial) / p.latent_dim + p.norm_eps);
  for (int c = threadIdx.x; c < line; c += kAppendThreads) {
    const float x = ToFloat(from[c]);
    to[c] = FromFloat<PageT>(c < p.latent_dim ? x * scale * p.norm_weight[c] : x);
  }
}

constexpr int kMlaAnyThreads = 128;
constexpr int kMlaAnyKeys = 128;
constexpr int kMlaAnyColumns = 8;  // latent columns of a thread

// One block a (head, token): the obvious online softmax in fp32. `latent_q` and `latent_out`: [tokens, heads, L].
// Shared memory: the query [L + R], scores [kMlaAnyKeys].
template <typename T, typename PageT>
__global__ void MlaAnyKernel(MlaAttentionParams p, SequenceBatch batch, MlaRows rows, const T* latent_q,
                             T* latent_out) {
  const int line = p.latent_dim + p.rope_dim;
  float* q = DynamicShared<float>();
  float* score = q + line;
  const int head = blockIdx.x;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * p.heads + head;
  const int token = rows.token_begin + blockIdx.y;
  const int sequence = batch.sequence_of_token[token];
  const int keys = batch.position[token] + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  const T* rope = static_cast<const T*>(p.q.data) + token * p.q.ld + head * (p.nope_dim + p.rope_dim) + p.nope_dim;
  for (int c = threadIdx.x; c < line; c += blockDim.x) {
    q[c] = ToFloat(c < p.latent_dim ? latent_q[row * p.latent_dim + c] : rope[c - p.latent_dim]) * p.scale;
  }
  float out[kMlaAnyColumns] = {};
  float top = -INFINITY, sum = 0;
  for (int base = 0; base < keys; base += kMlaAnyKeys) {
    const int count = min(kMlaAnyKeys, keys - base);
    __syncthreads();
    for (int j = warp; j < count; j += kMlaAnyThreads / 32) {
      const PageT* key = MlaLine<PageT>(p.pages, batch, sequence, base + j, line);
      float dot = 0;
      for (int c = lane; c < line; c += 32) dot = fmaf(q[c], key == nullptr ? 0.0f : ToFloat(key[c]), dot);
      dot = WarpSum(dot);
      if (lane == 0) score[j] = dot;
    }
    __syncthreads();
    float block_top = -INFINITY;
    for (int j = lane; j < count; j += 32) block_top = fmaxf(block_top, score[j]);
    const float new_top = fmaxf(top, WarpMax(block_top));
    const float shrink = expf(top - new_top);
    __syncthreads();
    for (int j = threadIdx.x; j < count; j += blockDim.x) score[j] = expf(score[j] - new_top);
    __syncthreads();
    float block_sum = 0;
    for (int j = lane; j < count; j += 32) block_sum += score[j];
    sum = fmaf(sum, shrink, WarpSum(block_sum));
    top = new_top;
#pragma unroll
    for (int i = 0; i < kMlaAnyColumns; ++i) out[i] *= shrink;
    for (int j = 0; j < count; ++j) {
      const PageT* key = MlaLine<PageT>(p.pages, batch, sequence, base + j, line);
      if (key == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kMlaAnyColumns; ++i) {
        const int c = threadIdx.x + i * kMlaAnyThreads;
        if (c < p.latent_dim) out[i] = fmaf(score[j], ToFloat(key[c]), out[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kMlaAnyColumns; ++i) {
    const int c = threadIdx.x + i * kMlaAnyThreads;
    if (c < p.latent_dim) latent_out[row * p.latent_dim + c] = FromFloat<T>(out[i] / sum);
  }
}

// out *= sigmoid(gate); grid (rows, columns / blockDim).
template <typename T>
__global__ void MlaGateKernel(Matrix<const T> gate, int cols, Matrix<T> out) {
  const int c = blockIdx.y * blockDim.x + threadIdx.x;
  if (c >= cols) return;
  T* target = out.Row(blockIdx.x) + c;
  *target = FromFloat<T>(ToFloat(*target) * Sigmoid(ToFloat(gate.Row(blockIdx.x)[c])));
}

}  // namespace k3::cuda
