#pragma once

#include "kernels/cuda/moe_tile.cuh"
#include "kernels/cuda/mxfp4.cuh"

// The large expert products with MXFP4 weights: their codes come to shared memory as they are, a quarter of the bytes,
// and the multiplying warps turn them into A operands in registers, half a step ahead of the products.
namespace k3::cuda {

struct Mxfp4TileStage {
  static constexpr bool kSplitsPicks = false;
  static constexpr int kPieces = kWeightTileRows / kMxfp4Rows;
  static constexpr int kWeightBytes = kPieces * (kMxfp4PieceBytes + kMxfp4PieceScaleBytes), kRegisters = 224;
  alignas(1024) unsigned char x[kMoeTilePicks * 128];
  alignas(128) uint4 codes[kPieces][32];
  alignas(128) uint32_t scales[kPieces][8];
};
struct Mxfp4TileMaps : TileMaps {
  CUtensorMap rows, few_rows;              // inputs of up, as those of down
  CUtensorMap w13, w2, scales13, scales2;  // boxes of a block's part of a step
};
using Mxfp4TileShared = TileShared<Mxfp4TileStage, 5, Mxfp4TileMaps>;

// Each block brings its own weights, and every other box of the picks to both.
static_assert(kTileDepth == kMxfp4Inputs);
__device__ __forceinline__ void CopyTileStep(Mxfp4TileShared& s, const Mxfp4TileMaps& maps, const TileArgs&,
                                             const MoeTile& tile, int rank, int step, int stage, uint64_t policy) {
  const PickBoxes boxes(tile.count);
  BarrierArriveExpect(&s.full[stage], Mxfp4TileStage::kWeightBytes + boxes.bytes());
  const int piece = tile.first_row / kMxfp4Rows;
  CopyTensor3Hinted(s.stage[stage].codes, tile.up ? &maps.w13 : &maps.w2, step * (kMxfp4PieceBytes / 2), piece,
                    tile.expert, &s.full[stage], policy);
  CopyTensor3Hinted(s.stage[stage].scales, tile.up ? &maps.scales13 : &maps.scales2, step * (kMxfp4PieceScaleBytes / 2),
                    piece, tile.expert, &s.full[stage], policy);
  const CUtensorMap& whole = tile.up ? maps.rows : maps.h;
  const CUtensorMap& few = tile.up ? maps.few_rows : maps.few_h;
  for (int box = rank; box < boxes.count; box += kTilePair) {
    CopyTensor3Multicast(s.stage[stage].x + box * kTileBoxPicks * 2 * kTileDepth, box < boxes.whole ? &whole : &few,
                         step * kTileDepth, tile.begin + box * kTileBoxPicks, 0, &s.full[stage], (1 << kTilePair) - 1);
  }
}

// The A operands of 32 inputs, of which `scales` has those of row g in byte kPart and of row g + 8 in byte kPart + 2:
// none that Mxfp4ScaleIsLarge.
template <int kPart>
__device__ __forceinline__ void Mxfp4Operands(uint32_t (&a)[2][4], uint32_t first, uint32_t second, uint32_t scales) {
  Mxfp4Spread(first, a[0]);
  Mxfp4Spread(second, a[1]);
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const uint32_t factor = Mxfp4Factor(scales, kPart + 2 * upper);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t& pair = a[i / 2][upper + i % 2 * 2];
      pair = MultiplyBf16(pair, factor);
    }
  }
  // Not behind the fence, which would then be another one.
#pragma unroll
  for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[i / 4][i % 4]));
}

// BarrierArriveAt, or nothing; no branch, which matrix products under way do not take well.
__device__ __forceinline__ void BarrierArriveAtIf(bool valid, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      ".reg .b32 there;\n"
      "setp.ne.b32 valid, %2, 0;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "@valid mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(rank), "r"(static_cast<int>(valid))
      : "memory");
}

// The widths in which products come, of one piece of columns and of two.
template <int kHalves>
constexpr int kMxfp4Widths = kHalves == 1 ? 13 : 8;
template <int kHalves>
constexpr int Mxfp4Width(int i) {
  return kHalves == 2 ? 264 + 8 * i : i < 6 ? 32 * (i + 1) : 208 + 8 * (i - 6);
}
// The first piece of a width of two.
constexpr int Mxfp4Half(int width) { return (width / 2 + 7) / 8 * 8; }

// The products of 32 inputs, the most narrow of those from the kLow-th to the kHigh-th width in which `count` picks
// have room.
template <int kHalves, int kLow, int kHigh, int kSums>
__device__ __forceinline__ void MultiplyMxfp4(const uint32_t (&a)[2][4], const unsigned char* x, int count,
                                              bool accumulate, float (&sum)[kSums]) {
  if constexpr (kLow < kHigh) {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (count <= Mxfp4Width<kHalves>(kMiddle)) {
      MultiplyMxfp4<kHalves, kLow, kMiddle>(a, x, count, accumulate, sum);
    } else {
      MultiplyMxfp4<kHalves, kMiddle + 1, kHigh>(a, x, count, accumulate, sum);
    }
  } else {
    constexpr int kWidth = Mxfp4Width<kHalves>(kLow), kFirst = kHalves == 1 ? kWidth : Mxfp4Half(kWidth);
    GroupMmaFence();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      GroupMma<kFirst>(sum, a[k], SharedOperand(x + 32 * k), accumulate || k > 0);
      if constexpr (kHalves == 2) {
        GroupMma<kWidth - kFirst, false, kTileHalf / 2>(sum, a[k], SharedOperand(x + kFirst * 128 + 32 * k),
                                                        accumulate || k > 0);
      }
    }
    GroupMmaCommit();
  }
}

// The width of products is chosen within the loop over steps: of several loops each would have registers of its own for
// the operands, as ptxas shares none between those of asynchronous products. Other branches it answers by serializing
// the products.
template <bool kWide, int kSums>
__device__ __forceinline__ int MultiplyTile(Mxfp4TileShared& s, int steps, bool, int count, int, int& n,
                                            float (&sum)[kSums]) {
  constexpr int kHalves = kWide ? 2 : 1;
  const int lane = threadIdx.x % 32, piece = threadIdx.x / 32;
  uint32_t a[2][2][4];  // of the first 32 inputs of a step and of the last
  int step = 0;
  do {
    const int stage = n % s.kStages, before = (n + s.kStages - 1) % s.kStages;
    BarrierWait(&s.full[stage], n / s.kStages & 1);
    const Mxfp4TileStage& from = s.stage[stage];
    uint4 codes = from.codes[piece][lane];
    uint32_t scales = from.scales[piece][lane / 4];
    GroupMmaWait<1>();  // the products of the first half of the step before
    Pin(codes.x), Pin(codes.y), Pin(scales);
    Mxfp4Operands<0>(a[0], codes.x, codes.y, scales);
    MultiplyMxfp4<kHalves, 0, kMxfp4Widths<kHalves> - 1>(a[0], from.x, count, step > 0, sum);
    GroupMmaWait<1>();  // all of the step before
    BarrierArriveAtIf(step > 0 && lane < kTilePair, &s.empty[before], lane % kTilePair);
    Pin(codes.z), Pin(codes.w), Pin(scales);
    Mxfp4Operands<1>(a[1], codes.z, codes.w, scales);
    MultiplyMxfp4<kHalves, 0, kMxfp4Widths<kHalves> - 1>(a[1], from.x + 64, count, true, sum);
    ++n;
  } while (++step < steps);
  GroupMmaWait<0>();
  ReleaseStage(s, (n - 1) % s.kStages);
  return kHalves == 1 ? kTileHalf : Mxfp4Half((count + 7) / 8 * 8);
}

}  // namespace k3::cuda
