#include <algorithm>
#include <limits>

#include "kernels/cuda/moe.cuh"
#include "kernels/cuda/moe_rows.cuh"
#include "kernels/cuda/moe_stream.cuh"
#include "kernels/cuda/moe_stream_mxfp4.cuh"
#include "kernels/cuda/moe_tile_mxfp4.cuh"
#include "kernels/cuda/moe_vector.h"
#include "kernels/cuda/mxfp8.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/tensor_map.h"

namespace k3::cuda {
namespace {

constexpr int64_t kMaxPairs = 131072;  // (token, j) pairs worked on together: bounds h and y
constexpr int64_t kStreamPicks = 24;   // mean picks an expert up to which weights are streamed per pick group

constexpr int64_t kManyPairs = kMoePlanHeld * kMoePlanThreads;  // from here on many blocks plan

int64_t BlockTokens(int64_t tokens, int64_t top_k) { return std::min(tokens, std::max<int64_t>(1, kMaxPairs / top_k)); }

// One function lays out the scratch and thereby says its size. Not smaller for more tokens.
struct MoeScratch {
  MoePlan plan;
  int* share;  // [kMoePlanBlocks][experts], for many pairs
  void* h;     // [pairs, inner] act
  void* y;     // [pairs, in] act
  Mxfp4Inputs inputs;
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
    plan.group_begin = ints(experts);
    plan.groups = static_cast<MoeGroup*>(take((experts + pairs / 8) * static_cast<int64_t>(sizeof(MoeGroup))));
    plan.group_count = ints(1);
    plan.pick_of = ints(pairs);
    plan.token_of = ints(pairs);
    plan.up_done = reinterpret_cast<uint32_t*>(ints(experts));
    share = ints(pairs >= kManyPairs ? kMoePlanBlocks * experts : 0);
    h = take(pairs * inner * static_cast<int64_t>(element));
    y = take(pairs * in * static_cast<int64_t>(element));
    // Of streamed products in bf16: every group may have columns that are not full.
    const int64_t streamed = element == 2 ? std::min(pairs, std::max(kStreamPicks * experts, top_k)) : 0;
    const int64_t groups = std::min(experts, streamed) + streamed / 8;
    inputs.factors = static_cast<float*>(take(groups * kMxfp4GroupPicks * static_cast<int64_t>(sizeof(float))));
    const int64_t columns = streamed / 8 + std::min(experts, streamed) * (kMxfp4GroupPicks / 8);
    inputs.images = static_cast<unsigned char*>(
        take(columns * Mxfp4Chunks(std::max(in, inner)) * kMxfp4ChunkAtoms * kMxfp4AtomBytes));
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

// Columns of eight picks a group of the streaming products has, by the picks of an expert on average.
int StreamColumns(const CudaExperts& experts, const MoeBlock& block) {
  const int64_t mean = CeilDiv(block.pairs(), std::min<int64_t>(experts.count, block.pairs()));
  return mean <= 2 ? 1 : mean <= 10 ? 2 : 4;
}

// `columns`: of the streaming products; 0: others follow.
void Plan(const CudaExperts& experts, const MoeBlock& block, int columns, const MoeScratch& scratch,
          cudaStream_t queue) {
  PlanArgs args;
  args.ids = block.ids;
  args.pairs = static_cast<int>(block.pairs());
  args.top_k = block.top_k;
  args.first = experts.first;
  args.experts = experts.count;
  args.group_picks = 8 * columns;
  args.plan = scratch.plan;
  const size_t counters = static_cast<size_t>(experts.count) * sizeof(int), scan = 33 * sizeof(int);
  const auto threads = [&](int64_t work) {
    const int64_t wanted = RoundUp(std::max<int64_t>(experts.count, work), 32);
    return dim3(static_cast<unsigned>(std::clamp<int64_t>(wanted, 128, kMoePlanThreads)));
  };
  if (block.pairs() < kManyPairs) {
    Launch(&MoePlanKernel, {.grid = dim3(1), .block = threads(block.pairs()), .shared = counters + scan, .early = true},
           queue, "MoePlan", args);
    return;
  }
  LaunchShape shape = {.grid = dim3(kMoePlanBlocks), .block = dim3(256), .shared = counters, .early = true};
  Launch(&MoePlanCountKernel, shape, queue, "MoePlanCount", args, scratch.share);
  shape.shared = counters + scan;
  Launch(&MoePlanPlaceKernel, shape, queue, "MoePlanPlace", args, static_cast<const int*>(scratch.share));
}

// Rows rounded to MXFP8; `begin` and `end` as RoundRowsKernel has them.
template <typename T>
void RoundRows(const Matrix<const T>& from, int64_t rows, int64_t cols, const int* begin, const int* end, void* to,
               cudaStream_t queue) {
  const int64_t blocks = CeilDiv(rows * cols, int64_t{kRoundElements} * kRoundThreads);
  Launch(&RoundRowsKernel<T>,
         {.grid = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, 4096))), .block = dim3(kRoundThreads)}, queue,
         "RoundRows", from, rows, static_cast<int>(cols), begin, end, static_cast<T*>(to));
}

// What the second product reads, in place.
template <typename T>
void RoundInner(const CudaExperts& experts, const MoeBlock& block, const MoeScratch& scratch, cudaStream_t queue) {
  RoundRows<T>({static_cast<const T*>(scratch.h), experts.inner}, block.pairs(), experts.inner,
               scratch.plan.expert_begin, scratch.plan.expert_begin + experts.count, scratch.h, queue);
}

// The step's rows rounded, where the outputs of the experts will be.
template <typename T>
MatrixView RoundedRows(const MoeBlock& block, const MoeScratch& scratch, cudaStream_t queue) {
  RoundRows<T>(AsMatrix<const T>(block.x), block.tokens, block.x.cols, nullptr, nullptr, scratch.y, queue);
  MatrixView rounded = block.x;
  rounded.data = scratch.y;
  rounded.ld = block.x.cols;
  return rounded;
}

template <int kTokens, int kTiles, bool kUp, int kBlocks>
void LaunchStream(const StreamArgs& args, const TiledStream& weights, int64_t experts, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(args.out, 16 * kTiles)), static_cast<unsigned>(experts));
  shape.block = dim3(kStreamThreads);
  shape.shared = kStreamWarps * kTiles * kTokens * 32 * sizeof(float4);
  shape.early = true;
  Launch(&MoeStreamKernel<TiledStream, kTokens, kTiles, kUp, kBlocks>, shape, queue,
         kUp ? "MoeUpStream" : "MoeDownStream", args, weights);
}
template <bool kUp>
void Stream(const StreamArgs& args, const TiledStream& weights, int columns, int64_t experts, cudaStream_t queue) {
  if (columns == 1) return LaunchStream<1, 1, kUp, 3>(args, weights, experts, queue);
  if (columns == 2) return LaunchStream<2, 4, kUp, 2>(args, weights, experts, queue);
  LaunchStream<4, 2, kUp, 2>(args, weights, experts, queue);
}

template <int kColumns, int kBlocks, bool kUp, bool kRareScales>
void LaunchStream(const StreamArgs& args, const Mxfp4View& weights, const Mxfp4Inputs& inputs, int64_t active,
                  cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(args.out, kMxfp4StreamRows)), static_cast<unsigned>(active));
  shape.block = dim3(kMxfp4StreamThreads);
  shape.shared = sizeof(Mxfp4StreamShared<kColumns>);
  shape.early = true;
  Launch(&MoeMxfp4StreamKernel<kColumns, kBlocks, kUp, kRareScales>, shape, queue,
         kUp ? "MoeUpStream" : "MoeDownStream", args, weights, inputs);
}
template <bool kUp, bool kRareScales>
void Stream(const StreamArgs& args, const Mxfp4View& weights, const Mxfp4Inputs& inputs, int columns, int64_t active,
            cudaStream_t queue) {
  if (columns == 1) return LaunchStream<1, 3, kUp, kRareScales>(args, weights, inputs, active, queue);
  if (columns == 2) return LaunchStream<2, 3, kUp, kRareScales>(args, weights, inputs, active, queue);
  LaunchStream<4, 2, kUp, kRareScales>(args, weights, inputs, active, queue);
}
template <bool kUp>
void Stream(const CudaExperts& experts, const MoeBlock& block, const StreamArgs& args, const Mxfp4View& weights,
            const Mxfp4Inputs& inputs, bool early_rows, int columns, int64_t active, cudaStream_t queue) {
  const Mxfp4Choices choices{.ids = block.ids,
                             .top_k = block.top_k,
                             .first = experts.first,
                             .experts = experts.count,
                             .group_picks = 8 * columns,
                             .early = early_rows};
  const int64_t groups = active + block.pairs() / (8 * columns);
  const dim3 grid =
      kUp ? dim3(static_cast<unsigned>(block.tokens), static_cast<unsigned>(std::min(block.top_k, kMxfp4InputShares)))
          : dim3(static_cast<unsigned>(groups), static_cast<unsigned>(8 * columns));
  Launch(&Mxfp4InputsKernel<kUp>, {.grid = grid, .block = dim3(kMxfp4InputThreads<kUp>), .early = true}, queue,
         "Mxfp4Inputs", args, choices, columns, inputs);
  experts.rare_scales ? Stream<kUp, true>(args, weights, inputs, columns, active, queue)
                      : Stream<kUp, false>(args, weights, inputs, columns, active, queue);
}

template <bool kUp>
Mxfp4View PackedWeights(const CudaExperts& experts) {
  const DeviceMemory& data = kUp ? experts.w13 : experts.w2;
  const DeviceMemory& scale = kUp ? experts.w13_scale : experts.w2_scale;
  return {static_cast<const uint4*>(data.data()), static_cast<const uint32_t*>(scale.data()),
          Mxfp4Pieces(kUp ? experts.in : experts.inner)};
}

template <bool kUp>
void StreamProduct(const CudaExperts& experts, const MoeBlock& block, const StreamArgs& args, const Mxfp4Inputs& inputs,
                   bool early_rows, int columns, int64_t active, cudaStream_t queue) {
  if (experts.form == ExpertForm::kMxfp4) {
    return Stream<kUp>(experts, block, args, PackedWeights<kUp>(experts), inputs, early_rows, columns, active, queue);
  }
  const DeviceMemory& data = kUp ? experts.w13 : experts.w2;
  const TiledStream weights{static_cast<const bf16*>(data.data()), WeightTilesAcross(args.in)};
  Stream<kUp>(args, weights, columns, active, queue);
}

void Streamed(const MoeExpertsParams& p, const CudaExperts& experts, const MoeBlock& block, int columns,
              const MoeScratch& scratch, cudaStream_t queue) {
  const int64_t active = std::min<int64_t>(experts.count, block.pairs());
  StreamArgs args;
  args.plan = scratch.plan;
  args.activation = p.activation;
  args.in = static_cast<int>(experts.in);
  args.out = static_cast<int>(2 * experts.inner);
  args.x = AsMatrix<const bf16>(p.mxfp8_inputs ? RoundedRows<bf16>(block, scratch, queue) : block.x);
  args.y = static_cast<bf16*>(scratch.h);
  StreamProduct<true>(experts, block, args, scratch.inputs, !p.mxfp8_inputs, columns, active, queue);
  if (p.mxfp8_inputs) RoundInner<bf16>(experts, block, scratch, queue);
  args.in = static_cast<int>(experts.inner);
  args.out = static_cast<int>(experts.in);
  args.x = {static_cast<const bf16*>(scratch.h), experts.inner};
  args.y = static_cast<bf16*>(scratch.y);
  StreamProduct<false>(experts, block, args, scratch.inputs, false, columns, active, queue);
}

// Of all experts; args says which products.
void LaunchTiles(const Device& device, const CudaExperts& experts, const TileArgs& args, int64_t pairs,
                 cudaStream_t queue) {
  // Every expert may have a tile that is not full.
  const int64_t tiles = (CeilDiv(pairs, kMoeTilePicks) + std::min<int64_t>(experts.count, pairs)) *
                        std::max(CeilDiv(2 * args.inner, kTilePairRows), CeilDiv(args.width, kTilePairRows));
  const int fetch = args.weights_once ? 128 : 256;
  const auto boxes = [&](const void* data, int64_t cols, int box_rows, int box_cols = kTileDepth) {
    return MatrixBoxes(data, 1, pairs, cols, box_rows, box_cols, fetch);
  };
  const auto launch = [&]<typename Shared>(const Shared*, typename Shared::Maps maps) {
    maps.h = boxes(args.h, args.inner, kTileBoxPicks);
    maps.few_h = boxes(args.h, args.inner, kTileBoxFew);
    maps.h_results = boxes(args.h, args.inner, kTileBoxOut, TileResults<Shared, true>::kBoxColumns);
    maps.y_results = boxes(args.y, args.width, kTileBoxOut, TileResults<Shared, false>::kBoxColumns);
    LaunchShape shape{.grid = dim3(kTilePair),
                      .block = dim3(kTileThreads),
                      .shared = sizeof(Shared),
                      .cluster = kTilePair,
                      .early = true,
                      .together = true};
    static const int resident = ResidentClusters(&MoeTileKernel<Shared>, shape, "MoeTile");
    shape.grid.x *= static_cast<unsigned>(std::min<int64_t>({tiles, device.multiprocessors / kTilePair, resident}));
    Launch(&MoeTileKernel<Shared>, shape, queue, "MoeTile", maps, args);
  };
  if (experts.form == ExpertForm::kTiled) return launch(static_cast<PlainTileShared*>(nullptr), TileMaps{});
  Mxfp4TileMaps maps;
  maps.rows = boxes(args.y, args.width, kTileBoxPicks);
  maps.few_rows = boxes(args.y, args.width, kTileBoxFew);
  const auto pieces = [&](const void* data, int64_t rows, int64_t cols, int bytes) {
    return PairBoxes(data, experts.count, rows / kMxfp4Rows, Mxfp4Pieces(cols) * int64_t{bytes / 2}, bytes / 2);
  };
  maps.w13 = pieces(experts.w13.data(), 2 * args.inner, args.width, kMxfp4PieceBytes);
  maps.w2 = pieces(experts.w2.data(), args.width, args.inner, kMxfp4PieceBytes);
  maps.scales13 = pieces(experts.w13_scale.data(), 2 * args.inner, args.width, kMxfp4PieceScaleBytes);
  maps.scales2 = pieces(experts.w2_scale.data(), args.width, args.inner, kMxfp4PieceScaleBytes);
  launch(static_cast<Mxfp4TileShared*>(nullptr), maps);
}

void Tiled(const Device& device, const MoeExpertsParams& p, const CudaExperts& experts, const MoeBlock& block,
           const MoeScratch& scratch, cudaStream_t queue) {
  TileArgs args;
  args.plan = scratch.plan;
  args.experts = experts.count;
  args.width = static_cast<int>(experts.in);
  args.inner = static_cast<int>(experts.inner);
  args.weights_once = block.pairs() <= int64_t{kMoeTilePicks} * experts.count;
  args.activation = p.activation;
  args.h = static_cast<bf16*>(scratch.h);
  args.y = static_cast<bf16*>(scratch.y);
  if (experts.form == ExpertForm::kTiled) {
    args.w13 = static_cast<const bf16*>(experts.w13.data());
    args.w2 = static_cast<const bf16*>(experts.w2.data());
    args.x = AsMatrix<const bf16>(p.mxfp8_inputs ? RoundedRows<bf16>(block, scratch, queue) : block.x);
  } else {
    Launch(p.mxfp8_inputs ? &MoePermuteKernel<true> : &MoePermuteKernel<false>,
           {.grid = dim3(static_cast<unsigned>(block.tokens)),
            .block = dim3(static_cast<unsigned>(std::min<int64_t>(512, RoundUp(experts.in / 8, 32)))),
            .early = true},
           queue, "MoePermute", AsMatrix<const bf16>(block.x), static_cast<const int*>(scratch.plan.pick_of),
           block.top_k, args.width, args.y);
  }
  args.up = true;
  args.down = !p.mxfp8_inputs;
  LaunchTiles(device, experts, args, block.pairs(), queue);
  if (args.down) return;
  RoundInner<bf16>(experts, block, scratch, queue);
  args.up = false;
  args.down = true;
  LaunchTiles(device, experts, args, block.pairs(), queue);
}

template <typename T, typename Weights>
void AnyOf(const MoeExpertsParams& p, const CudaExperts& experts, const Weights& w13, const Weights& w2,
           const MoeBlock& block, const MoeScratch& scratch, cudaStream_t queue) {
  const int in = static_cast<int>(experts.in), inner = static_cast<int>(experts.inner);
  LaunchShape shape;
  shape.block = dim3(32 * kMoeAnyWarps);
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(inner, kMoeAnyWarps)), static_cast<unsigned>(block.pairs()));
  const MatrixView x = p.mxfp8_inputs ? RoundedRows<T>(block, scratch, queue) : block.x;
  Launch(&MoeUpAnyKernel<T, Weights>, shape, queue, "MoeUpAny", AsMatrix<const T>(x), w13, int{experts.interleave},
         p.activation, scratch.plan, int{experts.count}, in, inner, static_cast<T*>(scratch.h));
  if (p.mxfp8_inputs) RoundInner<T>(experts, block, scratch, queue);
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
  if (experts.form == ExpertForm::kTiled) {
    const auto matrix = [](const DeviceMemory& memory, int64_t rows, int64_t cols) {
      return TiledMatrix{static_cast<const bf16*>(memory.data()), static_cast<int>(rows), WeightTilesAcross(cols)};
    };
    return AnyOf<T>(p, experts, matrix(experts.w13, 2 * experts.inner, experts.in),
                    matrix(experts.w2, experts.in, experts.inner), block, scratch, queue);
  }
  AnyOf<T>(p, experts, Mxfp4Matrix{PackedWeights<true>(experts)}, Mxfp4Matrix{PackedWeights<false>(experts)}, block,
           scratch, queue);
}

template <typename T, typename Out>
void Combine(const MoeBlock& block, bool early, const MoeScratch& scratch, cudaStream_t queue) {
  constexpr int kWide = kPack<T> < kPack<Out> ? kPack<T> : kPack<Out>;
  const bool wide =
      block.out.cols % kWide == 0 && block.out.ld % kWide == 0 && Aligned(block.out.data, kWide * sizeof(Out));
  const int64_t packs = CeilDiv(block.out.cols, wide ? kWide : 1);
  LaunchShape shape;
  // Few tokens are to be on all multiprocessors.
  shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(block.tokens <= 128 ? 64 : 256, RoundUp(packs, 32))));
  shape.grid = dim3(static_cast<unsigned>(block.tokens), static_cast<unsigned>(CeilDiv(packs, shape.block.x)));
  shape.early = early;
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
  K3_REQUIRE(!p.mxfp8_inputs || (in % kMxfp8Group == 0 && experts->inner % kMxfp8Group == 0),
             "MXFP8 inputs need widths that are multiples of 32, are " + std::to_string(in) + " and " +
                 std::to_string(experts->inner));
  K3_REQUIRE(experts->count <= kMoeMaxExperts,
             "at most " + std::to_string(kMoeMaxExperts) + " experts on a rank, are " + std::to_string(experts->count));

  const MoeScratch scratch(p.scratch, tokens, p.top_k, experts->count, in, experts->inner, SizeOf(device.act));
  if (TakesMoeVector(device, p, *experts)) return MoeVector(p, *experts, scratch.h, queue);
  const bool fast = experts->count > 0 && device.act == DType::kBF16 && experts->interleave == 8 && in % 32 == 0 &&
                    experts->inner % 32 == 0 && RowsAligned16(p.x) &&
                    BlockTokens(tokens, p.top_k) * (p.x.ld / 8) <= std::numeric_limits<uint32_t>::max();
  int64_t step = BlockTokens(tokens, p.top_k);
  // Scales that no trained weights have: what is right for few tokens is right for many.
  const bool always_streamed = device.batch_invariant || experts->large_scales;
  if (fast && always_streamed && experts->form == ExpertForm::kMxfp4) {
    // As many pairs as the scratch has room for the inputs of.
    step = std::min(step, std::max<int64_t>(1, kStreamPicks * experts->count / p.top_k));
  }
  for (int64_t begin = 0; begin < tokens; begin += step) {
    MoeBlock block;
    block.tokens = std::min(step, tokens - begin);
    block.top_k = p.top_k;
    block.x = p.x.Rows(begin, block.tokens);
    block.out = p.out.Rows(begin, block.tokens);
    block.ids = p.ids + begin * p.top_k;
    block.weights = p.weights + begin * p.top_k;
    const bool few = block.pairs() <= kStreamPicks * experts->count;
    const bool streamed = fast && (few || always_streamed);
    const int columns = streamed ? StreamColumns(*experts, block) : 0;
    Plan(*experts, block, columns, scratch, queue);
    if (streamed) {
      Streamed(p, *experts, block, columns, scratch, queue);
    } else if (fast) {
      Tiled(device, p, *experts, block, scratch, queue);
    } else if (experts->count > 0) {
      device.act == DType::kBF16 ? Any<bf16>(p, *experts, block, scratch, queue)
                                 : Any<float>(p, *experts, block, scratch, queue);
    }
    const bool early = experts->count > 0;  // the launch before is not the plan
    if (device.act == DType::kF32) {
      Combine<float, float>(block, early, scratch, queue);
    } else {
      out == DType::kF32 ? Combine<bf16, float>(block, early, scratch, queue)
                         : Combine<bf16, bf16>(block, early, scratch, queue);
    }
  }
}

}  // namespace k3::cuda
