#include <algorithm>

#include "kernels/cuda/moe.cuh"
#include "kernels/cuda/moe_stream.cuh"
#include "kernels/cuda/moe_tile.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/tensor_map.h"

namespace k3::cuda {
namespace {

constexpr int64_t kMaxPairs = 65536;  // (token, j) pairs worked on together: bounds h and y
constexpr int64_t kStreamPicks = 24;  // mean picks an expert up to which weights are streamed per pick group

int64_t BlockTokens(int64_t tokens, int64_t top_k) { return std::min(tokens, std::max<int64_t>(1, kMaxPairs / top_k)); }

// One function lays out the scratch and thereby says its size. Not smaller for more tokens.
struct MoeScratch {
  MoePlan plan;
  void* h;  // [pairs, inner] act
  void* y;  // [pairs, in] act
  size_t bytes;

  MoeScratch(void* base, int64_t tokens, int64_t top_k, int64_t experts, int64_t in, int64_t inner, size_t element) {
    size_t offset = 0;
    const auto take = [&](int64_t bytes) {
      void* piece = static_cast<char*>(base) + offset;
      offset += RoundUp(bytes, 256);
      return piece;
    };
    const auto ints = [&](int64_t count) { return static_cast<int*>(take(count * 4)); };
    const int64_t pairs = BlockTokens(tokens, top_k) * top_k;
    plan.expert_begin = ints(experts + 1);
    plan.tile_begin = ints(experts + 1);
    plan.active = ints(experts);
    plan.active_count = ints(1);
    plan.pick_of = ints(pairs);
    plan.token_of = ints(pairs);
    h = take(pairs * inner * static_cast<int64_t>(element));
    y = take(pairs * in * static_cast<int64_t>(element));
    bytes = offset;
  }
};

// One block of tokens: x rows, ids and output rows of it.
struct MoeBlock {
  MatrixView x, out;
  const int32_t* ids;
  const float* weights;
  int64_t tokens;
  int top_k;
  int64_t pairs() const { return tokens * top_k; }
};

template <typename Weights, int kTokens, int kTiles, bool kUp>
void LaunchStream(const StreamArgs& args, const Weights& weights, int64_t experts, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(args.out, 16 * kTiles)), static_cast<unsigned>(experts));
  shape.block = dim3(kStreamThreads);
  shape.shared = kStreamWarps * kTiles * kTokens * 32 * sizeof(float4);
  Launch(&MoeStreamKernel<Weights, kTokens, kTiles, kUp>, shape, queue, kUp ? "MoeUpStream" : "MoeDownStream", args,
         weights);
}

template <bool kUp, typename Weights>
void Stream(const StreamArgs& args, const Weights& weights, int64_t mean_picks, int64_t experts, cudaStream_t queue) {
  if (mean_picks <= 2) return LaunchStream<Weights, 1, 2, kUp>(args, weights, experts, queue);
  if (mean_picks <= 10) return LaunchStream<Weights, 2, 4, kUp>(args, weights, experts, queue);
  LaunchStream<Weights, 4, 2, kUp>(args, weights, experts, queue);
}

template <bool kUp>
void StreamProduct(const CudaExperts& experts, const StreamArgs& args, int64_t mean_picks, int64_t active,
                   cudaStream_t queue) {
  const DeviceMemory& data = kUp ? experts.w13 : experts.w2;
  const DeviceMemory& scale = kUp ? experts.w13_scale : experts.w2_scale;
  if (experts.form == ExpertForm::kPlain) {
    return Stream<kUp>(args, PlainStream{static_cast<const bf16*>(data.data())}, mean_picks, active, queue);
  }
  const uint8_t* codes = static_cast<const uint8_t*>(data.data());
  const uint8_t* scales = static_cast<const uint8_t*>(scale.data());
  if (args.in % 128 == 0) return Stream<kUp>(args, Mxfp4Stream<128>{codes, scales}, mean_picks, active, queue);
  Stream<kUp>(args, Mxfp4Stream<32>{codes, scales}, mean_picks, active, queue);
}

void Streamed(const MoeExpertsParams& p, const CudaExperts& experts, const MoeBlock& block, const MoeScratch& scratch,
              cudaStream_t queue) {
  const int64_t active = std::min<int64_t>(experts.count, block.pairs());
  const int64_t mean = CeilDiv(block.pairs(), active);
  StreamArgs args;
  args.plan = scratch.plan;
  args.activation = p.activation;
  args.in = static_cast<int>(experts.in);
  args.out = static_cast<int>(2 * experts.inner);
  args.x = AsMatrix<const bf16>(block.x);
  args.y = static_cast<bf16*>(scratch.h);
  StreamProduct<true>(experts, args, mean, active, queue);
  args.in = static_cast<int>(experts.inner);
  args.out = static_cast<int>(experts.in);
  args.x = {static_cast<const bf16*>(scratch.h), experts.inner};
  args.y = static_cast<bf16*>(scratch.y);
  StreamProduct<false>(experts, args, mean, active, queue);
}

void Tiled(const Device& device, const MoeExpertsParams& p, const CudaExperts& experts, const MoeBlock& block,
           const MoeScratch& scratch, cudaStream_t queue) {
  const bool packed = experts.form == ExpertForm::kMxfp4;
  const int group = packed ? experts.expanded_experts : experts.count;
  const int64_t size13 = 2 * experts.inner * experts.in, size2 = experts.in * experts.inner;
  for (int first = 0; first < experts.count; first += group) {
    const int last = std::min<int>(experts.count, first + group);
    const bf16* w13 = static_cast<const bf16*>(experts.w13.data());
    const bf16* w2 = static_cast<const bf16*>(experts.w2.data());
    if (packed) {
      bf16* space = static_cast<bf16*>(experts.expanded);
      const auto expand = [&](const DeviceMemory& data, const DeviceMemory& scale, int64_t size, bf16* to) {
        const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv(size / 8, 256), 1024));
        Launch(&Mxfp4ExpandKernel, {.grid = dim3(blocks, static_cast<unsigned>(last - first)), .block = dim3(256)},
               queue, "Mxfp4Expand", static_cast<const uint8_t*>(data.data()),
               static_cast<const uint8_t*>(scale.data()), scratch.plan, first, size / 8, to);
      };
      expand(experts.w13, experts.w13_scale, size13, space);
      expand(experts.w2, experts.w2_scale, size2, space + group * size13);
      w13 = space;
      w2 = space + group * size13;
    }
    TileArgs args;
    args.plan = scratch.plan;
    args.expert_begin = first;
    args.expert_end = last;
    args.activation = p.activation;
    // Every expert may have a tile that is not full.
    const int64_t tiles = CeilDiv(block.pairs(), kMoeTileRows) + std::min<int64_t>(last - first, block.pairs());
    const auto launch = [&](auto* kernel, const bf16* weights, const char* name) {
      const int64_t most = tiles * CeilDiv(args.out, kTileColumns);
      Launch(kernel,
             {.grid = dim3(static_cast<unsigned>(std::min<int64_t>(most, device.multiprocessors))),
              .block = dim3(kTileThreads),
              .shared = sizeof(TileShared)},
             queue, name, MatrixBoxes(weights, last - first, args.out, args.in, kTileColumns), args);
    };
    args.in = static_cast<int>(experts.in);
    args.out = static_cast<int>(2 * experts.inner);
    args.x = AsMatrix<const bf16>(block.x);
    args.y = static_cast<bf16*>(scratch.h);
    launch(&MoeTileKernel<true>, w13, "MoeUpTile");
    args.in = static_cast<int>(experts.inner);
    args.out = static_cast<int>(experts.in);
    args.x = {static_cast<const bf16*>(scratch.h), experts.inner};
    args.y = static_cast<bf16*>(scratch.y);
    launch(&MoeTileKernel<false>, w2, "MoeDownTile");
  }
}

template <typename T, typename Weights>
void AnyOf(const MoeExpertsParams& p, const CudaExperts& experts, const Weights& w13, const Weights& w2,
           const MoeBlock& block, const MoeScratch& scratch, cudaStream_t queue) {
  const int in = static_cast<int>(experts.in), inner = static_cast<int>(experts.inner);
  LaunchShape shape;
  shape.block = dim3(32 * kMoeAnyWarps);
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(inner, kMoeAnyWarps)), static_cast<unsigned>(block.pairs()));
  Launch(&MoeUpAnyKernel<T, Weights>, shape, queue, "MoeUpAny", AsMatrix<const T>(block.x), w13,
         int{experts.interleave}, p.activation, scratch.plan, int{experts.count}, in, inner,
         static_cast<T*>(scratch.h));
  shape.grid.x = static_cast<unsigned>(CeilDiv(in, kMoeAnyWarps));
  Launch(&MoeDownAnyKernel<T, Weights>, shape, queue, "MoeDownAny", static_cast<const T*>(scratch.h), w2, scratch.plan,
         int{experts.count}, in, inner, static_cast<T*>(scratch.y));
}

template <typename T>
void Any(const MoeExpertsParams& p, const CudaExperts& experts, const MoeBlock& block, const MoeScratch& scratch,
         cudaStream_t queue) {
  if (experts.form == ExpertForm::kPlain) {
    return AnyOf<T>(p, experts, PlainMatrix<T>{static_cast<const T*>(experts.w13.data()), experts.in},
                    PlainMatrix<T>{static_cast<const T*>(experts.w2.data()), experts.inner}, block, scratch, queue);
  }
  const auto matrix = [](const DeviceMemory& data, const DeviceMemory& scale, int64_t cols) {
    return Mxfp4Matrix{static_cast<const uint8_t*>(data.data()), static_cast<const uint8_t*>(scale.data()), cols};
  };
  AnyOf<T>(p, experts, matrix(experts.w13, experts.w13_scale, experts.in),
           matrix(experts.w2, experts.w2_scale, experts.inner), block, scratch, queue);
}

template <typename T, typename Out>
void Combine(const MoeBlock& block, const MoeScratch& scratch, cudaStream_t queue) {
  constexpr int kWide = kPack<T> < kPack<Out> ? kPack<T> : kPack<Out>;
  const bool wide =
      block.out.cols % kWide == 0 && block.out.ld % kWide == 0 && Aligned(block.out.data, kWide * sizeof(Out));
  const int64_t packs = CeilDiv(block.out.cols, wide ? kWide : 1);
  LaunchShape shape;
  shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(256, RoundUp(packs, 32))));
  shape.grid = dim3(static_cast<unsigned>(block.tokens), static_cast<unsigned>(CeilDiv(packs, shape.block.x)));
  void (*kernel)(const int*, const float*, int, const T*, int, Matrix<Out>) =
      wide ? &MoeCombineKernel<T, Out, kWide> : &MoeCombineKernel<T, Out, 1>;
  Launch(kernel, shape, queue, "MoeCombine", static_cast<const int*>(scratch.plan.pick_of), block.weights, block.top_k,
         static_cast<const T*>(scratch.y), static_cast<int>(block.out.cols), AsMatrix<Out>(block.out));
}

}  // namespace

size_t MoeScratchBytes(const Device& device, int64_t tokens, int32_t top_k, int32_t experts, int64_t in,
                       int64_t inner) {
  return MoeScratch(nullptr, tokens, top_k, experts, in, inner, SizeOf(device.act)).bytes;
}

void MoeExperts(const Device& device, const MoeExpertsParams& p, cudaStream_t queue) {
  const auto* experts = dynamic_cast<const CudaExperts*>(p.experts);
  K3_REQUIRE(experts != nullptr, "experts are null or of another backend");
  CheckActivation(p.activation);
  const int64_t tokens = p.x.rows;
  const int64_t in = experts->count > 0 ? experts->in : p.x.cols;
  K3_REQUIRE_MATRIX(p.x, device.act, tokens, in);
  const DType out = p.out.dtype;
  K3_REQUIRE(out == device.act || out == DType::kF32,
             "out must be " + std::string(Name(device.act)) + " or F32, is " + Describe(p.out));
  K3_REQUIRE_MATRIX(p.out, out, tokens, in);
  K3_REQUIRE(p.top_k > 0 && p.top_k <= kMaxPairs, "top_k must be positive, is " + std::to_string(p.top_k));
  if (tokens == 0) return;
  K3_REQUIRE(p.ids && p.weights && p.scratch, "ids, weights or scratch is null");
  K3_REQUIRE(experts->count <= kMoeMaxExperts,
             "at most " + std::to_string(kMoeMaxExperts) + " experts on a rank, are " + std::to_string(experts->count));

  const MoeScratch scratch(p.scratch, tokens, p.top_k, experts->count, in, experts->inner, SizeOf(device.act));
  const int64_t step = BlockTokens(tokens, p.top_k);
  const bool fast = device.act == DType::kBF16 && experts->interleave == 8 && in % 32 == 0 &&
                    experts->inner % 32 == 0 && RowsAligned16(p.x);
  for (int64_t begin = 0; begin < tokens; begin += step) {
    MoeBlock block;
    block.tokens = std::min(step, tokens - begin);
    block.top_k = p.top_k;
    block.x = p.x.Rows(begin, block.tokens);
    block.out = p.out.Rows(begin, block.tokens);
    block.ids = p.ids + begin * p.top_k;
    block.weights = p.weights + begin * p.top_k;
    Launch(&MoePlanKernel,
           {.grid = dim3(1),
            .block = dim3(static_cast<unsigned>(std::clamp<int64_t>(
                RoundUp(std::max<int64_t>(experts->count, block.pairs() / 8), 32), 128, kMoePlanThreads))),
            .shared = (experts->count + 33) * sizeof(int)},
           queue, "MoePlan", block.ids, static_cast<int>(block.pairs()), p.top_k, int{experts->first},
           int{experts->count}, scratch.plan);
    if (experts->count > 0) {
      const bool few = block.pairs() <= kStreamPicks * experts->count;
      if (!fast) {
        device.act == DType::kBF16 ? Any<bf16>(p, *experts, block, scratch, queue)
                                   : Any<float>(p, *experts, block, scratch, queue);
      } else if (few || device.batch_invariant) {
        Streamed(p, *experts, block, scratch, queue);
      } else {
        Tiled(device, p, *experts, block, scratch, queue);
      }
    }
    if (device.act == DType::kF32) {
      Combine<float, float>(block, scratch, queue);
    } else {
      out == DType::kF32 ? Combine<bf16, float>(block, scratch, queue) : Combine<bf16, bf16>(block, scratch, queue);
    }
  }
}

}  // namespace k3::cuda
