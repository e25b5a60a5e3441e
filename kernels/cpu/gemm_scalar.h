// Included by kernels_scalar.cc: the reference for gemm_kernels.h, equal to it bit for bit.
#pragma once

#include "kernels/core/mxfp4.h"
#include "kernels/cpu/panel_matrix.h"

namespace k3::scalar {

// W[32 * panel + c][k].
inline float Weight(const PanelMatrix& w, int64_t panel, int64_t k, int64_t c) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(w.panel(panel));
  switch (w.format) {
    case PanelFormat::kF32:
      return reinterpret_cast<const float*>(bytes)[32 * k + c];
    case PanelFormat::kBf16:
      return FromBits(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(bytes)[32 * k + 2 * (c % 16) + c / 16])
                      << 16);
    case PanelFormat::kMxfp4: {
      const uint8_t* group = bytes + (k / 32) * (32 + 32 * 16);
      const int code = (group[32 + (k % 32) * 16 + c % 16] >> (4 * (c / 16))) & 15;
      return kE2m1Values[code] * E8m0ToFloat(group[c]);
    }
  }
  return 0;
}

inline void Gemm(const PanelMatrix& w, int64_t panel_begin, int64_t panel_end, const float* const* x, float* const* y,
                 int64_t rows, bool accumulate) {
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (int64_t c = 0; c < 32 && 32 * panel + c < w.n; ++c) {
      for (int64_t r = 0; r < rows; ++r) {
        float acc = 0;
        for (int64_t k = 0; k < w.k; ++k) acc = __builtin_fmaf(x[r][k], Weight(w, panel, k, c), acc);
        float& out = y[r][32 * (panel - panel_begin) + c];
        out = accumulate ? out + acc : acc;
      }
    }
  }
}

}  // namespace k3::scalar
