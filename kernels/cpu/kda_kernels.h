// Included by the kernels_<isa>.cc files: one token of one head of the KDA sublayer (spec 3.3).
#pragma once

#include "kernels/cpu/kernel_table.h"

namespace k3::K3_SIMD {

// Causal depthwise convolution over the last W raw inputs, then SiLU.
inline void ConvSilu(const float* const* history, const float* taps, int64_t tap_stride, int width, int64_t d,
                     float* out) {
  for (int64_t i = 0; i < d; i += 16) {
    const int64_t c = Lanes(d, i);
    F32x16 acc = Zero();
    for (int j = 0; j < width; ++j) acc = Fma(Load(taps + j * tap_stride + i, c), Load(history[j] + i, c), acc);
    Store(out + i, Silu(acc), c);
  }
}

// x * scale / sqrt(sum x^2 + 1e-6)
inline void L2Normalise(float* x, int64_t d, float scale) {
  const F32x16 factor = Set(scale / __builtin_sqrtf(SumSquares(x, d) + 1e-6f));
  for (int64_t i = 0; i < d; i += 16) Store(x + i, Mul(Load(x + i, Lanes(d, i)), factor), Lanes(d, i));
}

inline void KdaPrepare(const KdaPrepareArgs& a) {
  const int64_t d = a.head_dim;
  float* const outputs[3] = {a.q, a.k, a.v};
  for (int part = 0; part < 3; ++part)
    ConvSilu(a.history[part], a.taps[part], a.tap_stride, a.conv_width, d, outputs[part]);
  L2Normalise(a.q, d, 1.0f / __builtin_sqrtf(static_cast<float>(d)));
  L2Normalise(a.k, d, 1.0f);
  const F32x16 rate = Exp(Set(a.a_log));
  for (int64_t i = 0; i < d; i += 16) {
    const int64_t c = Lanes(d, i);
    const F32x16 z = Add(Load(a.decay + i, c), Load(a.dt_bias + i, c));
    const F32x16 g = a.gate_kind == KdaGate::kBounded ? Mul(Set(a.lower_bound), Sigmoid(Mul(rate, z)))
                                                      : Sub(Zero(), Mul(rate, Softplus(z)));
    const F32x16 slow = Set(-0.5f);
    Store(a.decay_base + i, SelectLess(slow, g, Set(1.0f), Zero()), c);
    Store(a.decay_delta + i, SelectLess(slow, g, ExpMinus1(g), Exp(g)), c);
  }
}

struct F32State {
  using Element = float;
  static F32x16 LoadRow(const float* p, int64_t c) { return Load(p, c); }
  static void StoreRow(float* p, F32x16 x, int64_t c) { Store(p, x, c); }
};
struct Bf16State {
  using Element = uint16_t;
  static F32x16 LoadRow(const uint16_t* p, int64_t c) { return LoadBf16(p, c); }
  static void StoreRow(uint16_t* p, F32x16 x, int64_t c) { StoreBf16(p, x, c); }
};

// k times its channel's decay.
inline F32x16 DecayedKey(const KdaStepArgs& a, int i) {
  return Set(__builtin_fmaf(a.k[i], a.decay_delta[i], a.k[i] * a.decay_base[i]));
}

// The decayed prediction is formed as S^T (exp(g) * k), so that the state is read twice and written once per token.
// Rows of the state go to two accumulators, even and odd, to shorten the chains. A BF16 state is rounded after every
// token, whatever the chunk; the output reads the unrounded sum.
template <class State, int NV>
void KdaStepColumns(const KdaStepArgs& a, int64_t column, int64_t last_lanes) {
  using Element = typename State::Element;
  Element* state = static_cast<Element*>(a.state) + column;
  const auto lanes = [&](int v) { return v == NV - 1 ? last_lanes : int64_t{16}; };
  F32x16 even[NV], odd[NV];
  for (int v = 0; v < NV; ++v) even[v] = odd[v] = Zero();
  const Element* row = state;
  int i = 0;
  for (; i + 2 <= a.head_dim; i += 2, row += 2 * a.row_stride) {
    const F32x16 k0 = DecayedKey(a, i), k1 = DecayedKey(a, i + 1);
    for (int v = 0; v < NV; ++v) {
      even[v] = Fma(k0, State::LoadRow(row + 16 * v, lanes(v)), even[v]);
      odd[v] = Fma(k1, State::LoadRow(row + a.row_stride + 16 * v, lanes(v)), odd[v]);
    }
  }
  if (i < a.head_dim) {
    const F32x16 k0 = DecayedKey(a, i);
    for (int v = 0; v < NV; ++v) even[v] = Fma(k0, State::LoadRow(row + 16 * v, lanes(v)), even[v]);
  }
  F32x16 u[NV];
  for (int v = 0; v < NV; ++v) {
    const F32x16 value = Load(a.v + column + 16 * v, lanes(v));
    u[v] = Mul(Set(a.beta), Sub(value, Add(even[v], odd[v])));
    even[v] = odd[v] = Zero();
  }
  Element* out_row = state;
  for (i = 0; i < a.head_dim; ++i, out_row += a.row_stride) {
    const F32x16 base = Set(a.decay_base[i]), delta = Set(a.decay_delta[i]), k = Set(a.k[i]), q = Set(a.q[i]);
    F32x16* o = i % 2 == 0 ? even : odd;
    for (int v = 0; v < NV; ++v) {
      const F32x16 before = State::LoadRow(out_row + 16 * v, lanes(v));
      const F32x16 s = Fma(k, u[v], Fma(delta, before, Mul(base, before)));
      State::StoreRow(out_row + 16 * v, s, lanes(v));
      o[v] = Fma(q, s, o[v]);
    }
  }
  for (int v = 0; v < NV; ++v) Store(a.o + column + 16 * v, Add(even[v], odd[v]), lanes(v));
}

template <class State>
void KdaStepTyped(const KdaStepArgs& a) {
  int64_t column = 0;
  for (; column + 64 <= a.columns; column += 64) KdaStepColumns<State, 4>(a, column, 16);
  for (; column < a.columns; column += 16) KdaStepColumns<State, 1>(a, column, Lanes(a.columns, column));
}

inline void KdaStep(const KdaStepArgs& a) {
  return a.state_dtype == DType::kF32 ? KdaStepTyped<F32State>(a) : KdaStepTyped<Bf16State>(a);
}

inline void KdaOutput(const float* o, const float* weight, float eps, const float* gate, int64_t n, float* out) {
  const F32x16 scale = Set(InverseRms(SumSquares(o, n), n, eps));
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t c = Lanes(n, i);
    const F32x16 normed = Mul(Mul(Load(o + i, c), scale), Load(weight + i, c));
    Store(out + i, Mul(normed, Sigmoid(Load(gate + i, c))), c);
  }
}

}  // namespace k3::K3_SIMD
