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
  for (int part = 0; part < 3; ++part) {
    if (a.taps[part] == nullptr) {
      for (int64_t i = 0; i < d; i += 16) {
        const int64_t c = Lanes(d, i);
        Store(outputs[part] + i, Load(a.history[part][0] + i, c), c);
      }
    } else {
      ConvSilu(a.history[part], a.taps[part], a.tap_stride, a.conv_width, d, outputs[part]);
    }
  }
  L2Normalise(a.q, d, 1.0f / __builtin_sqrtf(static_cast<float>(d)));
  L2Normalise(a.k, d, 1.0f);
  const F32x16 rate = Exp(Set(a.a_log));
  for (int64_t i = 0; i < d; i += 16) {
    const int64_t c = Lanes(d, i);
    const F32x16 z = Add(Load(a.decay + i, c), Load(a.dt_bias + i, c));
    const F32x16 g = a.gate_kind == KdaGate::kBounded ? Mul(Set(a.lower_bound), Sigmoid(Mul(rate, z)))
                                                      : Sub(Zero(), Mul(rate, Softplus(z)));
    const F32x16 slow = Set(-0.5f);
    const F32x16 base = SelectLess(slow, g, Set(1.0f), Zero());
    const F32x16 delta = SelectLess(slow, g, ExpMinus1(g), Exp(g));
    const F32x16 k = Load(a.k + i, c);
    Store(a.decay_base + i, base, c);
    Store(a.decay_delta + i, delta, c);
    Store(a.decayed_k + i, Fma(k, delta, Mul(k, base)), c);
  }
}

struct F32State {
  using Element = float;
  static F32x16 LoadRow(const float* p) { return Load(p); }
  static F32x16 LoadRow(const float* p, int64_t lanes) { return Load(p, lanes); }
  static void StoreRow(float* p, F32x16 x) { Store(p, x); }
  static void StoreRow(float* p, F32x16 x, int64_t lanes) { Store(p, x, lanes); }
};
struct Bf16State {
  using Element = uint16_t;
  static F32x16 LoadRow(const uint16_t* p) { return LoadBf16(p); }
  static F32x16 LoadRow(const uint16_t* p, int64_t lanes) { return LoadBf16(p, lanes); }
  static void StoreRow(uint16_t* p, F32x16 x) { StoreBf16(p, x); }
  static void StoreRow(uint16_t* p, F32x16 x, int64_t lanes) { StoreBf16(p, x, lanes); }
};

// The decayed prediction is formed as S^T (exp(g) k), so that the state is read twice and written once per token. Rows
// of the state go to two accumulators, even and odd, to shorten the chains. A BF16 state is rounded after every token,
// whatever the chunk; the output reads the unrounded sum. kFull: 16 columns per vector; otherwise `lanes` of one
// vector.
template <class State, int NV, bool kFull>
void KdaStepColumns(const KdaStepArgs& a, int64_t column, int64_t lanes) {
  using Element = typename State::Element;
  const auto load = [&](const Element* p) { return kFull ? State::LoadRow(p) : State::LoadRow(p, lanes); };
  Element* const state = static_cast<Element*>(a.state) + column;
  F32x16 even[NV], odd[NV];
  for (int v = 0; v < NV; ++v) even[v] = odd[v] = Zero();
  const Element* row = state;
  int i = 0;
  for (; i + 2 <= a.head_dim; i += 2, row += 2 * a.row_stride) {
    const F32x16 k0 = Set(a.decayed_k[i]), k1 = Set(a.decayed_k[i + 1]);
    for (int v = 0; v < NV; ++v) {
      even[v] = Fma(k0, load(row + 16 * v), even[v]);
      odd[v] = Fma(k1, load(row + a.row_stride + 16 * v), odd[v]);
    }
  }
  if (i < a.head_dim) {
    const F32x16 k0 = Set(a.decayed_k[i]);
    for (int v = 0; v < NV; ++v) even[v] = Fma(k0, load(row + 16 * v), even[v]);
  }
  F32x16 u[NV];
  for (int v = 0; v < NV; ++v) {
    const float* value = a.v + column + 16 * v;
    u[v] = Mul(Set(a.beta), Sub(kFull ? Load(value) : Load(value, lanes), Add(even[v], odd[v])));
    even[v] = odd[v] = Zero();
  }
  const auto update = [&](int channel, Element* p, F32x16* o) {
    const F32x16 base = Set(a.decay_base[channel]), delta = Set(a.decay_delta[channel]);
    const F32x16 k = Set(a.k[channel]), q = Set(a.q[channel]);
    for (int v = 0; v < NV; ++v) {
      const F32x16 before = load(p + 16 * v);
      const F32x16 s = Fma(k, u[v], Fma(delta, before, Mul(base, before)));
      if constexpr (kFull) {
        State::StoreRow(p + 16 * v, s);
      } else {
        State::StoreRow(p + 16 * v, s, lanes);
      }
      o[v] = Fma(q, s, o[v]);
    }
  };
  Element* out_row = state;
  for (i = 0; i + 2 <= a.head_dim; i += 2, out_row += 2 * a.row_stride) {
    update(i, out_row, even);
    update(i + 1, out_row + a.row_stride, odd);
  }
  if (i < a.head_dim) update(i, out_row, even);
  for (int v = 0; v < NV; ++v) {
    float* out = a.o + column + 16 * v;
    Store(out, Add(even[v], odd[v]), kFull ? 16 : lanes);
  }
}

template <class State>
void KdaStepTyped(const KdaStepArgs& a) {
  int64_t column = 0;
  for (; column + 64 <= a.columns; column += 64) KdaStepColumns<State, 4, true>(a, column, 16);
  for (; column + 16 <= a.columns; column += 16) KdaStepColumns<State, 1, true>(a, column, 16);
  if (column < a.columns) KdaStepColumns<State, 1, false>(a, column, a.columns - column);
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
