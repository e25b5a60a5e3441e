#pragma once

#include "kernels/cuda/kda_chunk.cuh"
#include "kernels/cuda/kda_tile.cuh"

// Token-parallel part of the chunked KDA (spec 4.1-4.3): one block a (chunk, head) of 64 tokens x 128 channels.
//
// Warp w owns the 8 rows of half tile w / 2 and channel half w % 2; a lane owns two channels of those rows, so that the
// cumulative log-decay c within the half tile is a running sum in registers. Score tiles are 16 x 16. Every factor
// e^{G_i - G_j} of tile (a, b) is (row factor of i) (factor of the tile pair) (column factor of j):
//   bounded gate: anchored in the middle of either tile, exponents within +-40 nats, also on the diagonal;
//   unbounded gate: rows anchored before tile a, columns after tile b, exponents <= 0. On the diagonal the lower left
//   8 x 8 is anchored in the middle, exponents <= 0, and the two 8 x 8 on the diagonal take one exponential a pair.
// All exponents are base 2. Score operands are bf16 for their range, all others fp16 for their precision.
namespace k3::cuda {

constexpr int kHalfTiles = 8;
constexpr int kRowStride =
    kChunkDim + 8;  // elements: rows 16 bytes apart modulo 128, so that ldmatrix has no conflicts
constexpr float kLeastLog2Decay = -160.0f;  // 2^-160 is zero in fp32; keeps running sums small enough to be exact

constexpr int kHistory = kChunkTaps - 1;

struct KdaPrepareShared {
  bf16 rows[4][kChunkRows][kRowStride];  // first raw q, k and v, then see the phases below
  union {
    float a[kChunkRows][kTileStride];
    bf16 decay[kChunkRows][kRowStride];  // as it comes
  };
  union {
    bf16 history[3][kHistory][kRowStride];  // raw rows before the chunk
    float inverse[kChunkRows][kTileStride];
    struct {                                       // unbounded gate, score phase
      bf16 columns[kChunkRows / 2][kRowStride];    // column factors of first halves, anchored in the middle
      float pairs[2][kHalfTiles][kDiagonalPairs];  // by channel half, see DiagonalPairs
    };
  };
  float total[kHalfTiles][kChunkDim];      // c of the last row of each half tile
  float pair_factor[6][kChunkDim];         // of tiles (1,0) (2,0) (2,1) (3,0) (3,1) (3,2)
  float square[2][kHalfTiles][16];         // by channel half: q of 8 rows | k of 8 rows
  float2 scale[kPrepareWarps][kHalfRows];  // of the rows of q (with 128^-0.5) and of k, a copy a warp
  float beta[kChunkRows];
};

// Starts copying 128 channels of `rows` rows of kCount matrices, `width` elements apart, to shared memory; rows beyond
// them become zero. Called by the whole block.
template <bool kAligned, int kCount>
__device__ __forceinline__ void FetchRows(bf16 (*to)[kChunkRows][kRowStride], const bf16* from, int64_t ld, int rows,
                                          int64_t width) {
  if constexpr (kAligned) {
    constexpr int kStep = kPrepareThreads / 16;
    static_assert(2 * kStep == kChunkRows);
    const int piece = threadIdx.x % 16 * 8, row = threadIdx.x / 16;
    const bf16* first = from + min(row, rows - 1) * ld + piece;
    const bf16* second = from + min(row + kStep, rows - 1) * ld + piece;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      CopyAsync16(&to[i][row][piece], first + i * width, row < rows);
      CopyAsync16(&to[i][row + kStep][piece], second + i * width, row + kStep < rows);
    }
  } else {
    for (int i = threadIdx.x; i < kCount * kChunkRows * kChunkDim; i += kPrepareThreads) {
      const int part = i / (kChunkRows * kChunkDim), row = i / kChunkDim % kChunkRows, c = i % kChunkDim;
      to[part][row][c] = row < rows ? from[row * ld + part * width + c] : FromFloat<bf16>(0.0f);
    }
  }
}

// The same for the rows before row `row` of the sequence, of q, k and v; what does not exist is zero.
template <bool kAligned>
__device__ __forceinline__ void FetchHistory(bf16 (*to)[kHistory][kRowStride], const KdaInputs<bf16>& inputs, int row,
                                             int64_t width, int64_t channel) {
  constexpr int kPieces = kAligned ? kChunkDim / 8 : kChunkDim;
  const auto fetch = [&](int i) {
    const int c = i % kPieces * (kChunkDim / kPieces), part = i / kPieces / kHistory, h = i / kPieces % kHistory;
    const bf16* source = inputs.Row(row - kHistory + h);
    const bool exists = source != nullptr;
    source = exists ? source + part * width + channel + c : inputs.step;
    if constexpr (kAligned) {
      CopyAsync16(&to[part][h][c], source, exists);
    } else {
      to[part][h][c] = exists ? *source : FromFloat<bf16>(0.0f);
    }
  };
  if constexpr (kAligned) {
    static_assert(3 * kHistory * kPieces <= kPrepareThreads || !kAligned);
    if (threadIdx.x < 3 * kHistory * kPieces) fetch(threadIdx.x);
  } else {
    for (int i = threadIdx.x; i < 3 * kHistory * kPieces; i += kPrepareThreads) fetch(i);
  }
}

// Convolution and SiLU of two channels over 8 rows that begin at `rows`; `history` are the three rows before.
// x sigmoid(x) = h + h tanh(h) with h = x / 2.
__device__ __forceinline__ void ConvHalfTile(const bf16* history, const bf16* rows, const float* taps,
                                             float (&x)[kHalfRows], float (&y)[kHalfRows]) {
  uint32_t raw[kHalfRows + kHistory];
#pragma unroll
  for (int i = 0; i < kHistory; ++i) raw[i] = *reinterpret_cast<const uint32_t*>(history + i * kRowStride);
#pragma unroll
  for (int i = 0; i < kHalfRows; ++i) raw[kHistory + i] = *reinterpret_cast<const uint32_t*>(rows + i * kRowStride);
  float low[kChunkTaps], high[kChunkTaps];
  LoadFloats<kChunkTaps>(taps, low);
  LoadFloats<kChunkTaps>(taps + kChunkTaps, high);
#pragma unroll
  for (int j = 0; j < kChunkTaps; ++j) low[j] *= 0.5f, high[j] *= 0.5f;
#pragma unroll
  for (int i = 0; i < kHalfRows; ++i) {
    float low_sum = low[0] * LowBf16(raw[i]), high_sum = high[0] * HighBf16(raw[i]);
#pragma unroll
    for (int j = 1; j < kChunkTaps; ++j) {
      low_sum = fmaf(low[j], LowBf16(raw[i + j]), low_sum);
      high_sum = fmaf(high[j], HighBf16(raw[i + j]), high_sum);
    }
    x[i] = fmaf(low_sum, Tanh(low_sum), low_sum);
    y[i] = fmaf(high_sum, Tanh(high_sum), high_sum);
  }
}

// Grid (heads, chunks of the round or slice). A slice but the first is launched while the recurrence of the one before
// may still run; it has one more row of blocks (`tail`), which waits for it, so that what comes after this launch comes
// after both. kAligned: rows of qkv and decay start on 16 bytes.
template <bool kBounded, bool kAligned>
__global__ void __launch_bounds__(kPrepareThreads, kBounded ? 2 : 1)
    KdaPrepareKernel(KdaParams p, SequenceBatch batch, KdaScratch scratch, int first_chunk, bool tail) {
  if (tail && blockIdx.y + 1 == gridDim.y) {
    if (blockIdx.x == 0) GridDependencyWait();
    return;
  }
  KdaPrepareShared& s = *DynamicShared<KdaPrepareShared>();
  const int chunk_index = first_chunk + blockIdx.y;
  if (chunk_index >= scratch.plan->chunks) return;
  const KdaChunk chunk = scratch.chunks[chunk_index];
  const int head = blockIdx.x;
  KdaChunkData& out = scratch.data[static_cast<int64_t>(blockIdx.y) * p.heads + head];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = warp / 2;  // half tile
  const int channel = warp % 2 * 64 + 2 * lane;
  const int first_row = kHalfRows * part;

  const int64_t width = static_cast<int64_t>(p.heads) * kChunkDim;
  const int64_t home = static_cast<int64_t>(head) * kChunkDim;
  const int rows = chunk.end - chunk.begin;
  {
    const int sequence_begin = batch.token_begin[chunk.sequence];
    const KdaInputs<bf16> inputs = MakeKdaInputs<bf16>(p, sequence_begin, batch.state_slot[chunk.sequence]);
    const bf16* qkv = static_cast<const bf16*>(p.qkv.data) + chunk.begin * p.qkv.ld + home;
    FetchRows<kAligned, 3>(s.rows, qkv, p.qkv.ld, rows, width);
    FetchRows<kAligned, 1>(&s.decay, static_cast<const bf16*>(p.decay.data) + chunk.begin * p.decay.ld + home,
                           p.decay.ld, rows, 0);
    FetchHistory<kAligned>(s.history, inputs, chunk.begin - sequence_begin, width, home);
    CopyAsyncCommit();
  }
  if (threadIdx.x < kChunkRows) {
    const int r = chunk.begin + threadIdx.x;
    s.beta[threadIdx.x] =
        r < chunk.end ? Sigmoid(ToFloat(static_cast<const bf16*>(p.beta.data)[r * p.beta.ld + head])) : 0.0f;
  }
  const float rate = __expf(p.a_log[head]);
  const float2 bias = *reinterpret_cast<const float2*>(p.dt_bias + home + channel);
  CopyAsyncWait<0>();
  __syncthreads();

  // Convolution, gates and the running log-decay of the half tile. Rows that do not exist have no decay and beta 0.
  float q0[kHalfRows], q1[kHalfRows], k0[kHalfRows], k1[kHalfRows], c0[kHalfRows], c1[kHalfRows];
  uint32_t v[kHalfRows];
  {
    const auto convolve = [&](int i, float(&x)[kHalfRows], float(&y)[kHalfRows]) {
      const bf16* own = &s.rows[i][first_row][channel];
      ConvHalfTile(part == 0 ? &s.history[i][0][channel] : own - kHistory * kRowStride, own,
                   p.conv_taps + (i * width + home + channel) * kChunkTaps, x, y);
    };
    float square[16], x[kHalfRows], y[kHalfRows];
    convolve(2, x, y);
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i) {
      v[i] = PackF16(x[i], y[i]);
      if constexpr (kBounded) StorePair(&s.rows[3][first_row + i][channel], v[i]);
    }
    convolve(0, q0, q1);
    convolve(1, k0, k1);
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i) {
      square[i] = fmaf(q0[i], q0[i], q1[i] * q1[i]);
      square[kHalfRows + i] = fmaf(k0[i], k0[i], k1[i] * k1[i]);
    }
    WarpSumEach<16>(square, lane);
    if (lane < 16) s.square[warp % 2][part][lane] = square[0];
    const int count = rows - first_row;
    float sum0 = 0, sum1 = 0;
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i) {
      const uint32_t decay = *reinterpret_cast<const uint32_t*>(&s.decay[first_row + i][channel]);
      const float g0 = KdaLog2DecayFast<kBounded>(p.gate_lower_bound, rate, LowBf16(decay), bias.x);
      const float g1 = KdaLog2DecayFast<kBounded>(p.gate_lower_bound, rate, HighBf16(decay), bias.y);
      const float valid = i < count ? 1.0f : 0.0f;
      sum0 = fmaf(valid, kBounded ? g0 : fmaxf(g0, kLeastLog2Decay), sum0);
      sum1 = fmaf(valid, kBounded ? g1 : fmaxf(g1, kLeastLog2Decay), sum1);
      c0[i] = sum0;
      c1[i] = sum1;
    }
    *reinterpret_cast<float2*>(&s.total[part][channel]) = {sum0, sum1};
  }
  __syncthreads();

  // Decay before and after the half tile within the chunk, and of the other half of its tile.
  float before0 = 0, before1 = 0, after0 = 0, after1 = 0;
#pragma unroll
  for (int h = 0; h < kHalfTiles; ++h) {
    const float2 total = *reinterpret_cast<const float2*>(&s.total[h][channel]);
    if (h < part) before0 += total.x, before1 += total.y;
    if (h > part) after0 += total.x, after1 += total.y;
  }
  const bool second = part % 2 != 0;
  const float total0 = c0[kHalfRows - 1], total1 = c1[kHalfRows - 1];
  if (lane < kHalfRows) {
    const float square_q = s.square[0][part][lane] + s.square[1][part][lane];
    const float square_k = s.square[0][part][kHalfRows + lane] + s.square[1][part][kHalfRows + lane];
    s.scale[warp][lane] = {rsqrtf(square_q + kL2NormEps) * 0.08838834764831845f, rsqrtf(square_k + kL2NormEps)};
  }
  __syncwarp();

  // Score operands: rows[0] = k, rows[1] = q with the row factor, rows[2] = k with the column factor. Unbounded gate:
  // rows[3] = k, then q of the second halves and `columns` = k of the first halves, anchored in the middle.
  // Kept for later, from the same factors: -k e^G, q e^G, k e^(G_C - G).
  uint32_t minus_w[kHalfRows], decayed_q[kHalfRows], restored_k[kHalfRows];
  const auto operands = [&](int i, float q0, float q1, float k0, float k1, float r0, float r1, float f0, float f1,
                            float2 row, float2 column) {
    const float kr0 = k0 * r0, kr1 = k1 * r1, qr0 = q0 * r0, qr1 = q1 * r1, kf0 = k0 * f0, kf1 = k1 * f1;
    StorePair(&s.rows[0][first_row + i][channel], PackBf16(kr0, kr1));
    StorePair(&s.rows[1][first_row + i][channel], PackBf16(qr0, qr1));
    StorePair(&s.rows[2][first_row + i][channel], PackBf16(kf0, kf1));
    minus_w[i] = PackF16(kr0 * -row.x, kr1 * -row.y);
    decayed_q[i] = PackF16(qr0 * row.x, qr1 * row.y);
    restored_k[i] = PackF16(kf0 * column.x, kf1 * column.y);
  };
  if constexpr (kBounded) {
    const float middle0 = second ? 0.0f : total0, middle1 = second ? 0.0f : total1;
    const float2 row = {Exp2(before0 + middle0), Exp2(before1 + middle1)};
    const float2 column = {Exp2(after0 + (total0 - middle0)), Exp2(after1 + (total1 - middle1))};
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i) {
      const float2 scale = s.scale[warp][i];
      const float x0 = c0[i] - middle0, x1 = c1[i] - middle1;
      operands(i, q0[i] * scale.x, q1[i] * scale.x, k0[i] * scale.y, k1[i] * scale.y, Exp2(x0), Exp2(x1), Exp2(-x0),
               Exp2(-x1), row, column);
    }
  } else {
    const float2 other = *reinterpret_cast<const float2*>(&s.total[part ^ 1][channel]);
    const float2 row = {Exp2(before0 - (second ? other.x : 0.0f)), Exp2(before1 - (second ? other.y : 0.0f))};
    const float2 column = {Exp2(after0 - (second ? 0.0f : other.x)), Exp2(after1 - (second ? 0.0f : other.y))};
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i) {
      const float2 scale = s.scale[warp][i];
      q0[i] *= scale.x, q1[i] *= scale.x, k0[i] *= scale.y, k1[i] *= scale.y;
      const float r0 = Exp2(c0[i] + (second ? other.x : 0.0f)), r1 = Exp2(c1[i] + (second ? other.y : 0.0f));
      const float f0 = Exp2(total0 - c0[i] + (second ? 0.0f : other.x)),
                  f1 = Exp2(total1 - c1[i] + (second ? 0.0f : other.y));
      operands(i, q0[i], q1[i], k0[i], k1[i], r0, r1, f0, f1, row, column);
      const int middle_row = part / 2 * kHalfRows + i;
      if (second) {
        const float m0 = Exp2(c0[i]), m1 = Exp2(c1[i]);
        StorePair(&s.rows[3][middle_row][channel], PackBf16(k0[i] * m0, k1[i] * m1));
        StorePair(&s.rows[3][kChunkRows / 2 + middle_row][channel], PackBf16(q0[i] * m0, q1[i] * m1));
      } else {
        StorePair(&s.columns[middle_row][channel],
                  PackBf16(k0[i] * Exp2(total0 - c0[i]), k1[i] * Exp2(total1 - c1[i])));
      }
    }
    DiagonalPairs(q0, q1, k0, k1, c0, c1, lane, s.pairs[warp % 2][part]);
  }
  if (warp < 12) {
    const int pair = warp / 2;
    const int a = pair < 1 ? 1 : pair < 3 ? 2 : 3, b = pair - a * (a - 1) / 2;
    // Half tiles between the two anchors.
    const int first = kBounded ? 2 * b + 1 : 2 * b + 2, end = kBounded ? 2 * a + 1 : 2 * a;
    float sum0 = 0, sum1 = 0;
#pragma unroll
    for (int h = 1; h < kHalfTiles - 1; ++h) {
      const float2 total = *reinterpret_cast<const float2*>(&s.total[h][channel]);
      if (h >= first && h < end) sum0 += total.x, sum1 += total.y;
    }
    *reinterpret_cast<float2*>(&s.pair_factor[pair][channel]) = {Exp2(sum0), Exp2(sum1)};
  }
  if (part == 0) {
    out.decay[channel] = Exp2(total0 + after0);
    out.decay[channel + 1] = Exp2(total1 + after1);
  }
  __syncthreads();

  // Score tiles: warps 0-11 one half of columns of a tile below the diagonal each, warps 12-15 a tile on it.
  const int g = lane / 4, t = lane % 4;
  if (warp < 12) {
    const int pair = warp / 2, half = warp % 2;
    const int a = pair < 1 ? 1 : pair < 3 ? 2 : 3, b = pair - a * (a - 1) / 2;
    float score_k[4] = {}, score_q[4] = {};
#pragma unroll
    for (int step = 0; step < kChunkDim / 32; ++step) {
      uint32_t columns[4];
      LoadMatrix4(columns, ColumnOperandTwice<kRowStride>(&s.rows[2][0][0], 16 * b + 8 * half, 32 * step, lane));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 factor = *reinterpret_cast<const float2*>(&s.pair_factor[pair][32 * step + 8 * i + 2 * t]);
        columns[i] = PackBf16(LowBf16(columns[i]) * factor.x, HighBf16(columns[i]) * factor.y);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t rows[4];
        LoadMatrix4(rows, RowOperand<kRowStride>(&s.rows[0][0][0], 16 * a, 32 * step + 16 * i, lane));
        MmaBf16(score_k, rows, columns[2 * i], columns[2 * i + 1]);
        LoadMatrix4(rows, RowOperand<kRowStride>(&s.rows[1][0][0], 16 * a, 32 * step + 16 * i, lane));
        MmaBf16(score_q, rows, columns[2 * i], columns[2 * i + 1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * a + g + e / 2 * 8;
      s.a[i][16 * b + 8 * half + 2 * t + e % 2] = score_k[e] * s.beta[i];
    }
    uint32_t* to = reinterpret_cast<uint32_t*>(&out.scores[a * (a + 1) / 2 + b][lane]);
    to[half] = PackF16(score_q[0], score_q[1]);
    to[2 + half] = PackF16(score_q[2], score_q[3]);
  } else {
    const int a = warp - 12;
    float score_k[2][4] = {}, score_q[2][4] = {};
    if constexpr (kBounded) {
#pragma unroll 4
      for (int step = 0; step < kChunkDim / 16; ++step) {
        uint32_t rows[4], columns[4];
        LoadMatrix4(columns, ColumnOperand<kRowStride>(&s.rows[2][0][0], 16 * a, 16 * step, lane));
        LoadMatrix4(rows, RowOperand<kRowStride>(&s.rows[0][0][0], 16 * a, 16 * step, lane));
        MmaBf16(score_k[0], rows, columns[0], columns[1]);
        MmaBf16(score_k[1], rows, columns[2], columns[3]);
        LoadMatrix4(rows, RowOperand<kRowStride>(&s.rows[1][0][0], 16 * a, 16 * step, lane));
        MmaBf16(score_q[0], rows, columns[0], columns[1]);
        MmaBf16(score_q[1], rows, columns[2], columns[3]);
      }
    } else {
      // The lower left 8 x 8: k as rows 0-7 and q as rows 8-15 of one product.
      float below[4] = {};
#pragma unroll
      for (int step = 0; step < kChunkDim / 32; ++step) {
        uint32_t columns[4];
        LoadMatrix4(columns, ColumnOperandTwice<kRowStride>(&s.columns[0][0], 8 * a, 32 * step, lane));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t rows[4];
          const int row = 8 * a + lane % 8 + lane / 8 % 2 * (kChunkRows / 2);
          LoadMatrix4(rows, &s.rows[3][row][32 * step + 16 * i + lane / 16 * 8]);
          MmaBf16(below, rows, columns[2 * i], columns[2 * i + 1]);
        }
      }
      score_k[0][2] = below[0], score_k[0][3] = below[1];
      score_q[0][2] = below[2], score_q[0][3] = below[3];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float* pairs0 = s.pairs[0][2 * a + n];
        const float* pairs1 = s.pairs[1][2 * a + n];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = 2 * t + e;
          if (j <= g) score_q[n][2 * n + e] = pairs0[g * g + 2 * j] + pairs1[g * g + 2 * j];
          if (j < g) score_k[n][2 * n + e] = pairs0[g * g + 2 * j + 1] + pairs1[g * g + 2 * j + 1];
        }
      }
    }
    // By selection: above the diagonal the products may be huge.
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = g + e / 2 * 8, j = 8 * n + 2 * t + e % 2;
        if (j > i) score_q[n][e] = 0;
        s.a[16 * a + i][16 * a + j] = j >= i ? 0.0f : score_k[n][e] * s.beta[16 * a + i];
      }
    }
    out.scores[a * (a + 1) / 2 + a][lane] = {
        PackF16(score_q[0][0], score_q[0][1]), PackF16(score_q[1][0], score_q[1][1]),
        PackF16(score_q[0][2], score_q[0][3]), PackF16(score_q[1][2], score_q[1][3])};
  }
  __syncthreads();

  // rows[0] = -k e^G, rows[1] = q e^G, rows[2] = k e^(G_C - G), rows[3] = v.
#pragma unroll
  for (int i = 0; i < kHalfRows; ++i) {
    StorePair(&s.rows[0][first_row + i][channel], minus_w[i]);
    StorePair(&s.rows[1][first_row + i][channel], decayed_q[i]);
    StorePair(&s.rows[2][first_row + i][channel], restored_k[i]);
    if constexpr (!kBounded) StorePair(&s.rows[3][first_row + i][channel], v[i]);
  }
  __syncthreads();
  // T = (I + A)^-1 diag(beta), rounded to where A was. Meanwhile most warps export q e^G and k e^(G_C - G).
  bf16* rounded = reinterpret_cast<bf16*>(&s.a[0][0]);
  static_assert(kChunkRows * kInverseStride * sizeof(bf16) <= sizeof(s.a));
  InvertUnitLower(&s.a[0][0], &s.inverse[0][0], s.beta, rounded, [&](int exporter) {
    for (int block = exporter; block < 64; block += kPrepareWarps - 2) {
      const int a = block / 8 % 4, step = block % 8;
      uint32_t f[4];
      if (block < 32) {
        LoadMatrix4(f, ColumnOperand<kRowStride>(&s.rows[1][0][0], 16 * a, 16 * step, lane));
        out.decayed_q[a][step][lane] = {f[0], f[1], f[2], f[3]};
      } else {
        LoadMatrix4Transposed(f, RowOperand<kRowStride>(&s.rows[2][0][0], 16 * a, 16 * step, lane));
        out.restored_k[a][step][lane] = {f[0], f[1], f[2], f[3]};
      }
    }
  });

  if (warp < 8) {
    // -W = T (-k e^G): 16 channels a warp.
    uint32_t columns[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      LoadMatrix4Transposed(columns[j], RowOperand<kRowStride>(&s.rows[0][0][0], 16 * j, 16 * warp, lane));
    }
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      float x[4] = {}, y[4] = {};
#pragma unroll
      for (int j = 0; j <= a; ++j) {
        uint32_t rows[4];
        LoadMatrix4(rows, RowOperand<kInverseStride>(rounded, 16 * a, 16 * j, lane));
        MmaF16(x, rows, columns[j][0], columns[j][1]);
        MmaF16(y, rows, columns[j][2], columns[j][3]);
      }
      out.minus_w[a][warp][lane] = {PackF16(x[0], x[1]), PackF16(y[0], y[1]), PackF16(x[2], x[3]), PackF16(y[2], y[3])};
    }
  } else {
    // U transposed = v^T T^T: 16 value columns a warp.
    const int value = warp - 8;
    uint32_t rows[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      LoadMatrix4Transposed(rows[j], ColumnOperand<kRowStride>(&s.rows[3][0][0], 16 * j, 16 * value, lane));
    }
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      float x[4] = {}, y[4] = {};
#pragma unroll
      for (int j = 0; j <= a; ++j) {
        uint32_t columns[4];
        LoadMatrix4(columns, ColumnOperand<kInverseStride>(rounded, 16 * a, 16 * j, lane));
        MmaF16(x, rows[j], columns[0], columns[1]);
        MmaF16(y, rows[j], columns[2], columns[3]);
      }
      out.u[value][a][lane] = {PackF16(x[0], x[1]), PackF16(x[2], x[3]), PackF16(y[0], y[1]), PackF16(y[2], y[3])};
    }
  }
}

}  // namespace k3::cuda
