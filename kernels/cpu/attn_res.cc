#include <cstring>
#include <string>

#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {
namespace {

// Far above any model: the published shape mixes at most nine sources.
constexpr int kMaxSources = 256;

// AttnResClosedParams::mixes: [site][rows, cols], then of each site and row the greatest score and the sum of
// exp(score - top).
struct Part {
  float top, sum, unused[2];
};
struct Mixes {
  Mixes(const void* data, int64_t rows, int64_t cols)
      : mix(static_cast<float*>(const_cast<void*>(data))),
        part(reinterpret_cast<Part*>(mix + (data == nullptr ? 0 : kAttnResSites * rows * cols))) {}
  float* mix;
  Part* part;
};

}  // namespace

void CpuOps::AttnResClosed(const AttnResClosedParams& p, Stream) {
  CheckTrue(p.closed > 0 && p.closed < kMaxSources, "AttnResClosed",
            "closed must be in [1, " + std::to_string(kMaxSources) + "), got " + std::to_string(p.closed));
  CheckTrue(p.sites > 0 && p.sites <= kAttnResSites, "AttnResClosed",
            "sites must be in [1, " + std::to_string(kAttnResSites) + "], got " + std::to_string(p.sites));
  CheckTrue(
      p.closed == 1 || p.block_stride >= p.rows * p.cols, "AttnResClosed",
      "block_stride " + std::to_string(p.block_stride) + " is below rows * cols = " + std::to_string(p.rows * p.cols));
  for (int32_t site = 0; site < p.sites; ++site) CheckPointer("AttnResClosed", "a query", p.queries[site]);
  if (p.rows > 0) {
    CheckPointer("AttnResClosed", "bank", p.bank);
    CheckPointer("AttnResClosed", "mixes", p.mixes);
  }
  const auto* bank = static_cast<const float*>(p.bank);
  const Mixes mixes(p.mixes, p.rows, p.cols);
  ForRows(p.rows, 4 * p.sites * p.closed * p.cols, [&](int64_t begin, int64_t end, int) {
    const float* rows[kMaxSources];
    float scores[kMaxSources];
    for (int64_t t = begin; t < end; ++t) {
      for (int j = 0; j < p.closed; ++j) rows[j] = bank + j * p.block_stride + t * p.cols;
      for (int32_t site = 0; site < p.sites; ++site) {
        const int64_t at = site * p.rows + t;
        kernels_.attn_res_closed(rows, p.closed, p.queries[site], p.mix_eps, p.cols, scores, mixes.mix + at * p.cols,
                                 &mixes.part[at].top, &mixes.part[at].sum);
      }
    }
  });
}

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
  CheckTrue(p.mixes == nullptr || (p.live_block > 0 && p.site >= 0 && p.site < kAttnResSites), "AttnResMix",
            "mixes need a closed block and site in [0, " + std::to_string(kAttnResSites) + "), got live_block " +
                std::to_string(p.live_block) + ", site " + std::to_string(p.site));
  CheckPointer("AttnResMix", "norm_weight", p.norm_weight);
  CheckMatrix("AttnResMix", "out", p.out, p.rows, p.cols, DType::kF32);

  auto* bank = static_cast<float*>(p.bank);
  const Mixes mixes(p.mixes, p.rows, p.cols);
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
      } else if (p.mixes != nullptr) {
        const int64_t at = p.site * p.rows + t;
        const Part& part = mixes.part[at];
        kernels_.attn_res_join(live, mixes.mix + at * p.cols, part.top, part.sum, p.query, p.mix_eps, p.norm_weight,
                               p.norm_eps, p.cols, out);
      } else {
        kernels_.attn_res(rows, sources, p.query, p.mix_eps, p.norm_weight, p.norm_eps, p.cols, scores, out);
      }
    }
  });
}

}  // namespace k3
