// Included by the kernels_<isa>.cc files: norms, residual mixes, activations and reductions over one row.
#pragma once

#include <cstdint>

#include "kernels/op_params.h"

namespace k3::K3_SIMD {

inline int64_t Lanes(int64_t n, int64_t i) { return n - i < 16 ? n - i : 16; }

inline void AddRow(float* y, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    Store(y + i, Add(Load(y + i, c), Load(x + i, c)), c);
  }
}

// Element i goes to lane i % 16 of accumulator (i / 16) % 4.
inline float SumSquares(const float* x, int64_t n) {
  F32x16 acc[4] = {Zero(), Zero(), Zero(), Zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int a = 0; a < 4; ++a) {
      const F32x16 v = Load(x + i + 16 * a);
      acc[a] = Fma(v, v, acc[a]);
    }
  }
  for (int a = 0; i < n; i += 16, ++a) {
    const F32x16 v = Load(x + i, Lanes(n, i));
    acc[a] = Fma(v, v, acc[a]);
  }
  return ReduceAdd(Add(Add(acc[0], acc[1]), Add(acc[2], acc[3])));
}

inline float InverseRms(float sum_squares, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(sum_squares / static_cast<float>(n) + eps);
}

inline void ScaleRow(const float* x, const float* weight, float scale, int64_t n, float* out) {
  const F32x16 s = Set(scale);
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    Store(out + i, Mul(Mul(Load(x + i, c), s), Load(weight + i, c)), c);
  }
}

inline void RmsNormRow(const float* x, const float* weight, float eps, int64_t n, float* out) {
  ScaleRow(x, weight, InverseRms(SumSquares(x, n), n, eps), n, out);
}

// out = exp(x - max(x)) / sum: the sum in lane order i % 16.
inline void SoftmaxRow(const float* x, int64_t n, float* out) {
  F32x16 top = Set(-__builtin_inff());
  for (int64_t i = 0; i < n; i += 16)
    top = Max(top, FillTail(Load(x + i, Lanes(n, i)), Lanes(n, i), -__builtin_inff()));
  const F32x16 max = Set(ReduceMax(top));
  F32x16 sum = Zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    const F32x16 e = Exp(Sub(Load(x + i, c), max));
    Store(out + i, e, c);
    sum = Add(sum, FillTail(e, c, 0.0f));
  }
  const F32x16 total = Set(ReduceAdd(sum));
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    Store(out + i, Div(Load(out + i, c), total), c);
  }
}

// The score of one source: (source . query) / rms(source).
inline float AttnResScore(const float* source, const float* query, float mix_eps, int64_t n) {
  F32x16 dot[2] = {Zero(), Zero()}, squares[2] = {Zero(), Zero()};
  for (int64_t i = 0, a = 0; i < n; i += 16, a ^= 1) {
    const int64_t c = Lanes(n, i);
    const F32x16 v = Load(source + i, c);
    dot[a] = Fma(v, Load(query + i, c), dot[a]);
    squares[a] = Fma(v, v, squares[a]);
  }
  return ReduceAdd(Add(dot[0], dot[1])) * InverseRms(ReduceAdd(Add(squares[0], squares[1])), n, mix_eps);
}

// Spec 3.2: score of a source = (source . query) / rms(source); sources mixed by softmax, then RMSNorm of the mix.
inline void AttnResRow(const float* const* sources, int count, const float* query, float mix_eps,
                       const float* norm_weight, float norm_eps, int64_t n, float* scores, float* out) {
  for (int j = 0; j < count; ++j) scores[j] = AttnResScore(sources[j], query, mix_eps, n);
  SoftmaxRow(scores, count, scores);
  F32x16 squares = Zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    F32x16 mix = Zero();
    for (int j = 0; j < count; ++j) mix = Fma(Set(scores[j]), Load(sources[j] + i, c), mix);
    squares = Fma(mix, mix, squares);
    Store(out + i, mix, c);
  }
  ScaleRow(out, norm_weight, InverseRms(ReduceAdd(squares), n, norm_eps), n, out);
}

inline void GatedActivationRow(const float* gate, const float* up, const ActivationSpec& spec, int64_t n, float* out) {
  const F32x16 beta = Set(spec.beta), linear_beta = Set(spec.linear_beta);
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    const F32x16 g = Load(gate + i, c);
    F32x16 u = Load(up + i, c);
    F32x16 activated;
    if (spec.kind == Activation::kSwiglu) {
      activated = Silu(g);
    } else {
      activated = Mul(Mul(beta, Tanh(Div(g, beta))), Sigmoid(g));
      if (spec.linear_beta > 0) u = Mul(linear_beta, Tanh(Div(u, linear_beta)));
    }
    Store(out + i, Mul(activated, u), c);
  }
}

inline void SigmoidRow(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) Store(out + i, Sigmoid(Load(x + i, Lanes(n, i))), Lanes(n, i));
}

inline void ExpRow(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) Store(out + i, Exp(Load(x + i, Lanes(n, i))), Lanes(n, i));
}

// The first phase for one site: the sources' mix without norm, its greatest score and the sum of exp(score - top).
inline void AttnResClosedRow(const float* const* sources, int count, const float* query, float mix_eps, int64_t n,
                             float* scores, float* mix, float* top, float* sum) {
  for (int j = 0; j < count; ++j) scores[j] = AttnResScore(sources[j], query, mix_eps, n);
  float most = scores[0];
  for (int j = 1; j < count; ++j) most = scores[j] > most ? scores[j] : most;
  for (int j = 0; j < count; ++j) scores[j] -= most;
  ExpRow(scores, count, scores);
  float total = 0;
  for (int j = 0; j < count; ++j) total += scores[j];
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    F32x16 value = Zero();
    for (int j = 0; j < count; ++j) value = Fma(Set(scores[j] / total), Load(sources[j] + i, c), value);
    Store(mix + i, value, c);
  }
  *top = most;
  *sum = total;
}

// The second: the live sum joins by a softmax of two, then RMSNorm.
inline void AttnResJoinRow(const float* live, const float* mix, float top, float sum, const float* query, float mix_eps,
                           const float* norm_weight, float norm_eps, int64_t n, float* out) {
  const float score = AttnResScore(live, query, mix_eps, n);
  const float most = score > top ? score : top;
  float weights[2] = {top - most, score - most};
  ExpRow(weights, 2, weights);
  weights[0] *= sum;
  const float total = weights[0] + weights[1];
  const F32x16 closed = Set(weights[0] / total), own = Set(weights[1] / total);
  F32x16 squares = Zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    const F32x16 value = Fma(own, Load(live + i, c), Mul(closed, Load(mix + i, c)));
    squares = Fma(value, value, squares);
    Store(out + i, value, c);
  }
  ScaleRow(out, norm_weight, InverseRms(ReduceAdd(squares), n, norm_eps), n, out);
}

inline void WidenBf16Row(const uint16_t* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) Store(out + i, LoadBf16(x + i, Lanes(n, i)), Lanes(n, i));
}

inline void NarrowBf16Row(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += 16) StoreBf16(out + i, Load(x + i, Lanes(n, i)), Lanes(n, i));
}

inline void ScaleAddRow(float* acc, float a, const float* x, float b, int64_t n) {
  const F32x16 va = Set(a), vb = Set(b);
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    Store(acc + i, Fma(Load(x + i, c), vb, Mul(Load(acc + i, c), va)), c);
  }
}

inline void MulSigmoidRow(float* y, const float* gate, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    Store(y + i, Mul(Load(y + i, c), Sigmoid(Load(gate + i, c))), c);
  }
}

// NaN fails both comparisons of x < inf, as does +inf.
inline void LogitRange(const float* z, int64_t n, float* max, bool* bad) {
  const float inf = __builtin_inff();
  F32x16 top = Set(-inf), flaw = Zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    const F32x16 v = FillTail(Load(z + i, c), c, -inf);
    top = Max(v, top);
    flaw = SelectLess(v, Set(inf), flaw, Set(1.0f));
  }
  *max = ReduceMax(top);
  *bad = ReduceMax(flaw) > 0;
}

// Blocks of 1024 in fp32 lanes, the blocks in double: the error does not grow with the vocabulary.
inline double SumExp(const float* z, int64_t n, float max) {
  const F32x16 shift = Set(max);
  double total = 0;
  for (int64_t block = 0; block < n; block += 1024) {
    const int64_t end = n - block < 1024 ? n : block + 1024;
    F32x16 sum = Zero();
    for (int64_t i = block; i < end; i += 16) {
      const int64_t c = Lanes(end, i);
      sum = Add(sum, FillTail(Exp(Sub(Load(z + i, c), shift)), c, 0.0f));
    }
    total += static_cast<double>(ReduceAdd(sum));
  }
  return total;
}

}  // namespace k3::K3_SIMD
