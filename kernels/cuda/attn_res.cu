#include <type_traits>

#include "kernels/cuda/attn_res.cuh"
#include "kernels/cuda/op_table.h"

namespace k3::cuda {
namespace {

constexpr int64_t kClusterRows = 32;  // rows up to which a cluster shares one

template <int kSources, int kBlocks>
void LaunchHeld(const AttnResArgs<bf16>& args, int64_t rows, int64_t warps, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows * kBlocks));
  shape.block = dim3(static_cast<unsigned>(warps / kBlocks * 32));
  shape.shared = sizeof(AttnResShared);
  shape.cluster = kBlocks;
  shape.early = true;
  Launch(&AttnResKernel<kSources, kBlocks>, shape, queue, "AttnResMix", args);
}

// Both variants give the same bits.
template <int kSources>
void LaunchFor(const AttnResArgs<bf16>& args, int64_t rows, cudaStream_t queue) {
  if (args.sources < kSources) {
    if constexpr (kSources > 1) LaunchFor<kSources - 1>(args, rows, queue);
    return;
  }
  const int64_t warps = RoundUp(CeilDiv(args.cols / kPack<bf16>, 32), 4);
  if (rows <= kClusterRows) return LaunchHeld<kSources, 4>(args, rows, warps, queue);
  LaunchHeld<kSources, 1>(args, rows, warps, queue);
}

template <typename T>
void Mix(const AttnResMixParams& params, cudaStream_t queue) {
  AttnResArgs<T> args;
  args.bank = static_cast<T*>(params.bank);
  args.block_stride = params.block_stride;
  args.sources = params.live_block + 1;
  args.cols = static_cast<int>(params.cols);
  args.delta = AsMatrix<const T>(params.delta);
  args.restart = params.restart;
  args.query = params.query;
  args.mix_eps = params.mix_eps;
  args.norm_weight = params.norm_weight;
  args.norm_eps = params.norm_eps;
  args.out = AsMatrix<T>(params.out);

  if constexpr (std::is_same_v<T, bf16>) {
    constexpr int N = kPack<bf16>;
    const bool aligned = params.cols % N == 0 && params.cols / N <= kAttnResThreads && params.block_stride % N == 0 &&
                         Aligned(params.bank, 16) && RowsAligned16(params.out) && Aligned(params.norm_weight, 16) &&
                         Aligned(params.query, 16) && (!params.delta || RowsAligned16(params.delta));
    if (aligned && args.sources <= kAttnResMostSources) {
      return LaunchFor<kAttnResMostSources>(args, params.rows, queue);
    }
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.rows));
  shape.block = dim3(256);
  // Rounded up: loads of scores may be merged beyond the last.
  shape.shared = (32 + RoundUp(args.sources, 4)) * sizeof(float);
  Launch(&AttnResAnyKernel<T>, shape, queue, "AttnResMix", args);
}

}  // namespace

void AttnResMix(const Device& device, const AttnResMixParams& params, cudaStream_t queue) {
  K3_REQUIRE(params.bank != nullptr && params.norm_weight != nullptr, "bank or norm_weight is null");
  K3_REQUIRE(
      params.live_block >= 0 && params.live_block < kAttnResMaxSources,
      "live_block must be in [0, " + std::to_string(kAttnResMaxSources) + "), is " + std::to_string(params.live_block));
  K3_REQUIRE(params.live_block == 0 || params.query != nullptr,
             "query is null with live_block " + std::to_string(params.live_block));
  K3_REQUIRE(params.live_block == 0 || params.block_stride >= params.rows * params.cols,
             "block_stride " + std::to_string(params.block_stride) + " is less than rows * cols");
  K3_REQUIRE(!params.restart || params.delta, "restart without delta");
  K3_REQUIRE_MATRIX(params.out, device.act, params.rows, params.cols);
  if (params.delta) K3_REQUIRE_MATRIX(params.delta, device.act, params.rows, params.cols);
  K3_REQUIRE(params.mixes == nullptr || (params.live_block > 0 && params.site >= 0 && params.site < kAttnResSites),
             "mixes need a closed block and a site in [0, " + std::to_string(kAttnResSites) + "), got live_block " +
                 std::to_string(params.live_block) + ", site " + std::to_string(params.site));
  if (params.rows == 0) return;
  if (params.mixes != nullptr) return AttnResJoin(device, params, queue);
  device.act == DType::kBF16 ? Mix<bf16>(params, queue) : Mix<float>(params, queue);
}

}  // namespace k3::cuda
