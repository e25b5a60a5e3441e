#include <string>
#include <type_traits>

#include "kernels/cuda/attn_res_phases.cuh"
#include "kernels/cuda/op_table.h"

namespace k3::cuda {
namespace {

constexpr int kAnyThreads = 256;
constexpr int kSiteThreads = 448;  // of a row at most, with two packs each

// Where mixes and parts lie in AttnResClosedParams::mixes.
template <typename T>
MixElement<T>* MixesIn(const void* mixes) {
  return static_cast<MixElement<T>*>(const_cast<void*>(mixes));
}
template <typename T>
MixPart* PartsIn(const void* mixes, int64_t rows, int64_t cols) {
  static_assert(sizeof(MixPart) == 16 && sizeof(MixElement<T>) == sizeof(T));
  return reinterpret_cast<MixPart*>(MixesIn<T>(mixes) + kAttnResSites * rows * cols);
}

template <typename T>
void Closed(const AttnResClosedParams& params, cudaStream_t queue) {
  AttnResClosedArgs<T> args = {};
  args.bank = static_cast<const T*>(params.bank);
  args.block_stride = params.block_stride;
  args.rows = params.rows;
  args.closed = params.closed;
  args.cols = static_cast<int>(params.cols);
  args.sites = params.sites;
  args.eps = params.mix_eps;
  bool aligned = Aligned(params.bank, 16);
  for (int site = 0; site < params.sites; ++site) {
    args.query[site] = params.queries[site];
    aligned = aligned && Aligned(params.queries[site], 8);
  }
  args.mix = MixesIn<T>(params.mixes);
  args.part = PartsIn<T>(params.mixes, params.rows, params.cols);
  LaunchShape shape;
  if constexpr (std::is_same_v<T, bf16>) {
    if (aligned && params.cols % 8 == 0 && params.cols <= kAttnResThreads * 8 && params.closed <= kClosedSources &&
        params.block_stride % 8 == 0) {
      const int threads = static_cast<int>(RoundUp(CeilDiv(params.cols, 8 * 32), kClosedBlocks) / kClosedBlocks * 32);
      shape.grid = dim3(static_cast<unsigned>(CeilDiv(params.rows, kClosedRows) * kClosedBlocks));
      shape.block = dim3(static_cast<unsigned>(threads));
      shape.shared = AttnResClosedBytes(threads);
      shape.cluster = kClosedBlocks;
      shape.early = true;
      return Launch(&AttnResClosedKernel, shape, queue, "AttnResClosed", args);
    }
  }
  shape.grid = dim3(static_cast<unsigned>(params.rows));
  shape.block = dim3(kAnyThreads);
  shape.shared = (32 + 3 * RoundUp(params.closed, 4)) * sizeof(float);
  Launch(&AttnResClosedAnyKernel<T>, shape, queue, "AttnResClosed", args);
}

template <typename T>
void Join(const AttnResMixParams& params, cudaStream_t queue) {
  AttnResSiteArgs<T> args;
  args.mix = MixesIn<T>(params.mixes) + params.site * params.rows * params.cols;
  args.part = PartsIn<T>(params.mixes, params.rows, params.cols) + params.site * params.rows;
  args.live = static_cast<T*>(params.bank) + params.live_block * params.block_stride;
  args.cols = static_cast<int>(params.cols);
  args.delta = AsMatrix<const T>(params.delta);
  args.restart = params.restart;
  args.query = params.query;
  args.mix_eps = params.mix_eps;
  args.norm_weight = params.norm_weight;
  args.norm_eps = params.norm_eps;
  args.out = AsMatrix<T>(params.out);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.rows));
  if constexpr (std::is_same_v<T, bf16>) {
    const bool aligned = params.cols % 8 == 0 && params.cols <= kSiteThreads * 16 && Aligned(args.live, 16) &&
                         Aligned(params.mixes, 16) && RowsAligned16(params.out) && Aligned(params.norm_weight, 16) &&
                         Aligned(params.query, 16) && (!params.delta || RowsAligned16(params.delta));
    if (aligned) {
      shape.block = dim3(static_cast<unsigned>(RoundUp(CeilDiv(params.cols, 16), 32)));
      shape.shared = sizeof(AttnResSiteShared);
      shape.early = true;
      return Launch(
          params.mixes_settled ? &AttnResSiteKernel<kSiteThreads, 2, true> : &AttnResSiteKernel<kSiteThreads, 2, false>,
          shape, queue, "AttnResMix", args);
    }
  }
  shape.block = dim3(kAnyThreads);
  shape.shared = 32 * sizeof(float);
  Launch(&AttnResSiteAnyKernel<T>, shape, queue, "AttnResMix", args);
}

}  // namespace

void AttnResClosed(const Device& device, const AttnResClosedParams& params, cudaStream_t queue) {
  K3_REQUIRE(params.closed > 0 && params.closed < kAttnResMaxSources,
             "closed must be in [1, " + std::to_string(kAttnResMaxSources) + "), is " + std::to_string(params.closed));
  K3_REQUIRE(params.sites > 0 && params.sites <= kAttnResSites,
             "sites must be in [1, " + std::to_string(kAttnResSites) + "], is " + std::to_string(params.sites));
  K3_REQUIRE(params.closed == 1 || params.block_stride >= params.rows * params.cols,
             "block_stride " + std::to_string(params.block_stride) + " is less than rows * cols");
  for (int32_t site = 0; site < params.sites; ++site) K3_REQUIRE(params.queries[site] != nullptr, "a query is null");
  if (params.rows == 0) return;
  K3_REQUIRE(params.bank != nullptr && params.mixes != nullptr, "bank or mixes is null");
  device.act == DType::kBF16 ? Closed<bf16>(params, queue) : Closed<float>(params, queue);
}

void AttnResJoin(const Device& device, const AttnResMixParams& params, cudaStream_t queue) {
  device.act == DType::kBF16 ? Join<bf16>(params, queue) : Join<float>(params, queue);
}

}  // namespace k3::cuda
