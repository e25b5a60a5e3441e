// Included by the kernels_<isa>.cc files after K3_SIMD is defined as the namespace of the instruction set, hence no
// include guard against a second set: each file compiles exactly one.
#pragma once

// exp, sigmoid, tanh and softplus on sixteen lanes, within 2 ulp. Only multiply-adds, divisions and selections, so a
// value depends neither on its lane nor on the instruction set.
namespace k3::K3_SIMD {

// exp(x - n ln 2) - 1 for n = round(x / ln 2), by a polynomial on |r| <= ln 2 / 2.
inline F32x16 ExpReduced(F32x16 x, F32x16 n) {
  F32x16 r = Fma(n, Set(-0.693359375f), x);
  r = Fma(n, Set(2.12194440e-4f), r);
  F32x16 p = Set(1.9875691500e-4f);
  p = Fma(p, r, Set(1.3981999507e-3f));
  p = Fma(p, r, Set(8.3334519073e-3f));
  p = Fma(p, r, Set(4.1665795894e-2f));
  p = Fma(p, r, Set(1.6666665459e-1f));
  p = Fma(p, r, Set(5.0000001201e-1f));
  return Fma(Mul(r, r), p, r);
}

// exp(x): n = round(x / ln 2), polynomial on |r| <= ln 2 / 2, scaled by 2^n in two steps so that results run through
// the subnormals to zero. NaN stays NaN.
inline F32x16 Exp(F32x16 x) {
  x = Max(Set(-105.0f), Min(Set(89.0f), x));
  const F32x16 n = RoundToEven(Mul(x, Set(1.44269504f)));
  const F32x16 p = Add(ExpReduced(x, n), Set(1.0f));
  const F32x16 half = RoundToEven(Mul(n, Set(0.5f)));
  return Mul(Mul(p, Pow2(half)), Pow2(Sub(n, half)));
}

// exp(x) - 1 with full relative accuracy, for x <= 0: 2^n (exp(r) - 1) + (2^n - 1).
inline F32x16 ExpMinus1(F32x16 x) {
  x = Max(Set(-60.0f), x);
  const F32x16 n = RoundToEven(Mul(x, Set(1.44269504f)));
  const F32x16 scale = Pow2(n);
  return Fma(scale, ExpReduced(x, n), Sub(scale, Set(1.0f)));
}

// 1 / (1 + exp(-x)), by exp of -|x| so that nothing overflows and small values keep their relative accuracy.
inline F32x16 Sigmoid(F32x16 x) {
  const F32x16 e = Exp(Sub(Zero(), Abs(x)));
  return Div(SelectLess(x, Zero(), e, Set(1.0f)), Add(Set(1.0f), e));
}

inline F32x16 Tanh(F32x16 x) {
  const F32x16 a = Abs(x);
  const F32x16 z = Mul(x, x);
  F32x16 p = Set(-5.70498872745e-3f);
  p = Fma(p, z, Set(2.06390887954e-2f));
  p = Fma(p, z, Set(-5.37397155531e-2f));
  p = Fma(p, z, Set(1.33314422036e-1f));
  p = Fma(p, z, Set(-3.33332819422e-1f));
  const F32x16 small = Fma(Mul(p, z), x, x);
  const F32x16 e = Exp(Add(a, a));
  const F32x16 large = CopySign(Sub(Set(1.0f), Div(Set(2.0f), Add(e, Set(1.0f)))), x);
  // The comparison is false for NaN, which must come out of `small`.
  return SelectLess(Set(0.625f), a, large, small);
}

inline F32x16 Silu(F32x16 x) { return Mul(x, Sigmoid(x)); }

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)); log1p(t) = 2 artanh(t / (2 + t)) by its series, |argument| <= 1/3.
inline F32x16 Softplus(F32x16 x) {
  const F32x16 t = Exp(Sub(Zero(), Abs(x)));
  const F32x16 s = Div(t, Add(Set(2.0f), t));
  const F32x16 z = Mul(s, s);
  F32x16 p = Set(1.0f / 17);
  p = Fma(p, z, Set(1.0f / 15));
  p = Fma(p, z, Set(1.0f / 13));
  p = Fma(p, z, Set(1.0f / 11));
  p = Fma(p, z, Set(1.0f / 9));
  p = Fma(p, z, Set(1.0f / 7));
  p = Fma(p, z, Set(1.0f / 5));
  p = Fma(p, z, Set(1.0f / 3));
  const F32x16 log1p = Mul(Set(2.0f), Fma(Mul(p, z), s, s));
  return Add(Max(Zero(), x), log1p);
}

}  // namespace k3::K3_SIMD
