#pragma once

#include "kernels/cuda/kda_tiles.cuh"

// The preparation of tiles in kda_fused.cuh: convolution, norms, gates, scores, the inverse, and the gated norm of what
// comes back.
namespace k3::cuda {

// Unbounded gate, base 2. Of 2^-21 a decay that should have been less leaves 5e-7 of what was there, a thousandth of
// the rounding of 16-bit operands. C_i - R then lies within [-B, 7 * 21 - B] for rows 0-7 and [-(8 * 21 - B), B] for
// the others: factors are finite and their products with q and k normal numbers down to 2^-18 of |q| and |k|. Scores
// times 2^2B are finite, |score| <= |k| |q| <= 1.
constexpr float kLeastLog2Decay = -21;
constexpr float kAnchorShift = 60;
constexpr float kAnchorUnshift = 1.0f / (int64_t{1} << 60) / (int64_t{1} << 60);  // 2^-2B

__device__ __forceinline__ uint4 LoadUnaligned(const bf16* from) {
  Pack<bf16, 8> pack;
#pragma unroll
  for (int i = 0; i < 8; ++i) pack.v[i] = from[i];
  return *reinterpret_cast<const uint4*>(&pack);
}

// One of the two warps of a team; the methods are the stages of a tile in their order.
template <bool kBounded, bool kConvolved, bool kNorm, bool kAligned>
struct KdaTeamWarp {
  const KdaParams& p;
  KdaTeam& s;
  const KdaSplit& split;
  bool transition;
  int team, half, lane, thread;  // thread of the team
  int64_t width, home;
  float rate;                 // -e^A_log
  float slope, bias0, bias1;  // of the lane's two channels: the gate takes slope logit + bias

  __device__ __forceinline__ void Sync() const { NamedBarrierSync(1 + team, kTeamThreads); }
  // The lane's two channels of a row; `tile` is that of the first half.
  __device__ __forceinline__ uint32_t& Pair(KdaHalfTile& tile, int row) const {
    return *reinterpret_cast<uint32_t*>(tile.bytes + half * kHalfBytes + row * 128 + ((lane * 4) ^ (row % 8 * 16)));
  }

  // Puts 128 columns of a tile's rows on their way. Elements of rows that do not exist become kAbsent.
  static constexpr uint32_t kZeros = 0, kNoDecay = 0xff80ff80;  // pairs; minus infinity: a gate's decay is 1
  template <uint32_t kAbsent = kZeros>
  __device__ __forceinline__ void Fetch(KdaHalfTile& to, const MatrixView& from, int64_t column, KdaTile tile,
                                        uint32_t thread) const {
    const int count = tile.end - tile.begin, row = thread / 16;
    const bf16* data = static_cast<const bf16*>(from.data);
    if constexpr (!kAligned) {
      data += tile.begin * from.ld + column;
      for (int i = thread; i < kTileRows * kTileDim; i += kTeamThreads) {
        const int r = i / kTileDim, c = i % kTileDim;
        *reinterpret_cast<bf16*>(to.bytes + TeamPiece(r, c / 8) + c % 8 * 2) =
            r < count ? data[r * from.ld + c] : FromFloat<bf16>(__uint_as_float(kAbsent & 0xffff0000u));
      }
      return;
    }
    unsigned char* target = to.bytes + TeamPiece(row, thread % 16);
    unsigned char* target4 = to.bytes + TeamPiece(row + 4, thread % 16);
    const bf16* source = data + (tile.begin + row) * from.ld + column + thread % 16 * 8;
    const int64_t step = 4 * from.ld;
    if (count == kTileRows) {
      CopyAsync16(target, source);
      CopyAsync16(target4, source += step);
      CopyAsync16(target + 8 * 128, source += step);
      CopyAsync16(target4 + 8 * 128, source += step);
      return;
    }
#pragma unroll
    for (int i = 0; i < kTileRows / 4; ++i) {
      const bool exists = row + 4 * i < count;
      unsigned char* piece = (i % 2 ? target4 : target) + i / 2 * 8 * 128;
      if (kAbsent == 0 || exists) {
        CopyAsync16(piece, exists ? source + i * step : data, exists);
      } else {
        *reinterpret_cast<uint4*>(piece) = {kAbsent, kAbsent, kAbsent, kAbsent};
      }
    }
  }
  __device__ __forceinline__ void FetchInputs(const KdaInputs<bf16>& inputs, int row_in_sequence, KdaTile tile) const {
    const uint32_t thread = Fresh(this->thread);
    Fetch(s.half[0].raw[0], p.qkv, home, tile, thread);
    Fetch(s.half[0].raw[1], p.qkv, home + width, tile, thread);
    Fetch<kNoDecay>(s.half[0].raw[2], p.decay, home, tile, thread);
    if constexpr (!kConvolved) {
      constexpr int kPieces = 3 * (kTileTaps - 1) * 16;
#pragma unroll
      for (int i = thread; i < kPieces; i += kTeamThreads) {
        const int piece = i % 16, row = i / 16 % (kTileTaps - 1), part = i / 16 / (kTileTaps - 1);
        const bf16* source = inputs.Row(row_in_sequence - (kTileTaps - 1) + row);
        const bool exists = source != nullptr;
        source = exists ? source + part * width + home + 8 * piece : inputs.step;
        if constexpr (kAligned) {
          CopyAsync16(&s.history[part][row][16 * piece], source, exists);
        } else {
          bf16* to = reinterpret_cast<bf16*>(&s.history[part][row][16 * piece]);
          for (int c = 0; c < 8; ++c) to[c] = exists ? source[c] : FromFloat<bf16>(0.0f);
        }
      }
    }
  }
  __device__ __forceinline__ void FetchValues(int parity, KdaTile tile) const {
    Fetch(s.half[0].value[parity], p.qkv, home + 2 * width, tile, Fresh(thread));
  }

  // Convolution and SiLU in place, to fp16. x sigmoid(x) = h + h tanh(h) with h = x / 2.
  __device__ __forceinline__ void Convolve(KdaHalfTile& matrix, int part) const {
    float low[kTileTaps], high[kTileTaps];
    const float* taps = p.conv_taps + (part * width + home + half * 64 + 2 * lane) * kTileTaps;
    LoadFloats<kTileTaps>(taps, low);
    LoadFloats<kTileTaps>(taps + kTileTaps, high);
    uint32_t window[kTileTaps];
#pragma unroll
    for (int i = 0; i < kTileTaps - 1; ++i) {
      window[i] = *reinterpret_cast<const uint32_t*>(&s.history[part][i][half * 128 + lane * 4]);
    }
#pragma unroll
    for (int j = 0; j < kTileTaps; ++j) low[j] *= 0.5f, high[j] *= 0.5f;
#pragma unroll
    for (int row = 0; row < kTileRows; ++row) {
      window[(row + kTileTaps - 1) % kTileTaps] = Pair(matrix, row);
      float x = low[0] * LowBf16(window[row % kTileTaps]), y = high[0] * HighBf16(window[row % kTileTaps]);
#pragma unroll
      for (int j = 1; j < kTileTaps; ++j) {
        x = fmaf(low[j], LowBf16(window[(row + j) % kTileTaps]), x);
        y = fmaf(high[j], HighBf16(window[(row + j) % kTileTaps]), y);
      }
      Pair(matrix, row) = PackF16(fmaf(x, Tanh(x), x), fmaf(y, Tanh(y), y));
    }
  }

  // The lane's row of ldmatrix in the first pieces of a tile's row: [16 rows, 2 pieces], down the rows first or not.
  // Others are XOR 32 (two pieces on) and + kHalfBytes.
  __device__ __forceinline__ uint32_t MatrixRow(const KdaHalfTile& tile, bool rows_first) const {
    const uint32_t lane = Fresh(this->lane), row = rows_first ? lane % 16 : lane / 16 * 8 + lane % 8;
    return SharedAddress(tile.bytes) + TeamPiece(row, rows_first ? lane / 16 : lane / 8 % 2);
  }

  // Sums of squares of the rows over the warp's channels, from the diagonal of the product with itself.
  __device__ __forceinline__ void Squares(const KdaHalfTile& tile, float* to) const {
    float low[4] = {}, high[4] = {};
    const uint32_t address = MatrixRow(tile, true) + half * kHalfBytes;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t rows[4];
      LoadMatrix4<0>(rows, address ^ (32 * step));
      if constexpr (kConvolved) {
        MmaBf16(low, rows, rows[0], rows[2]);
        MmaBf16(high, rows, rows[1], rows[3]);
      } else {
        MmaF16(low, rows, rows[0], rows[2]);
        MmaF16(high, rows, rows[1], rows[3]);
      }
    }
    const uint32_t lane = Fresh(this->lane), g = lane / 4;
    if (lane % 4 == g / 2) {
      to[g] = g % 2 ? low[1] : low[0];
      to[g + 8] = g % 2 ? high[3] : high[2];
    }
  }

  // sum + the log-decay (base 2) of x = slope logit + bias.
  __device__ __forceinline__ float Decayed(float sum, float x) const {
    if constexpr (kBounded) return fmaf(p.gate_lower_bound * kLog2E, Reciprocal(1.0f + Exp2(x)), sum);
    return sum + fmaxf(rate * Softplus2(x), kLeastLog2Decay);
  }

  // c: the lane's running log-decay (base 2) from the tile's start.
  __device__ __forceinline__ void Begin(int parity, float beta, float (&c0)[kTileRows], float (&c1)[kTileRows]) const {
    if constexpr (!kConvolved) {
      Convolve(s.half[0].raw[0], 0);
      Convolve(s.half[0].raw[1], 1);
      CopyAsyncWait<0>();
      Sync();
      if (!transition) Convolve(s.half[0].value[parity], 2);
    }
    if (thread < kTileRows) s.beta[thread] = beta;
    __syncwarp();
    Squares(s.half[0].raw[0], s.squares[half][0]);
    Squares(s.half[0].raw[1], s.squares[half][1]);
    float sum0 = 0, sum1 = 0;
#pragma unroll
    for (int row = 0; row < kTileRows; ++row) {
      const uint32_t logits = Pair(s.half[0].raw[2], row);
      sum0 = Decayed(sum0, fmaf(LowBf16(logits), slope, bias0));
      sum1 = Decayed(sum1, fmaf(HighBf16(logits), slope, bias1));
      c0[row] = sum0;
      c1[row] = sum1;
    }
  }

  // All operands of the tile. The slot must be free.
  __device__ __forceinline__ void Operands(const float (&c0)[kTileRows], const float (&c1)[kTileRows]) const {
    {
      const uint32_t lane = Fresh(this->lane), which = lane / 16, row = lane % 16;
      const float square = s.squares[0][which][row] + s.squares[1][which][row];
      reinterpret_cast<float*>(&s.scale[half][row])[which] =
          rsqrtf(square + kL2NormEps) * (which == 0 ? 0.08838834764831845f : 1.0f);
    }
    __syncwarp();
    // Bounded: R = 0, so that the factors of the scores are those of the other operands. A row's decay is at least
    // 2^-116 then, and what becomes subnormal of its operand lies below its rounding.
    float middle0 = 0, middle1 = 0, before0 = 1, before1 = 1;
    if constexpr (!kBounded) {
      middle0 = c0[kTileRows / 2 - 1] + kAnchorShift, middle1 = c1[kTileRows / 2 - 1] + kAnchorShift;
      before0 = Exp2(middle0), before1 = Exp2(middle1);
    }
    float after0 = Exp2(c0[kTileRows - 1] - middle0), after1 = Exp2(c1[kTileRows - 1] - middle1);
    float4 scales;  // of q and k in two rows
#pragma unroll
    for (int row = 0; row < kTileRows; ++row) {
      if (!kBounded && row == kTileRows / 2) {
        // A factor that becomes zero here belongs to values below 2^-66.
        middle0 -= 2 * kAnchorShift, middle1 -= 2 * kAnchorShift;
        before0 = Exp2(middle0), before1 = Exp2(middle1);
        after0 = Exp2(c0[kTileRows - 1] - middle0), after1 = Exp2(c1[kTileRows - 1] - middle1);
      }
      if (row % 2 == 0) scales = *reinterpret_cast<const float4*>(&s.scale[half][row]);
      const float q_scale = row % 2 == 0 ? scales.x : scales.z, k_scale = row % 2 == 0 ? scales.y : scales.w;
      const uint32_t raw_q = Pair(s.half[0].raw[0], row), raw_k = Pair(s.half[0].raw[1], row);
      const float2 q = kConvolved ? float2{LowBf16(raw_q), HighBf16(raw_q)} : UnpackF16(raw_q);
      const float2 k = kConvolved ? float2{LowBf16(raw_k), HighBf16(raw_k)} : UnpackF16(raw_k);
      const float x0 = kBounded ? c0[row] : c0[row] - middle0, x1 = kBounded ? c1[row] : c1[row] - middle1;
      const float r0 = Exp2(x0), r1 = Exp2(x1), f0 = Exp2(-x0), f1 = Exp2(-x1);
      const float k0 = k.x * k_scale, k1 = k.y * k_scale;
      float qr0 = q.x * q_scale * r0, qr1 = q.y * q_scale * r1;
      float kr0 = k0 * r0, kr1 = k1 * r1;
      const float kf0 = k0 * f0, kf1 = k1 * f1;
      Pair(s.half[0].raw[0], row) = PackBf16(qr0, qr1);
      Pair(s.half[0].raw[1], row) = PackBf16(kr0, kr1);
      Pair(s.half[0].raw[2], row) = PackBf16(kf0, kf1);
      if constexpr (!kBounded) qr0 *= before0, qr1 *= before1, kr0 *= before0, kr1 *= before1;
      Pair(s.half[0].decayed_k, row) = PackF16(kr0, kr1);
      Pair(s.half[0].decayed_q, row) = PackF16(qr0, qr1);
      Pair(s.half[0].restored_k, row) = PackF16(kf0 * after0, kf1 * after1);
    }
    // Channels 16 m + 8 n + 2 t and the next lie at 16 m + 4 t + 2 n.
    const uint32_t channel = half * 64 + 2 * Fresh(lane);
    *reinterpret_cast<float2*>(&s.decay[channel / 16 * 16 + channel % 8 * 2 + channel / 8 % 2 * 2]) = {
        Exp2(c0[kTileRows - 1]), Exp2(c1[kTileRows - 1])};
    FenceSharedForMatrix();
  }

  // sum = rows of s.half[0].raw[which] times the rows of s.half[0].raw[2] (columns of the result).
  __device__ __forceinline__ void Scores(int which, float (&sum)[2][4]) const {
    const uint32_t row = MatrixRow(s.half[0].raw[which], true), column = MatrixRow(s.half[0].raw[2], false);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t rows[4], columns[4];
      LoadMatrix4<0>(rows, row ^ (32 * step));
      LoadMatrix4<0>(columns, column ^ (32 * step));
      MmaBf16(sum[0], rows, columns[0], columns[1]);
      MmaBf16(sum[1], rows, columns[2], columns[3]);
      LoadMatrix4<kHalfBytes>(rows, row ^ (32 * step));
      LoadMatrix4<kHalfBytes>(columns, column ^ (32 * step));
      MmaBf16(sum[0], rows, columns[0], columns[1]);
      MmaBf16(sum[1], rows, columns[2], columns[3]);
    }
    if constexpr (!kBounded) {
      sum[0][2] *= kAnchorUnshift;
      sum[0][3] *= kAnchorUnshift;
    }
  }
  // A, its inverse by substitution in fp32 (spec 4.3), T diag(beta). One warp.
  __device__ __forceinline__ void Invert(const float (&sum)[2][4]) const {
    const uint32_t lane = Fresh(this->lane), g = lane / 4, t = lane % 4;
    // Transposed. Nothing takes what stands above the diagonal: those products may be huge.
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = g + e / 2 * 8, j = 8 * n + 2 * t + e % 2;
        s.a[j][i] = sum[n][e] * s.beta[i];
      }
    }
    __syncwarp();
    // Each finished element at once goes off the ones below it: a chain of one operation a row.
    const int column = lane % 16;
    float x[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) x[r] = r == column ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < kTileRows - 1; ++m) {
#pragma unroll
      for (int r = (m + 1) / 4 * 4; r < kTileRows; r += 4) {
        const float4 a = *reinterpret_cast<const float4*>(&s.a[m][r]);
        if (r > m) x[r] = fmaf(-a.x, x[m], x[r]);
        if (r + 1 > m) x[r + 1] = fmaf(-a.y, x[m], x[r + 1]);
        if (r + 2 > m) x[r + 2] = fmaf(-a.z, x[m], x[r + 2]);
        x[r + 3] = fmaf(-a.w, x[m], x[r + 3]);
      }
    }
    const float beta = s.beta[column];
    __syncwarp();  // the inverse lies where A is
    if (lane < 16) {
#pragma unroll
      for (int r = 0; r < kTileRows; r += 2) {
        const uint32_t pair = PackF16(x[r] * beta, x[r + 1] * beta);
        s.inverse[r][column] = static_cast<uint16_t>(pair);
        s.inverse[r + 1][column] = static_cast<uint16_t>(pair >> 16);
      }
    }
  }
  __device__ __forceinline__ void OutputScores(const float (&sum)[2][4]) const {
    const uint32_t lane = Fresh(this->lane), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int i = g + e / 2 * 8, j = 8 * n + 2 * t;
        *reinterpret_cast<uint32_t*>(&s.scores[i][j]) =
            PackF16(j <= i ? sum[n][e] : 0.0f, j + 1 <= i ? sum[n][e + 1] : 0.0f);
      }
    }
  }

  // Outputs of a tile that the walkers have left, to where they belong; normed and gated with kNorm.
  __device__ __forceinline__ void Store(int parity, KdaTile tile) const {
    const uint32_t thread = Fresh(this->thread);
    const int piece = thread % 16, first = thread / 16, count = tile.end - tile.begin;
    float weight[8];
    uint4 gates[kTileRows / 4];
    if constexpr (kNorm) {
      LoadFloats<8>(p.norm_weight + 8 * piece, weight);
      const bf16* from = static_cast<const bf16*>(p.gate.data) + tile.begin * p.gate.ld + home + 8 * piece;
#pragma unroll
      for (int i = 0; i < kTileRows / 4; ++i) {
        const bf16* row = from + min(first + 4 * i, count - 1) * p.gate.ld;
        gates[i] = kAligned ? *reinterpret_cast<const uint4*>(row) : LoadUnaligned(row);
      }
    }
    const int64_t ld = transition ? width : p.out.ld;
    uint16_t* to = (transition ? split.queries : static_cast<uint16_t*>(p.out.data)) + (tile.begin + first) * ld +
                   home + 8 * piece;
#pragma unroll
    for (int i = 0; i < kTileRows / 4; ++i, to += 4 * ld) {
      uint4 out = *reinterpret_cast<const uint4*>(s.half[0].value[parity].bytes + TeamPiece(first + 4 * i, piece));
      if constexpr (kNorm) {
        uint32_t* pairs = reinterpret_cast<uint32_t*>(&out);
        const uint32_t gate[4] = {gates[i].x, gates[i].y, gates[i].z, gates[i].w};
        float square = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          square = fmaf(LowBf16(pairs[e]), LowBf16(pairs[e]), square);
          square = fmaf(HighBf16(pairs[e]), HighBf16(pairs[e]), square);
        }
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) square += __shfl_xor_sync(kAllLanes, square, offset);
        // sigmoid(x) = (1 + tanh(x / 2)) / 2
        const float scale = 0.5f * rsqrtf(square / kTileDim + p.norm_eps);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = LowBf16(pairs[e]) * weight[2 * e] * scale, y = HighBf16(pairs[e]) * weight[2 * e + 1] * scale;
          pairs[e] = PackBf16(fmaf(x, Tanh(0.5f * LowBf16(gate[e])), x), fmaf(y, Tanh(0.5f * HighBf16(gate[e])), y));
        }
      }
      if (first + 4 * i >= count) continue;
      if (kAligned || transition) {
        Store16(to, out);
      } else {
        const uint16_t* elements = reinterpret_cast<const uint16_t*>(&out);
#pragma unroll
        for (int c = 0; c < 8; ++c) to[c] = elements[c];
      }
    }
  }
};

template <bool kBounded, bool kConvolved, bool kNorm, bool kAligned>
__device__ __forceinline__ void KdaPrepareTiles(const KdaParams& p, const SequenceBatch& batch, KdaFusedShared& shared,
                                                const KdaTiles& tiles, const KdaSplit& split, bool transition,
                                                int sequence_begin, int slot, int head, int warp) {
  const int team = warp / 2;
  const int64_t width = static_cast<int64_t>(p.heads) * kTileDim, home = static_cast<int64_t>(head) * kTileDim;
  KdaTeamWarp<kBounded, kConvolved, kNorm, kAligned> self{p,
                                                          shared.teams[team],
                                                          split,
                                                          transition,
                                                          team,
                                                          warp % 2,
                                                          static_cast<int>(threadIdx.x % 32),
                                                          static_cast<int>(threadIdx.x % kTeamThreads),
                                                          width,
                                                          home};
  self.rate = -fmaxf(__expf(p.a_log[head]), 1e-30f);  // times minus infinity: not NaN
  self.slope = kBounded ? kLog2E * self.rate : kLog2E;
  const float2 bias = *reinterpret_cast<const float2*>(p.dt_bias + home + self.half * 64 + 2 * self.lane);
  self.bias0 = bias.x * self.slope;
  self.bias1 = bias.y * self.slope;
  const KdaInputs<bf16> inputs = MakeKdaInputs<bf16>(p, sequence_begin, slot);
  // As loaded, so that nothing waits for it before it is needed.
  constexpr uint32_t kNoBeta = 0xff80;  // minus infinity
  const auto beta_logit = [&](KdaTile tile) -> uint32_t {
    const int row = tile.begin + self.thread;
    return self.thread < kTileRows && row < tile.end ? static_cast<const uint16_t*>(p.beta.data)[row * p.beta.ld + head]
                                                     : kNoBeta;
  };
  KdaTile tile = tiles.Ahead(batch, tiles.From(batch, tiles.first), team), before{};
  if (tile.begin >= tiles.last) return;
  // Values come in a group of their own: their place is free late, and they are needed later than the rest.
  self.FetchInputs(inputs, tile.begin - sequence_begin, tile);
  CopyAsyncCommit();
  if (!transition) self.FetchValues(0, tile);
  CopyAsyncCommit();
  uint32_t beta = beta_logit(tile);
  int m = 0;
  for (;; ++m) {
    const int parity = m % 2;
    float c0[kTileRows], c1[kTileRows];
    CopyAsyncWait<1>();
    self.Sync();
    asm volatile("" : "+r"(beta));
    self.Begin(parity, Sigmoid(LowBf16(beta)), c0, c1);
    self.Sync();
    if (m > 0) BarrierWait(&shared.done[team], 1 - parity);
    self.Operands(c0, c1);
    self.Sync();
    float sum[2][4] = {};
    const bool inverts = self.half == parity;
    self.Scores(inverts ? 1 : 0, sum);
    CopyAsyncWait<0>();
    self.Sync();  // the operands of the scores are not needed any more
    const KdaTile next = tiles.Ahead(batch, tile, kTeams);
    const bool more = next.begin < tiles.last;
    if (more) {
      self.FetchInputs(inputs, next.begin - sequence_begin, next);
      beta = beta_logit(next);
    }
    CopyAsyncCommit();
    if (inverts) {
      self.Invert(sum);
    } else {
      self.OutputScores(sum);
    }
    ArriveAsWarp(&shared.full[team], self.lane);
    if (m > 0) self.Store(1 - parity, before);
    // A thread's copies of 16 bytes go where it has just read.
    if (!kAligned) self.Sync();
    if (more && !transition) self.FetchValues(1 - parity, next);
    CopyAsyncCommit();
    before = tile;
    tile = next;
    if (!more) break;
  }
  BarrierWait(&shared.done[team], m % 2);
  self.Store(m % 2, before);
}

}  // namespace k3::cuda
