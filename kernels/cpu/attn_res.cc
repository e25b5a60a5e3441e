#include <cstring>
#include <string>

#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {
namespace {

// Far above any model: the published shape mixes at most nine sources.
constexpr int kMaxSources = 256;

}  // namespace

void CpuOps::AttnResMix(const AttnResMixParams& p, Stream) {
  const int sources = p.live_block + 1;
  CheckTrue(p.live_block >= 0 && sources <= kMaxSources, "AttnResMix",
            "live_block must be in [0, " + std::to_string(kMaxSources) + "), got " + std::to_string(p.live_block));
  if (p.rows > 0) CheckPointer("AttnResMix", "bank", p.bank);
  CheckTrue(
      p.live_block == 0 || p.block_stride >= p.rows * p.cols, "AttnResMix",
      "block_stride " + std::to_string(p.block_stride) + " is below rows * cols = " + std::to_string(p.rows * p.cols));
  if (p.delta) CheckMatrix("AttnResMix", "delta", p.delta, p.rows, p.cols, DType::kF32);
  CheckTrue(!p.restart || p.delta || p.rows == 0, "AttnResMix", "restart needs a delta");
  if (p.live_block > 0) CheckPointer("AttnResMix", "query", p.query);
  CheckPointer("AttnResMix", "norm_weight", p.norm_weight);
  CheckMatrix("AttnResMix", "out", p.out, p.rows, p.cols, DType::kF32);

  auto* bank = static_cast<float*>(p.bank);
  ForRows(p.rows, 4 * sources * p.cols, [&](int64_t begin, int64_t end, int) {
    const float* rows[kMaxSources];
    float scores[kMaxSources];
    for (int64_t t = begin; t < end; ++t) {
      for (int j = 0; j < sources; ++j) rows[j] = bank + j * p.block_stride + t * p.cols;
      float* live = bank + p.live_block * p.block_stride + t * p.cols;
      if (p.delta) {
        const float* delta = p.delta.as<float>() + t * p.delta.ld;
        if (p.restart) {
          std::memcpy(live, delta, static_cast<size_t>(p.cols) * sizeof(float));
        } else {
          kernels_.add(live, delta, p.cols);
        }
      }
      float* out = p.out.as<float>() + t * p.out.ld;
      if (p.live_block == 0) {
        kernels_.rms_norm(live, p.norm_weight, p.norm_eps, p.cols, out);
      } else {
        kernels_.attn_res(rows, sources, p.query, p.mix_eps, p.norm_weight, p.norm_eps, p.cols, scores, out);
      }
    }
  });
}

}  // namespace k3
