// Included by the kernels_<isa>.cc files: attention of a few query rows over lines of the latent cache (spec 3.4).
#pragma once

#include "kernels/cpu/kernel_table.h"

namespace k3::K3_SIMD {

struct F32Line {
  static F32x16 At(const void* line, int64_t i) { return Load(static_cast<const float*>(line) + i); }
  static F32x16 At(const void* line, int64_t i, int64_t lanes) {
    return Load(static_cast<const float*>(line) + i, lanes);
  }
};
struct Bf16Line {
  static F32x16 At(const void* line, int64_t i) { return LoadBf16(static_cast<const uint16_t*>(line) + i); }
  static F32x16 At(const void* line, int64_t i, int64_t lanes) {
    return LoadBf16(static_cast<const uint16_t*>(line) + i, lanes);
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
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    F32x16 query[R];
    for (int r = 0; r < R; ++r) query[r] = Load(q[r] + i);
    for (int k = 0; k < K; ++k) {
      const F32x16 line = Line::At(lines[key + k], i);
      for (int r = 0; r < R; ++r) acc[r][k] = Fma(query[r], line, acc[r][k]);
    }
  }
  if (i < width) {
    for (int k = 0; k < K; ++k) {
      const F32x16 line = Line::At(lines[key + k], i, width - i);
      for (int r = 0; r < R; ++r) acc[r][k] = Fma(Load(q[r] + i, width - i), line, acc[r][k]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < K; ++k) scores[r][key + k] = ReduceAdd(acc[r][k]) * scale;
  }
}

template <class Line, int R>
void ScoreKeys(const float* const* q, const void* const* lines, int key, int end, int64_t width, float scale,
               float* const* scores) {
  // Few rows take more keys at once: as many chains, and more cache lines under way.
  constexpr int kKeys = R <= 2 ? 8 : 4;
  for (; key + kKeys <= end; key += kKeys) ScoreTile<Line, R, kKeys>(q, lines, width, scale, scores, key);
  for (; key < end; ++key) ScoreTile<Line, R, 1>(q, lines, width, scale, scores, key);
}

// A few keys at a time for all rows, so that their lines stay in the first-level cache.
template <class Line>
void ScoresTyped(const float* const* q, int rows, const void* const* lines, int keys, int64_t width, float scale,
                 float* const* scores) {
  constexpr int kKeys = 16;
  for (int key = 0; key < keys; key += kKeys) {
    const int end = keys - key < kKeys ? keys : key + kKeys;
    int r = 0;
    for (; r + 4 <= rows; r += 4) ScoreKeys<Line, 4>(q + r, lines, key, end, width, scale, scores + r);
    for (; r + 2 <= rows; r += 2) ScoreKeys<Line, 2>(q + r, lines, key, end, width, scale, scores + r);
    for (; r < rows; ++r) ScoreKeys<Line, 1>(q + r, lines, key, end, width, scale, scores + r);
  }
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
// see; what a row sees beyond that it adds alone. kFull: 16 columns per vector; otherwise `lanes` of one vector.
template <class Line, int R, int NV, bool kFull>
void ValueTile(const float* const* p, const int* counts, const void* const* lines, int64_t column, int64_t lanes,
               float* const* out) {
  const auto load = [&](const void* line, int v) {
    return kFull ? Line::At(line, column + 16 * v) : Line::At(line, column, lanes);
  };
  F32x16 acc[R][NV];
  int common = counts[0];
  for (int r = 0; r < R; ++r) {
    common = counts[r] < common ? counts[r] : common;
    for (int v = 0; v < NV; ++v) acc[r][v] = Zero();
  }
  for (int key = 0; key < common; ++key) {
    F32x16 line[NV];
    for (int v = 0; v < NV; ++v) line[v] = load(lines[key], v);
    for (int r = 0; r < R; ++r) {
      const F32x16 weight = Set(p[r][key]);
      for (int v = 0; v < NV; ++v) acc[r][v] = Fma(weight, line[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int key = common; key < counts[r]; ++key) {
      for (int v = 0; v < NV; ++v) acc[r][v] = Fma(Set(p[r][key]), load(lines[key], v), acc[r][v]);
    }
    for (int v = 0; v < NV; ++v) Store(out[r] + column + 16 * v, acc[r][v], kFull ? 16 : lanes);
  }
}

template <class Line, int NV, bool kFull>
void ValueColumns(const float* const* p, const int* counts, int rows, const void* const* lines, int64_t column,
                  int64_t lanes, float* const* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) ValueTile<Line, 4, NV, kFull>(p + r, counts + r, lines, column, lanes, out + r);
  for (; r + 2 <= rows; r += 2) ValueTile<Line, 2, NV, kFull>(p + r, counts + r, lines, column, lanes, out + r);
  for (; r < rows; ++r) ValueTile<Line, 1, NV, kFull>(p + r, counts + r, lines, column, lanes, out + r);
}

// A few columns at a time for all rows, for the same reason.
template <class Line>
void ValuesTyped(const float* const* p, const int* counts, int rows, const void* const* lines, int64_t width,
                 float* const* out) {
  int64_t column = 0;
  for (; column + 64 <= width; column += 64) ValueColumns<Line, 4, true>(p, counts, rows, lines, column, 16, out);
  for (; column + 16 <= width; column += 16) ValueColumns<Line, 1, true>(p, counts, rows, lines, column, 16, out);
  if (column < width) ValueColumns<Line, 1, false>(p, counts, rows, lines, column, width - column, out);
}

inline void MlaValues(const float* const* p, const int* counts, int rows, const void* const* lines, DType dtype,
                      int64_t width, float* const* out) {
  return dtype == DType::kF32 ? ValuesTyped<F32Line>(p, counts, rows, lines, width, out)
                              : ValuesTyped<Bf16Line>(p, counts, rows, lines, width, out);
}

}  // namespace k3::K3_SIMD
