#pragma once

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/moe_stream.cuh"

// Expert products with MXFP4 weights for few picks an expert: warpgroup products of e4m3. E4m3 holds every weight's
// code, and an input in bf16 is the sum of two of its values once a row's largest is scaled to between 2^7 and 2^8:
// eight bits of mantissa are twice four; below 2^-9 of the largest an input loses its last bits. Codes go from memory
// straight into A fragments, products of 32 inputs are scaled as they are added up in fp32.
//
// Inputs are brought into the form of the B operand before: for each group of picks its image, for every 128 inputs and
// 8 picks an atom (group_mma.cuh) of the first values and one of the second. The order of inputs within 16 is that of
// the A fragments (Mxfp4ColumnOf).
namespace k3::cuda {

constexpr int kMxfp4AtomInputs = 128;
constexpr int kMxfp4AtomBytes = 2 * 1024;  // both values
constexpr int kMxfp4ChunkAtoms = 2;        // of a chunk, a stage of the ring of inputs, for 8 picks
constexpr int kMxfp4ChunkInputs = kMxfp4ChunkAtoms * kMxfp4AtomInputs;
constexpr int kMxfp4Stages = 4;
constexpr int kMxfp4GroupPicks = 32;  // at most

struct Mxfp4Inputs {
  unsigned char* images;  // [groups][input atoms][columns of 8 picks][kMxfp4AtomBytes]
  float* factors;         // [groups][kMxfp4GroupPicks], what a pick's sums are multiplied by
};

// Whole chunks; inputs past the last are zero.
constexpr int Mxfp4Chunks(int64_t in) { return static_cast<int>((in + kMxfp4ChunkInputs - 1) / kMxfp4ChunkInputs); }

// So few of picks, of which there are more, that all blocks are there before the launch before has ended, and with them
// the first blocks of the next.
template <bool kUp>
constexpr int kMxfp4InputThreads = kUp ? 128 : 64;
constexpr int kMxfp4InputShares = 4;  // blocks that share a token's picks

// The picks of tokens as the router left them.
struct Mxfp4Choices {
  const int32_t* ids;  // [tokens][top_k]
  int top_k;
  int first, experts;  // local experts
  int group_picks;
  bool early;  // the tokens' rows were written before the plan
};

// Images of the picks' inputs. kUp: of tokens, grid (tokens, kMxfp4InputShares at most), while the plan is made. Else
// of picks, grid (groups at most, picks of a group).
template <bool kUp>
__global__ void __launch_bounds__(kMxfp4InputThreads<kUp>)
    Mxfp4InputsKernel(StreamArgs args, Mxfp4Choices choices, int columns, Mxfp4Inputs inputs) {
  constexpr int kThreads = kMxfp4InputThreads<kUp>, kStride = 16 * kThreads;
  constexpr int kHeld = 4096 / kStride;  // pieces of 16 inputs that a thread keeps; further ones are read again
  struct Piece {
    uint4 half[2];
  };
  int number = blockIdx.x, local = blockIdx.y, pick = 0;
  if constexpr (kUp) {
    if (!choices.early) GridDependencyWait();
  } else {
    GridDependencyRelease();
    // The plan ended before the launch before released this one.
    const MoeGroup group = EarlyGroup(args.plan.groups + number);  // means nothing if there is no such group
    const bool exists = number < __ldcg(args.plan.group_count) && local < group.count;
    GridDependencyWait();
    if (!exists) return;  // sums of columns without a pick are never looked at
    pick = group.begin + local;
  }
  const bf16* row = args.x.Row(kUp ? blockIdx.x : pick);
  const auto load = [&](int k) {
    const uint4* from = reinterpret_cast<const uint4*>(row + k);
    return k < args.in ? Piece{from[0], from[1]} : Piece{};
  };
  Piece held[kHeld];
  uint32_t largest = 0;  // its bits: NaN is beyond infinity
  const auto look_at = [&](const Piece& piece) {
    for (const uint4& half : piece.half) {
      for (uint32_t pair : {half.x, half.y, half.z, half.w}) {
        largest = max(largest, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = load(16 * threadIdx.x + i * kStride);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) look_at(held[i]);
  for (int k = 16 * threadIdx.x + kHeld * kStride; k < args.in; k += kStride) look_at(load(k));
  __shared__ uint32_t of_warps[kThreads / 32];
  largest = __reduce_max_sync(kAllLanes, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) largest = max(largest, of_warps[i]);

  // 2^exponent takes the largest to between 2^7 and 2^8, where such a factor exists.
  const int exponent = min(7 + 127 - static_cast<int>(largest >> 7), 127);
  const float scale = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
  // The first values and the second, in the same place.
  const auto convert = [&](Piece& piece) {
    const Piece from = piece;
    const auto pairs = reinterpret_cast<const uint32_t(&)[2][4]>(from);
    auto& to = reinterpret_cast<uint32_t(&)[2][4]>(piece);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t first = 0, second = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // Bytes 2 e and 2 e + 1 of the lane's four (Mxfp4InputOf).
        const float low = (e == 0 ? LowBf16(pairs[1][t]) : HighBf16(pairs[1][t])) * scale;
        const float high = (e == 0 ? LowBf16(pairs[0][t]) : HighBf16(pairs[0][t])) * scale;
        const uint32_t both = PackE4m3(low, high);
        const float2 taken = UnpackE4m3(both);
        first |= both << (16 * e);
        second |= PackE4m3(low - taken.x, high - taken.y) << (16 * e);
      }
      to[0][t] = first;
      to[1][t] = second;
    }
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) convert(held[i]);
  const int padded = Mxfp4Chunks(args.in) * kMxfp4ChunkInputs;
  const auto write = [&] {
    if (threadIdx.x == 0) {
      inputs.factors[number * kMxfp4GroupPicks + local] =
          __uint_as_float(largest >= 0x7f80u ? 0x7fc00000u : static_cast<uint32_t>(127 + 6 - exponent) << 23);
    }
    unsigned char* image =
        inputs.images +
        (static_cast<int64_t>(number) * (padded / kMxfp4AtomInputs) * columns + local / 8) * kMxfp4AtomBytes;
    const auto store = [&](const Piece& piece, int k) {
      unsigned char* to = image + static_cast<int64_t>(k / kMxfp4AtomInputs) * columns * kMxfp4AtomBytes +
                          Swizzle128(local % 8, k % kMxfp4AtomInputs / 16);
      *reinterpret_cast<uint4*>(to) = piece.half[0];
      *reinterpret_cast<uint4*>(to + 1024) = piece.half[1];
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int k = 16 * threadIdx.x + i * kStride;
      if (k < padded) store(held[i], k);
    }
    for (int k = 16 * threadIdx.x + kHeld * kStride; k < padded; k += kStride) {
      Piece piece = load(k);
      convert(piece);
      store(piece, k);
    }
  };
  if constexpr (!kUp) return write();
  if (choices.early) GridDependencyWait();
  GridDependencyRelease();
  for (int j = blockIdx.y; j < choices.top_k; j += gridDim.y) {
    const int pair = static_cast<int>(blockIdx.x) * choices.top_k + j;
    const int expert = choices.ids[pair] - choices.first;
    if (expert < 0 || expert >= choices.experts) continue;
    const int place = __ldcg(args.plan.pick_of + pair) - __ldcg(args.plan.expert_begin + expert);
    number = __ldcg(args.plan.group_begin + expert) + place / choices.group_picks;
    local = place % choices.group_picks;
    write();
  }
}

template <int kColumns>
struct Mxfp4StreamShared {
  alignas(1024) unsigned char inputs[kMxfp4Stages][kMxfp4ChunkAtoms * kColumns * kMxfp4AtomBytes];
  uint64_t full[kMxfp4Stages];   // the copying thread, and the copy engine
  uint64_t empty[kMxfp4Stages];  // every warp
};

constexpr int kMxfp4MultiplyWarps = 8;
constexpr int kMxfp4StreamThreads = 32 * (kMxfp4MultiplyWarps + 1);  // the last warp copies inputs
constexpr int kMxfp4StreamRows = kMxfp4Rows * kMxfp4MultiplyWarps;   // of a block

// One thread copies the inputs of a group of up to 8 `columns` picks.
template <int kShared>
__device__ __forceinline__ void CopyMxfp4Inputs(Mxfp4StreamShared<kShared>& s, const Mxfp4Inputs& inputs, int number,
                                                int columns, int chunks, uint32_t& turns) {
  const unsigned char* from =
      inputs.images + static_cast<int64_t>(number) * chunks * kMxfp4ChunkAtoms * kShared * kMxfp4AtomBytes;
  const uint32_t bytes = columns * kMxfp4AtomBytes;
  for (int chunk = 0; chunk < chunks; ++chunk, ++turns) {
    const uint32_t stage = turns % kMxfp4Stages;
    BarrierWait(&s.empty[stage], (turns / kMxfp4Stages & 1) ^ 1);
    BarrierArriveExpect(&s.full[stage], kMxfp4ChunkAtoms * bytes);
#pragma unroll
    for (int atom = 0; atom < kMxfp4ChunkAtoms; ++atom, from += kShared * kMxfp4AtomBytes) {
      CopyBulk(s.inputs[stage] + atom * bytes, from, bytes, &s.full[stage]);
    }
  }
}

// The calling warp's 16 rows of the weights, from `row` on, with all picks of a group, up to 8 kColumns of them.
// `turns`: of the ring of inputs so far.
template <int kColumns, bool kUp, bool kRareScales, int kShared>
__device__ __forceinline__ void StreamMxfp4Group(Mxfp4StreamShared<kShared>& s, const StreamArgs& args,
                                                 const Mxfp4View& weights, const Mxfp4Inputs& inputs,
                                                 const MoeGroup& group, int number, int row, uint32_t& turns) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int steps = weights.pieces, chunks = Mxfp4Chunks(args.in);
  constexpr int kSteps = kMxfp4ChunkInputs / kMxfp4Inputs;  // of a chunk; weights are loaded as many ahead
  static_assert(kSteps == 4);

  // Rows that do not exist repeat the last.
  const int tiles = args.out / kMxfp4Rows;
  const int64_t first_piece = (int64_t{group.expert} * tiles + min(row / kMxfp4Rows, tiles - 1)) * weights.pieces;
  const char* codes = reinterpret_cast<const char*>(weights.codes + first_piece * 32 + lane);
  const char* scales = reinterpret_cast<const char*>(weights.scales + (first_piece + t) * 8 + g);
  uint4 piece[kSteps];
  uint32_t lane_scales;  // of rows g and g + 8, step t of a chunk
  const auto load = [&](int d, bool valid) { piece[d] = LoadStreaming16If(valid, codes + d * kMxfp4PieceBytes); };
  const auto load_scales = [&](int first) { lane_scales = Load4If(first + t < steps, scales); };
  const auto advance = [&] {
    codes += kSteps * kMxfp4PieceBytes;
    scales += kSteps * kMxfp4PieceScaleBytes;
    asm("" : "+l"(codes), "+l"(scales));  // one address each, steps are constants added to it
  };
#pragma unroll
  for (int d = 0; d < kSteps; ++d) load(d, d < steps);
  load_scales(0);
  advance();

  GridDependencyWait();
  float factor[kColumns][2];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const float2 both = *reinterpret_cast<const float2*>(inputs.factors + number * kMxfp4GroupPicks + 8 * n + 2 * t);
    factor[n][0] = both.x;
    factor[n][1] = both.y;
  }
  float sum[4 * kColumns] = {};
  uint32_t a[2][2][4];  // of this step and the next: both 32 inputs
  const auto spread = [&](uint32_t(&to)[2][4], const uint4& from) {
    Mxfp4Bytes(from.x, to[0][0], to[0][1]);
    Mxfp4Bytes(from.y, to[0][2], to[0][3]);
    Mxfp4Bytes(from.z, to[1][0], to[1][1]);
    Mxfp4Bytes(from.w, to[1][2], to[1][3]);
  };
  spread(a[0], piece[0]);

#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const uint32_t stage = (turns + chunk) % kMxfp4Stages;
    BarrierWait(&s.full[stage], (turns + chunk) / kMxfp4Stages & 1);
    const uint32_t chunk_scales = lane_scales;
    load_scales((chunk + 1) * kSteps);
    const uint64_t x = SharedOperand(s.inputs[stage], kMxfp4AtomBytes);
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      float product[2][4 * kColumns];
      GroupMmaFence();
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint64_t operand = x + ((d / 2 * kColumns * kMxfp4AtomBytes + d % 2 * 64 + part * 32) >> 4);
        GroupMmaE4m3<8 * kColumns>(product[part], a[d % 2][part], operand, false);
        GroupMmaE4m3<8 * kColumns>(product[part], a[d % 2][part], operand + (1024 >> 4), true);
      }
      GroupMmaCommit();
      load(d, (chunk + 1) * kSteps + d < steps);
      spread(a[1 - d % 2], piece[(d + 1) % kSteps]);
      // Not behind the next fence, which would then be another one.
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[1 - d % 2][i / 4][i % 4]));
      GroupMmaWait<0>();
      const uint32_t step_scales = __shfl_sync(kAllLanes, chunk_scales, d, 4);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const int at = 16 * upper + 8 * part;
          const uint32_t code = step_scales >> at & 255;
          const uint32_t bits = at <= 16 ? step_scales << (23 - at) : step_scales >> (at - 23);
          const float scale = kRareScales ? Mxfp4Scale(code) : __uint_as_float(bits & 0x7f800000u);
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int i = 4 * n + 2 * upper + e;
              sum[i] = fmaf(product[part][i], kRareScales ? scale * factor[n][e] : scale, sum[i]);
            }
          }
        }
      }
    }
    if (lane == 0) BarrierArrive(&s.empty[stage]);
    advance();
  }
  turns += chunks;
  if (row >= args.out) return;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const float* from = &sum[4 * n];
    const float low = kRareScales ? 1 : factor[n][0], high = kRareScales ? 1 : factor[n][1];
    StoreStreamed<kUp>(args, {from[0] * low, from[1] * high, from[2] * low, from[3] * high}, group.begin, group.count,
                       n, row);
  }
}

// Columns of 8 picks that products of a group are as wide as.
template <int kColumns>
__device__ __forceinline__ int Mxfp4Columns(int picks) {
  return max((picks + 7) / 8, max(kColumns / 2, 1));
}

// kColumns: of 8 picks, that a group has at most. kBlocks: of a multiprocessor. kRareScales: for scales of any size.
// Grid (weight rows / kMxfp4StreamRows, any number that shares the groups of picks).
template <int kColumns, int kBlocks, bool kUp, bool kRareScales>
__global__ void __launch_bounds__(kMxfp4StreamThreads, kBlocks)
    MoeMxfp4StreamKernel(StreamArgs args, Mxfp4View weights, Mxfp4Inputs inputs) {
  auto& s = *DynamicShared<Mxfp4StreamShared<kColumns>>();
  GridDependencyRelease();
  // The plan ended before the launch before released this one.
  MoeGroup group = EarlyGroup(args.plan.groups + blockIdx.y);  // means nothing if there is no such group
  const int groups = __shfl_sync(kAllLanes, __ldcg(args.plan.group_count), 0);
  if (static_cast<int>(blockIdx.y) >= groups) return GridDependencyWait();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kMxfp4Stages; ++stage) {
      BarrierInit(&s.full[stage], 1);
      BarrierInit(&s.empty[stage], kMxfp4MultiplyWarps);
    }
    BarrierInitFence();
  }
  __syncthreads();
  // Through shuffles, so that the compiler knows these to be one value a warp: matrix products in branches that may
  // diverge are serialized.
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  uint32_t turns = 0;
  if (warp == kMxfp4MultiplyWarps) {
    if (threadIdx.x % 32 != 0) return;
    GridDependencyWait();
    for (int number = blockIdx.y;;) {
      CopyMxfp4Inputs(s, inputs, number, Mxfp4Columns<kColumns>(group.count), Mxfp4Chunks(args.in), turns);
      number += gridDim.y;
      if (number >= groups) return;
      group = args.plan.groups[number];
    }
  }
  const int row = blockIdx.x * kMxfp4StreamRows + warp * kMxfp4Rows;
  for (int number = blockIdx.y;;) {
    const auto stream = [&]<int kOwn>() {
      StreamMxfp4Group<kOwn, kUp, kRareScales>(s, args, weights, inputs, group, number, row, turns);
    };
    const int columns = __shfl_sync(kAllLanes, Mxfp4Columns<kColumns>(group.count), 0);
    if constexpr (kColumns == 1) {
      stream.template operator()<1>();
    } else if constexpr (kColumns == 2) {
      columns == 1 ? stream.template operator()<1>() : stream.template operator()<2>();
    } else {
      columns == 2   ? stream.template operator()<2>()
      : columns == 3 ? stream.template operator()<3>()
                     : stream.template operator()<4>();
    }
    number += gridDim.y;
    if (number >= groups) return;
    group = args.plan.groups[number];
  }
}

}  // namespace k3::cuda
