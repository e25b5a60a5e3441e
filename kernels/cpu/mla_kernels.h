// Included by the kernels_<isa>.cc files: attention of a few query rows over lines of the latent cache (spec 3.4).
#pragma once

#include "kernels/cpu/kernel_table.h"

namespace k3::K3_SIMD {

struct F32Line {
  static F32x16 At(const void* line, int64_t i, int64_t c) { return Load(static_cast<const float*>(line) + i, c); }
};
struct Bf16Line {
  static F32x16 At(const void* line, int64_t i, int64_t c) {
    return LoadBf16(static_cast<const uint16_t*>(line) + i, c);
  }
};

// Dot products: element i in lane i % 16, ascending, then the tree of ReduceAdd.
template <class Line, int R, int K>
void ScoreTile(const float* const* q, const void* const* lines, int64_t width, float scale, float* const* scores,
               int key) {
  F32x16 acc[R][K];
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < K; ++k) acc[r][k] = Zero();
  }
  for (int64_t i = 0; i < width; i += 16) {
    const int64_t c = Lanes(width, i);
    F32x16 query[R];
    for (int r = 0; r < R; ++r) query[r] = Load(q[r] + i, c);
    for (int k = 0; k < K; ++k) {
      const F32x16 line = Line::At(lines[key + k], i, c);
      for (int r = 0; r < R; ++r) acc[r][k] = Fma(query[r], line, acc[r][k]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < K; ++k) scores[r][key + k] = ReduceAdd(acc[r][k]) * scale;
  }
}

template <class Line, int R>
void ScoreRows(const float* const* q, const void* const* lines, int keys, int64_t width, float scale,
               float* const* scores) {
  int key = 0;
  for (; key + 4 <= keys; key += 4) ScoreTile<Line, R, 4>(q, lines, width, scale, scores, key);
  for (; key < keys; ++key) ScoreTile<Line, R, 1>(q, lines, width, scale, scores, key);
}

template <class Line>
void ScoresTyped(const float* const* q, int rows, const void* const* lines, int keys, int64_t width, float scale,
                 float* const* scores) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) ScoreRows<Line, 4>(q + r, lines, keys, width, scale, scores + r);
  for (; r + 2 <= rows; r += 2) ScoreRows<Line, 2>(q + r, lines, keys, width, scale, scores + r);
  for (; r < rows; ++r) ScoreRows<Line, 1>(q + r, lines, keys, width, scale, scores + r);
}

inline void MlaScores(const float* const* q, int rows, const void* const* lines, DType dtype, int keys, int64_t width,
                      float scale, float* const* scores) {
  return dtype == DType::kF32 ? ScoresTyped<F32Line>(q, rows, lines, keys, width, scale, scores)
                              : ScoresTyped<Bf16Line>(q, rows, lines, keys, width, scale, scores);
}

inline void MlaSoftmax(float* scores, int keys, float* max, float* sum) {
  F32x16 top = Set(-__builtin_inff());
  for (int64_t i = 0; i < keys; i += 16) {
    top = Max(top, FillTail(Load(scores + i, Lanes(keys, i)), Lanes(keys, i), -__builtin_inff()));
  }
  *max = ReduceMax(top);
  const F32x16 shift = Set(*max);
  F32x16 total = Zero();
  for (int64_t i = 0; i < keys; i += 16) {
    const int64_t c = Lanes(keys, i);
    const F32x16 p = Exp(Sub(Load(scores + i, c), shift));
    Store(scores + i, p, c);
    total = Add(total, FillTail(p, c, 0.0f));
  }
  *sum = ReduceAdd(total);
}

// Weighted sums of lines, each output one chain over ascending keys. Rows of a tile share the keys that all of them
// see; what a row sees beyond that it adds alone.
template <class Line, int R, int NV>
void ValueTile(const float* const* p, const int* counts, const void* const* lines, int64_t column, int64_t last_lanes,
               float* const* out) {
  F32x16 acc[R][NV];
  int common = counts[0];
  for (int r = 0; r < R; ++r) {
    common = counts[r] < common ? counts[r] : common;
    for (int v = 0; v < NV; ++v) acc[r][v] = Zero();
  }
  const auto lanes = [&](int v) { return v == NV - 1 ? last_lanes : int64_t{16}; };
  for (int key = 0; key < common; ++key) {
    F32x16 line[NV];
    for (int v = 0; v < NV; ++v) line[v] = Line::At(lines[key], column + 16 * v, lanes(v));
    for (int r = 0; r < R; ++r) {
      const F32x16 weight = Set(p[r][key]);
      for (int v = 0; v < NV; ++v) acc[r][v] = Fma(weight, line[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int key = common; key < counts[r]; ++key) {
      for (int v = 0; v < NV; ++v) {
        acc[r][v] = Fma(Set(p[r][key]), Line::At(lines[key], column + 16 * v, lanes(v)), acc[r][v]);
      }
    }
    for (int v = 0; v < NV; ++v) Store(out[r] + column + 16 * v, acc[r][v], lanes(v));
  }
}

template <class Line, int R>
void ValueRows(const float* const* p, const int* counts, const void* const* lines, int64_t width, float* const* out) {
  int64_t column = 0;
  for (; column + 64 <= width; column += 64) ValueTile<Line, R, 4>(p, counts, lines, column, 16, out);
  for (; column < width; column += 16) ValueTile<Line, R, 1>(p, counts, lines, column, Lanes(width, column), out);
}

template <class Line>
void ValuesTyped(const float* const* p, const int* counts, int rows, const void* const* lines, int64_t width,
                 float* const* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) ValueRows<Line, 4>(p + r, counts + r, lines, width, out + r);
  for (; r + 2 <= rows; r += 2) ValueRows<Line, 2>(p + r, counts + r, lines, width, out + r);
  for (; r < rows; ++r) ValueRows<Line, 1>(p + r, counts + r, lines, width, out + r);
}

inline void MlaValues(const float* const* p, const int* counts, int rows, const void* const* lines, DType dtype,
                      int64_t width, float* const* out) {
  return dtype == DType::kF32 ? ValuesTyped<F32Line>(p, counts, rows, lines, width, out)
                              : ValuesTyped<Bf16Line>(p, counts, rows, lines, width, out);
}

}  // namespace k3::K3_SIMD
