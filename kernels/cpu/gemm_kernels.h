// Included by kernels_avx2.cc and kernels_avx512.cc; see kernel_table.h for the contract of Gemm.
#pragma once

#include "kernels/cpu/panel_matrix.h"

// y = x W^T on packed panels as outer products: a tile of MR rows by NV vectors of 16 outputs is kept in registers and
// each step of k adds one broadcast x times one vector of weights. The tile shape varies with the batch, the chain of
// multiply-adds of an output does not. The scalar twin is gemm_scalar.h.
namespace k3::K3_SIMD {

// Readers deliver the weights of step k for NV vectors starting at vector `first` (vector v: panel v / 2, half v % 2).
// NV is even with an even `first`, or 1.
template <int NV>
struct F32Reader {
  static constexpr int64_t kGroup = 0;  // no blocking over k
  const float* p[NV];
  F32Reader(const PanelMatrix& w, int64_t first) {
    for (int v = 0; v < NV; ++v) {
      p[v] = reinterpret_cast<const float*>(w.panel((first + v) / 2)) + 16 * ((first + v) % 2);
    }
  }
  void StartGroup() {}
  void Next(int64_t k, F32x16* out) const {
    for (int v = 0; v < NV; ++v) out[v] = Load(p[v] + 32 * k);
  }
};

template <int NV>
struct Bf16Reader {
  static constexpr int64_t kGroup = 0;
  static constexpr int kPanels = (NV + 1) / 2;
  const std::byte* p[kPanels];
  bool high;
  Bf16Reader(const PanelMatrix& w, int64_t first) : high(first % 2 != 0) {
    for (int i = 0; i < kPanels; ++i) p[i] = w.panel(first / 2 + i);
  }
  void StartGroup() {}
  void Next(int64_t k, F32x16* out) const {
    if constexpr (NV == 1) {
      const Words words = LoadWords(p[0] + 64 * k);
      out[0] = high ? HighHalves(words) : LowHalves(words);
    } else {
      for (int i = 0; i < kPanels; ++i) {
        const Words words = LoadWords(p[i] + 64 * k);
        out[2 * i] = LowHalves(words);
        out[2 * i + 1] = HighHalves(words);
      }
    }
  }
};

template <int NV>
struct Mxfp4Reader {
  static constexpr int64_t kGroup = 32;
  static constexpr int kPanels = (NV + 1) / 2;
  const uint8_t* p[kPanels];
  bool high;
  F32x16 scale[NV];
  Mxfp4Reader(const PanelMatrix& w, int64_t first) : high(first % 2 != 0) {
    for (int i = 0; i < kPanels; ++i) p[i] = reinterpret_cast<const uint8_t*>(w.panel(first / 2 + i));
  }
  void StartGroup() {
    for (int v = 0; v < NV; ++v) scale[v] = DecodeE8m0(p[v / 2] + (NV == 1 ? 16 * high : 16 * (v % 2)));
    for (int i = 0; i < kPanels; ++i) p[i] += 32;
  }
  void Next(int64_t, F32x16* out) {
    for (int i = 0; i < kPanels; ++i) {
      const Words codes = LoadBytes(p[i]);
      p[i] += 16;
      if constexpr (NV == 1) {
        out[0] = Mul(DecodeE2m1(high ? HighNibbles(codes) : codes), scale[0]);
      } else {
        out[2 * i] = Mul(DecodeE2m1(codes), scale[2 * i]);
        out[2 * i + 1] = Mul(DecodeE2m1(HighNibbles(codes)), scale[2 * i + 1]);
      }
    }
  }
};

template <template <int> class Reader, int MR, int NV>
void GemmTile(const PanelMatrix& w, int64_t first, const float* const* x, float* const* y, int64_t y_column,
              bool accumulate) {
  Reader<NV> reader(w, first);
  F32x16 acc[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[m][v] = Zero();
  }
  const float* row[MR];
  for (int m = 0; m < MR; ++m) row[m] = x[m];
  const int64_t group = Reader<NV>::kGroup > 0 ? Reader<NV>::kGroup : w.k;
  for (int64_t begin = 0; begin < w.k; begin += group) {
    reader.StartGroup();
    for (int64_t k = begin; k < begin + group; ++k) {
      F32x16 weights[NV];
      reader.Next(k, weights);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        const F32x16 scalar = Set(row[m][k]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[m][v] = Fma(scalar, weights[v], acc[m][v]);
      }
    }
  }
  for (int v = 0; v < NV; ++v) {
    const int64_t count = w.n - 16 * (first + v);
    if (count <= 0) break;
    for (int m = 0; m < MR; ++m) {
      float* out = y[m] + y_column + 16 * v;
      Store(out, accumulate ? Add(Load(out, count), acc[m][v]) : acc[m][v], count);
    }
  }
}

template <template <int> class Reader, int MR>
void GemmRows(const PanelMatrix& w, int64_t panel_begin, int64_t panel_end, const float* const* x, float* const* y,
              bool accumulate) {
  constexpr int kVectors = GemmVectors(MR);
  const int64_t end = 2 * panel_end;
  int64_t v = 2 * panel_begin;
  for (; v + kVectors <= end; v += kVectors) {
    GemmTile<Reader, MR, kVectors>(w, v, x, y, 16 * (v - 2 * panel_begin), accumulate);
  }
  if constexpr (kVectors > 2) {
    for (; v < end; v += 2) GemmTile<Reader, MR, 2>(w, v, x, y, 16 * (v - 2 * panel_begin), accumulate);
  }
}

template <template <int> class Reader, int MR>
void GemmDispatch(int rows, const PanelMatrix& w, int64_t panel_begin, int64_t panel_end, const float* const* x,
                  float* const* y, bool accumulate) {
  if constexpr (MR > 0) {
    if (rows == MR) {
      GemmRows<Reader, MR>(w, panel_begin, panel_end, x, y, accumulate);
    } else {
      GemmDispatch<Reader, MR - 1>(rows, w, panel_begin, panel_end, x, y, accumulate);
    }
  }
}

template <template <int> class Reader>
void GemmFormat(const PanelMatrix& w, int64_t panel_begin, int64_t panel_end, const float* const* x, float* const* y,
                int64_t rows, bool accumulate) {
  // Tiles of nearly equal height: 13 rows run as 7 + 6, not as 12 + 1.
  const int64_t tiles = (rows + kGemmMaxRows - 1) / kGemmMaxRows;
  int64_t begin = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t end = rows * (t + 1) / tiles;
    GemmDispatch<Reader, kGemmMaxRows>(static_cast<int>(end - begin), w, panel_begin, panel_end, x + begin, y + begin,
                                       accumulate);
    begin = end;
  }
}

inline void Gemm(const PanelMatrix& w, int64_t panel_begin, int64_t panel_end, const float* const* x, float* const* y,
                 int64_t rows, bool accumulate) {
  switch (w.format) {
    case PanelFormat::kF32:
      return GemmFormat<F32Reader>(w, panel_begin, panel_end, x, y, rows, accumulate);
    case PanelFormat::kBf16:
      return GemmFormat<Bf16Reader>(w, panel_begin, panel_end, x, y, rows, accumulate);
    case PanelFormat::kMxfp4:
      return GemmFormat<Mxfp4Reader>(w, panel_begin, panel_end, x, y, rows, accumulate);
  }
}

}  // namespace k3::K3_SIMD
