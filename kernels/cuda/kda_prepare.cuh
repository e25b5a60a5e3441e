#pragma once

#include "kernels/cuda/kda_chunk.cuh"

// Token-parallel part of the chunked KDA (spec 4.1-4.3): one block a (chunk, head) of 64 tokens x 128 channels.
//
// Warp w owns token tile w / 2 (16 rows) and channel half w % 2; a lane owns two channels of those 16 rows, so that the
// cumulative log-decay c within the tile is a running sum in registers. With B_a the decay before tile a, G = B_a + c.
// Every factor e^{G_i - G_j} of a score tile (a, b) is (row factor of i) (tile factor of a, b) (column factor of j):
//   bounded gate: anchored at row 8 of either tile, exponents within +-40 nats, also on the diagonal;
//   unbounded gate: rows anchored before tile a, columns after tile b, exponents <= 0; the diagonal tiles take the
//   exponential per pair.
// All exponents are base 2.
namespace k3::cuda {

constexpr int kPrepareThreads = 256;
constexpr int kRowStride =
    kChunkDim + 8;  // elements: rows 16 bytes apart modulo 128, so that ldmatrix has no conflicts
constexpr int kTileStride = kChunkRows + 4;     // floats
constexpr int kInverseStride = kChunkRows + 8;  // elements
constexpr float kLeastLog2Decay = -160.0f;      // 2^-160 is zero in fp32; keeps running sums small enough to be exact

struct KdaPrepareShared {
  bf16 rows[4][kChunkRows][kRowStride];  // see the phases below
  float a[kChunkRows][kTileStride];
  float square[2][4][32];          // [channel half][tile][q of 16 rows | k of 16 rows]
  float total[4][kChunkDim];       // c of the last row of each tile
  float row_anchor[4][kChunkDim];  // absolute
  float column_anchor[4][kChunkDim];
  float beta[kChunkRows];
  float pairs[2][4][256];  // unbounded gate: sums over a channel half, see DiagonalPairs
};

__device__ __forceinline__ uint32_t LoadPair(const bf16* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint32_t*>(from);
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  return bits[0] | static_cast<uint32_t>(bits[1]) << 16;
}

// Convolution and SiLU of two channels over the 16 rows from `row`, rounded to bf16 pairs; rows from `end` on are zero.
__device__ __forceinline__ void ConvTile(const KdaInputs<bf16>& inputs, const float* taps, int row, int end,
                                         int64_t channel, bool aligned, uint32_t (&out)[16]) {
  uint32_t raw[16 + kChunkTaps - 1];
#pragma unroll
  for (int i = 0; i < 16 + kChunkTaps - 1; ++i) {
    const int r = row + i - (kChunkTaps - 1);
    const bf16* source = r < end ? inputs.Row(r) : nullptr;
    raw[i] = source != nullptr ? LoadPair(source + channel, aligned) : 0;
  }
  float low[kChunkTaps], high[kChunkTaps];
  LoadFloats<kChunkTaps>(taps + channel * kChunkTaps, low);
  LoadFloats<kChunkTaps>(taps + (channel + 1) * kChunkTaps, high);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float x = 0, y = 0;
#pragma unroll
    for (int j = 0; j < kChunkTaps; ++j) {
      x = fmaf(low[j], LowBf16(raw[i + j]), x);
      y = fmaf(high[j], HighBf16(raw[i + j]), y);
    }
    out[i] = row + i < end ? PackBf16(Silu(x), Silu(y)) : 0;
  }
}

__device__ __forceinline__ float SquareOfPair(uint32_t pair) {
  return fmaf(LowBf16(pair), LowBf16(pair), HighBf16(pair) * HighBf16(pair));
}

// Addresses of ldmatrix rows for this lane within a 16 x 16 tile at (row, column) of a matrix.
template <int kStride>
__device__ __forceinline__ const bf16* RowOperand(const bf16* matrix, int row, int column, int lane) {  // A
  return matrix + (row + lane % 16) * kStride + column + lane / 16 * 8;
}
template <int kStride>
__device__ __forceinline__ const bf16* ColumnOperand(const bf16* matrix, int row, int column,
                                                     int lane) {  // B, rows are n
  return matrix + (row + lane / 16 * 8 + lane % 8) * kStride + column + lane / 8 % 2 * 8;
}

// sum[16x16] += a[16x16] b[16x16] in tf32 for fp32 tiles in shared memory, row-major with kTileStride.
__device__ __forceinline__ void MmaTile(const float* a, const float* b, int lane, float (&sum)[2][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    const uint32_t rows[4] = {ToTf32(a[g * kTileStride + k + t]), ToTf32(a[(g + 8) * kTileStride + k + t]),
                              ToTf32(a[g * kTileStride + k + t + 4]), ToTf32(a[(g + 8) * kTileStride + k + t + 4])};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      MmaTf32(sum[n], rows, ToTf32(b[(k + t) * kTileStride + 8 * n + g]),
              ToTf32(b[(k + t + 4) * kTileStride + 8 * n + g]));
    }
  }
}
__device__ __forceinline__ void StoreTile(float* to, const float (&sum)[2][4], float sign, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(g + i / 2 * 8) * kTileStride + 8 * n + 2 * t + i % 2] = sign * sum[n][i];
  }
}

// Inverse of I + A for the unit lower triangular 64 x 64 matrix in s.a, fp32 into `inverse` [64][kTileStride] (tiles on
// and below the diagonal; those above are used as work space): substitution in fp32 within 16 x 16 tiles, tf32 products
// between them (spec 4.3). Called by the whole block.
__device__ __forceinline__ void InvertUnitLower(const float* a, float* inverse) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto tile = [](auto* matrix, int i, int j) { return matrix + 16 * i * kTileStride + 16 * j; };
  if (warp < 2) {
    const int d = 2 * warp + lane / 16;
    const int column = lane % 16;
    const float* rows = tile(a, d, d);
    float x[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      float sum[4] = {};
#pragma unroll
      for (int m = 0; m < r; ++m) sum[m % 4] = fmaf(rows[r * kTileStride + m], x[m], sum[m % 4]);
      x[r] = (r == column ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
#pragma unroll
    for (int r = 0; r < 16; ++r) tile(inverse, d, d)[r * kTileStride + column] = x[r];
  }
  __syncthreads();
  // Pairs of tiles: T10 = -X1 (A10 X0), T32 = -X3 (A32 X2).
  if (warp < 2) {
    const int i = 2 * warp + 1, j = 2 * warp;
    float product[2][4] = {}, result[2][4] = {};
    MmaTile(tile(a, i, j), tile(inverse, j, j), lane, product);
    StoreTile(tile(inverse, j, i), product, 1.0f, lane);
    __syncwarp();
    MmaTile(tile(inverse, i, i), tile(inverse, j, i), lane, result);
    StoreTile(tile(inverse, i, j), result, -1.0f, lane);
  }
  __syncthreads();
  // The lower left 32 x 32 block: -X' (A' X''), X' and X'' the inverses just made.
  const int i = 2 + warp / 2 % 2, j = warp % 2;
  if (warp < 4) {
    float product[2][4] = {};
    for (int m = j; m < 2; ++m) MmaTile(tile(a, i, m), tile(inverse, m, j), lane, product);
    StoreTile(tile(inverse, j, i), product, 1.0f, lane);
  }
  __syncthreads();
  if (warp < 4) {
    float result[2][4] = {};
    for (int m = 2; m <= i; ++m) MmaTile(tile(inverse, i, m), tile(inverse, j, m), lane, result);
    StoreTile(tile(inverse, i, j), result, -1.0f, lane);
  }
  __syncthreads();
}

// Scores of the pairs i >= j of one 16-row tile with the exponential taken per pair, summed over the warp's channels.
// to[i * i + 2 j] is M_ij, to[i * i + 2 j + 1] (j < i) A_ij without beta.
__device__ __forceinline__ void DiagonalPairs(const float (&q0)[16], const float (&q1)[16], const float (&k0)[16],
                                              const float (&k1)[16], const float (&c0)[16], const float (&c1)[16],
                                              int lane, float* to) {
  float sums[32];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      const float x = i == j ? k0[j] : k0[j] * Exp2(c0[i] - c0[j]);
      const float y = i == j ? k1[j] : k1[j] * Exp2(c1[i] - c1[j]);
      constexpr int kGroup = 32;
      const int index = i * i + 2 * j;
      sums[index % kGroup] = fmaf(q0[i], x, q1[i] * y);
      if (index % kGroup == kGroup - 1) {
        WarpSumEach(sums, lane);
        to[index / kGroup * kGroup + lane] = sums[0];
      }
      if (j < i) {
        sums[(index + 1) % kGroup] = fmaf(k0[i], x, k1[i] * y);
        if ((index + 1) % kGroup == kGroup - 1) {
          WarpSumEach(sums, lane);
          to[index / kGroup * kGroup + lane] = sums[0];
        }
      }
    }
  }
}

// Grid (heads, chunks of the round).
template <bool kBounded>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    KdaPrepareKernel(KdaParams p, SequenceBatch batch, KdaScratch scratch, int round, bool pairs_aligned) {
  KdaPrepareShared& s = *DynamicShared<KdaPrepareShared>();
  const int chunk_index = round * scratch.round_chunks + blockIdx.y;
  if (chunk_index >= scratch.plan->chunks) return;
  const KdaChunk chunk = scratch.chunks[chunk_index];
  const int head = blockIdx.x;
  KdaChunkData& out = scratch.data[static_cast<int64_t>(blockIdx.y) * p.heads + head];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile = warp / 2, half = warp % 2;
  const int channel = half * 64 + 2 * lane;
  const int tile_row = 16 * tile;

  // Convolution, gates and the running log-decay of the tile.
  uint32_t q[16], k[16], v[16];
  float c0[16], c1[16];
  {
    const int sequence_begin = batch.token_begin[chunk.sequence];
    const KdaInputs<bf16> inputs = MakeKdaInputs<bf16>(p, sequence_begin, batch.state_slot[chunk.sequence]);
    const int64_t width = static_cast<int64_t>(p.heads) * kChunkDim;
    const int64_t home = static_cast<int64_t>(head) * kChunkDim + channel;
    const int row = chunk.begin - sequence_begin + tile_row;
    const int end = chunk.end - sequence_begin;
    const float rate = expf(p.a_log[head]);
    uint32_t decay[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      decay[i] =
          row + i < end
              ? LoadPair(static_cast<const bf16*>(p.decay.data) + (chunk.begin + tile_row + i) * p.decay.ld + home,
                         pairs_aligned)
              : 0;
    }
    ConvTile(inputs, p.conv_taps, row, end, home, pairs_aligned, q);
    ConvTile(inputs, p.conv_taps, row, end, width + home, pairs_aligned, k);
    ConvTile(inputs, p.conv_taps, row, end, 2 * width + home, pairs_aligned, v);
    float square[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      square[i] = SquareOfPair(q[i]);
      square[16 + i] = SquareOfPair(k[i]);
    }
    WarpSumEach(square, lane);
    s.square[half][tile][lane] = square[0];
    const float bias0 = p.dt_bias[home], bias1 = p.dt_bias[home + 1];
    float sum0 = 0, sum1 = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (row + i < end) {
        sum0 += fmaxf(KdaLogDecay(p, rate, LowBf16(decay[i]) + bias0) * kLog2E, kLeastLog2Decay);
        sum1 += fmaxf(KdaLogDecay(p, rate, HighBf16(decay[i]) + bias1) * kLog2E, kLeastLog2Decay);
      }
      c0[i] = sum0;
      c1[i] = sum1;
    }
    s.total[tile][channel] = sum0;
    s.total[tile][channel + 1] = sum1;
    if (threadIdx.x < kChunkRows) {
      const int r = chunk.begin + threadIdx.x;
      s.beta[threadIdx.x] =
          r < chunk.end ? Sigmoid(ToFloat(static_cast<const bf16*>(p.beta.data)[r * p.beta.ld + head])) : 0.0f;
    }
  }
  __syncthreads();

  // Score operands: rows[0] = k, rows[1] = q with the row factor, rows[2] = k with the column factor.
  float before0 = 0, before1 = 0, after0 = 0, after1 = 0;  // decay of the tiles before and after this one
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const float t0 = s.total[a][channel], t1 = s.total[a][channel + 1];
    if (a < tile) before0 += t0, before1 += t1;
    if (a > tile) after0 += t0, after1 += t1;
  }
  const float total0 = c0[15], total1 = c1[15];
  {
    const float row0 = kBounded ? c0[8] : 0.0f, row1 = kBounded ? c1[8] : 0.0f;
    const float column0 = kBounded ? c0[8] : total0, column1 = kBounded ? c1[8] : total1;
    s.row_anchor[tile][channel] = before0 + row0;
    s.row_anchor[tile][channel + 1] = before1 + row1;
    s.column_anchor[tile][channel] = before0 + column0;
    s.column_anchor[tile][channel + 1] = before1 + column1;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float scale_q =
          rsqrtf(s.square[0][tile][i] + s.square[1][tile][i] + kL2NormEps) * 0.08838834764831845f;  // 128^-0.5
      const float scale_k = rsqrtf(s.square[0][tile][16 + i] + s.square[1][tile][16 + i] + kL2NormEps);
      const float q0 = LowBf16(q[i]) * scale_q, q1 = HighBf16(q[i]) * scale_q;
      const float k0 = LowBf16(k[i]) * scale_k, k1 = HighBf16(k[i]) * scale_k;
      const float r0 = Exp2(c0[i] - row0), r1 = Exp2(c1[i] - row1);
      const float f0 = Exp2(column0 - c0[i]), f1 = Exp2(column1 - c1[i]);
      *reinterpret_cast<uint32_t*>(&s.rows[0][tile_row + i][channel]) = PackBf16(k0 * r0, k1 * r1);
      *reinterpret_cast<uint32_t*>(&s.rows[1][tile_row + i][channel]) = PackBf16(q0 * r0, q1 * r1);
      *reinterpret_cast<uint32_t*>(&s.rows[2][tile_row + i][channel]) = PackBf16(k0 * f0, k1 * f1);
    }
  }
  if constexpr (!kBounded) {
    float q0[16], q1[16], k0[16], k1[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float scale_q = rsqrtf(s.square[0][tile][i] + s.square[1][tile][i] + kL2NormEps) * 0.08838834764831845f;
      const float scale_k = rsqrtf(s.square[0][tile][16 + i] + s.square[1][tile][16 + i] + kL2NormEps);
      q0[i] = LowBf16(q[i]) * scale_q, q1[i] = HighBf16(q[i]) * scale_q;
      k0[i] = LowBf16(k[i]) * scale_k, k1[i] = HighBf16(k[i]) * scale_k;
    }
    DiagonalPairs(q0, q1, k0, k1, c0, c1, lane, s.pairs[half][tile]);
  }
  if (tile == 0) {
    out.decay[channel] = Exp2(total0 + after0);
    out.decay[channel + 1] = Exp2(total1 + after1);
  }
  __syncthreads();

  // Score tiles (row tile a, column tile b): warps 0-5 one below the diagonal each, warps 6 and 7 two on it each.
  const int g = lane / 4, t = lane % 4;
  {
    const bool diagonal = warp >= 6;
    for (int job = 0; job < (diagonal ? 2 : 1); ++job) {
      const int a = diagonal ? 2 * (warp - 6) + job : warp == 0 ? 1 : warp < 3 ? 2 : 3;
      const int b = diagonal ? a : warp == 0 ? 0 : warp < 3 ? warp - 1 : warp - 3;
      float score_k[2][4] = {}, score_q[2][4] = {};
      if (kBounded || !diagonal) {
#pragma unroll
        for (int step = 0; step < kChunkDim / 16; ++step) {
          uint32_t rows_k[4], rows_q[4], columns[4];
          LoadMatrix4(rows_k, RowOperand<kRowStride>(&s.rows[0][0][0], 16 * a, 16 * step, lane));
          LoadMatrix4(rows_q, RowOperand<kRowStride>(&s.rows[1][0][0], 16 * a, 16 * step, lane));
          LoadMatrix4(columns, ColumnOperand<kRowStride>(&s.rows[2][0][0], 16 * b, 16 * step, lane));
          if (!diagonal) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
              const int c = 16 * step + 8 * upper + 2 * t;
              const float x = Exp2(s.row_anchor[a][c] - s.column_anchor[b][c]);
              const float y = Exp2(s.row_anchor[a][c + 1] - s.column_anchor[b][c + 1]);
#pragma unroll
              for (int n = 0; n < 2; ++n) {
                uint32_t& pair = columns[2 * n + upper];
                pair = PackBf16(LowBf16(pair) * x, HighBf16(pair) * y);
              }
            }
          }
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            MmaBf16(score_k[n], rows_k, columns[2 * n], columns[2 * n + 1]);
            MmaBf16(score_q[n], rows_q, columns[2 * n], columns[2 * n + 1]);
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = g + e / 2 * 8, j = 8 * n + 2 * t + e % 2;
            if (j <= i) score_q[n][e] = s.pairs[0][a][i * i + 2 * j] + s.pairs[1][a][i * i + 2 * j];
            if (j < i) score_k[n][e] = s.pairs[0][a][i * i + 2 * j + 1] + s.pairs[1][a][i * i + 2 * j + 1];
          }
        }
      }
      // By selection: above the diagonal the products may be huge.
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = g + e / 2 * 8, j = 8 * n + 2 * t + e % 2;
          if (diagonal && j > i) score_q[n][e] = 0;
          s.a[16 * a + i][16 * b + j] = diagonal && j >= i ? 0.0f : score_k[n][e] * s.beta[16 * a + i];
        }
      }
      out.scores[a * (a + 1) / 2 + b][lane] = {
          PackF16(score_q[0][0], score_q[0][1]), PackF16(score_q[1][0], score_q[1][1]),
          PackF16(score_q[0][2], score_q[0][3]), PackF16(score_q[1][2], score_q[1][3])};
    }
  }
  __syncthreads();

  // From here on operands are fp16: rows[0] = beta k e^G, rows[1] = q e^G, rows[2] = k e^(G_C - G), rows[3] = beta v.
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float scale_q = rsqrtf(s.square[0][tile][i] + s.square[1][tile][i] + kL2NormEps) * 0.08838834764831845f;
    const float scale_k = rsqrtf(s.square[0][tile][16 + i] + s.square[1][tile][16 + i] + kL2NormEps);
    const float beta = s.beta[tile_row + i];
    const float k0 = LowBf16(k[i]) * scale_k, k1 = HighBf16(k[i]) * scale_k;
    const float e0 = Exp2(before0 + c0[i]), e1 = Exp2(before1 + c1[i]);
    const float f0 = Exp2(after0 + (total0 - c0[i])), f1 = Exp2(after1 + (total1 - c1[i]));
    *reinterpret_cast<uint32_t*>(&s.rows[0][tile_row + i][channel]) = PackF16(beta * k0 * e0, beta * k1 * e1);
    *reinterpret_cast<uint32_t*>(&s.rows[1][tile_row + i][channel]) =
        PackF16(LowBf16(q[i]) * scale_q * e0, HighBf16(q[i]) * scale_q * e1);
    *reinterpret_cast<uint32_t*>(&s.rows[2][tile_row + i][channel]) = PackF16(k0 * f0, k1 * f1);
    *reinterpret_cast<uint32_t*>(&s.rows[3][tile_row + i][channel]) =
        PackF16(beta * LowBf16(v[i]), beta * HighBf16(v[i]));
  }
  __syncthreads();

  // Export q e^G and k e^(G_C - G).
  for (int block = warp; block < 32; block += kPrepareThreads / 32) {
    const int a = block / 8, step = block % 8;
    uint32_t f[4];
    LoadMatrix4(f, ColumnOperand<kRowStride>(&s.rows[1][0][0], 16 * a, 16 * step, lane));
    out.decayed_q[a][step][lane] = {f[0], f[1], f[2], f[3]};
    LoadMatrix4Transposed(f, RowOperand<kRowStride>(&s.rows[2][0][0], 16 * a, 16 * step, lane));
    out.restored_k[a][step][lane] = {f[0], f[1], f[2], f[3]};
  }
  __syncthreads();

  // T = (I + A)^-1, fp32 where rows[1] was, then rounded to where rows[2] was.
  float* inverse = reinterpret_cast<float*>(&s.rows[1][0][0]);
  bf16* rounded = &s.rows[2][0][0];
  static_assert(kChunkRows * kTileStride * sizeof(float) <= sizeof(s.rows[0]));
  static_assert(kChunkRows * kInverseStride * sizeof(bf16) <= sizeof(s.rows[0]));
  InvertUnitLower(&s.a[0][0], inverse);
  for (int i = threadIdx.x; i < kChunkRows * kChunkRows / 2; i += kPrepareThreads) {
    const int r = i / (kChunkRows / 2), c = i % (kChunkRows / 2) * 2;
    if (c / 16 <= r / 16) {
      *reinterpret_cast<uint32_t*>(rounded + r * kInverseStride + c) =
          PackF16(inverse[r * kTileStride + c], inverse[r * kTileStride + c + 1]);
    }
  }
  __syncthreads();

  if (warp < 4) {
    // W = T (beta k e^G): 32 channels a warp.
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      float w[4][4] = {};
#pragma unroll
      for (int j = 0; j <= a; ++j) {
        uint32_t rows[4];
        LoadMatrix4(rows, RowOperand<kInverseStride>(rounded, 16 * a, 16 * j, lane));
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          uint32_t columns[4];
          LoadMatrix4Transposed(columns, RowOperand<kRowStride>(&s.rows[0][0][0], 16 * j, 32 * warp + 16 * pair, lane));
          MmaF16(w[2 * pair], rows, columns[0], columns[1]);
          MmaF16(w[2 * pair + 1], rows, columns[2], columns[3]);
        }
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float(&x)[4] = w[2 * pair];
        const float(&y)[4] = w[2 * pair + 1];
        out.minus_w[a][2 * warp + pair][lane] = {PackF16(-x[0], -x[1]), PackF16(-y[0], -y[1]), PackF16(-x[2], -x[3]),
                                                 PackF16(-y[2], -y[3])};
      }
    }
  } else {
    // U transposed = (beta v)^T T^T: 32 value columns a warp.
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int value = 2 * (warp - 4) + block;
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        float u[2][4] = {};
#pragma unroll
        for (int j = 0; j <= a; ++j) {
          uint32_t rows[4], columns[4];
          LoadMatrix4Transposed(rows, ColumnOperand<kRowStride>(&s.rows[3][0][0], 16 * j, 16 * value, lane));
          LoadMatrix4(columns, ColumnOperand<kInverseStride>(rounded, 16 * a, 16 * j, lane));
          MmaF16(u[0], rows, columns[0], columns[1]);
          MmaF16(u[1], rows, columns[2], columns[3]);
        }
        out.u[value][a][lane] = {PackF16(u[0][0], u[0][1]), PackF16(u[0][2], u[0][3]), PackF16(u[1][0], u[1][1]),
                                 PackF16(u[1][2], u[1][3])};
      }
    }
  }
}

}  // namespace k3::cuda
