#pragma once

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/kda_common.cuh"
#include "kernels/cuda/launch.cuh"

// What the kernels of more than a few tokens share: how sequences are cut into tiles and segments, a block's shared
// memory, and the state in registers.
namespace k3::cuda {

constexpr int kTileRows = 16;
constexpr int kTileDim = 128;
constexpr int kTileTaps = 4;
constexpr int kTeams = 6;
constexpr int kWalkers = kTileDim / 16;  // warps that hold the state, two warpgroups
constexpr int kFusedThreads = 32 * (kWalkers + 2 * kTeams);
constexpr int kTeamThreads = 64;
constexpr int kTileRowBytes = kTileDim * 2;
constexpr int kSmallStride = kTileRows + 8;  // 16-bit elements: rows of ldmatrix in different banks
constexpr int kScoreStride = kTileRows + 4;  // floats

// 16 rows of 64 16-bit elements in atoms of Swizzle128.
struct KdaHalfTile {
  alignas(1024) unsigned char bytes[kTileRows * 128];
};

// The channels 64 h .. 64 h + 63 of what a team has of a tile: one distance between the halves for all.
struct KdaTeamHalf {
  KdaHalfTile raw[3];    // q, k, decay logits; then the score operands q, k with row factors, k with column factors
  KdaHalfTile value[2];  // by parity of the team's tile: v, in its place then the outputs
  KdaHalfTile decayed_k, decayed_q;  // fp16: k e^C, q e^C: one operand of 32 rows
  KdaHalfTile restored_k;            // fp16: k e^(C_end - C)
};
constexpr int kHalfBytes = sizeof(KdaTeamHalf);

struct KdaTeam {
  KdaTeamHalf half[2];
  alignas(16) float decay[kTileDim];  // e^C_end, in the order of the walkers' fragments
  alignas(16) unsigned char history[3][kTileTaps - 1][kTileRowBytes];  // raw rows before the tile
  alignas(16) uint16_t scores[kTileRows][kSmallStride];                // fp16, M
  union {
    struct {
      alignas(16) uint16_t inverse[kTileRows][kSmallStride];  // fp16, T diag(beta)
      float squares[2][2][kTileRows];                         // by channel half: of q, of k
      float2 scale[2][kTileRows];                             // of q (with 128^-0.5) and k, a copy a warp
    };
    alignas(16) float a[kTileRows][kScoreStride];  // A transposed, until the inverse is there
  };
  float beta[kTileRows];
};

struct KdaFusedShared {
  KdaTeam teams[kTeams];
  uint64_t full[kTeams];  // both warps of a team have prepared its tile
  uint64_t done[kTeams];  // all walkers have left it
};

// The step's sequences of more than a step's tokens, from the longest to the shortest, so that the last blocks to start
// are short. With more than kMost all sequences of the step as they come.
struct KdaOrder {
  static constexpr int kMost = 64;
  uint16_t sequence[kMost];
  bool given;
};

// A transition P [K, K] in fp16 as the operands of KdaComposeKernel's warps: 16 rows a warp, for each 16 columns what
// its lanes take of them side by side. A word has columns c and c + 8 of a row.
constexpr int kTransitionWords = kTileDim * kTileDim / 2;

// How long runs of few heads are split: into segments of `tokens` tokens that are walked in parallel, the first from
// the state, the others from zero. Their transitions are walked beside them, as a state that starts as the identity
// and takes up no values: its outputs are the queries with which the segment's outputs depend on the state before it.
struct KdaBorder {
  float in[kTileDim * kTileDim];                // state before the segment, [K, V]: of the second segment only
  float zero[kTileDim * kTileDim];              // state after it from zero
  uint32_t transition[kTransitionWords];        // P [K, K]: state after it = P in + zero
  unsigned char half[kTileDim * kTileDim * 2];  // `in` as KdaCorrectKernel takes it
  alignas(256) uint32_t ready;                  // blocks that have written their part of `half`
};
struct KdaSplit {
  int first;            // tokens of the first segment, a multiple of 16; 0: not split
  int tokens;           // of the others, a multiple of 16
  int segments;         // most of a sequence
  KdaBorder* border;    // [sequence of the order][segments][heads]
  uint32_t* snapshots;  // [snapshots][heads] transitions from the segment's begin to the snapshot's row
  uint16_t* queries;    // fp16 [tokens, heads * 128], of all segments but the first

  // Offset of a segment's first token, and the segment of a token, from KdaTiles::origin.
  __device__ __forceinline__ int Begin(int segment) const { return segment == 0 ? 0 : first + (segment - 1) * tokens; }
  __device__ __forceinline__ int SegmentOf(int token) const { return token < first ? 0 : 1 + (token - first) / tokens; }
};

// A warp's arrival at a barrier, for what all of its lanes have done. By one lane, unless the build is for the
// sanitizer's racecheck, which does not see that the others come before it.
#ifdef K3_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ void ArriveAsWarp(uint64_t* barrier, int lane) {
  __syncwarp();
  if (lane < kWarpArrivals) BarrierArrive(barrier);
}

// The same number, from which nothing is computed ahead: kept over all tiles, addresses of every stage would take up
// more registers than there are.
__device__ __forceinline__ uint32_t Fresh(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Where 16 bytes of a row of 128 elements lie in a pair of KdaHalfTile, from the first one's begin.
__device__ __forceinline__ uint32_t TeamPiece(uint32_t row, uint32_t piece) {
  return piece / 8 * kHalfBytes + row * 128 + ((piece % 8 ^ row % 8) << 4);
}

// The tiles of a sequence, [begin, end) in packed rows; begin == last: no more.
struct KdaTile {
  int begin, end;
};
struct KdaTiles {
  int origin;       // row of the last multiple of 16 positions up to the step's first token, maybe negative
  int first, last;  // rows of the segment
  bool irregular;   // a snapshot is taken within a tile

  __device__ __forceinline__ KdaTile From(const SequenceBatch& batch, int begin) const {
    if (begin >= last) return {last, last};
    int end = min(last, begin + kTileRows - ((begin - origin) & (kTileRows - 1)));
    if (irregular) {
      const int i = FirstSnapshot(batch, begin);
      if (i < batch.num_snapshots && batch.snapshot_row[i] < end) end = batch.snapshot_row[i] + 1;
    }
    return {begin, end};
  }
  __device__ __forceinline__ KdaTile Ahead(const SequenceBatch& batch, KdaTile tile, int count) const {
    if (!irregular && count > 0) return From(batch, min(last, tile.end + kTileRows * (count - 1)));
    for (int i = 0; i < count; ++i) tile = From(batch, tile.end);
    return tile;
  }
};

// A state piece as accumulator fragments: 16 tiles of [16 values, 8 keys], from or to [K, V] memory.
template <typename StateT>
__device__ __forceinline__ void LoadState(const StateT* from, int value, int lane, float (&state)[16][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      state[n][e] = ToFloat(from[(8 * n + 2 * t + e % 2) * kTileDim + value + g + e / 2 * 8]);
    }
  }
}
template <typename StateT>
__device__ __forceinline__ void StoreState(StateT* to, int value, int lane, const float (&state)[16][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[(8 * n + 2 * t + e % 2) * kTileDim + value + g + e / 2 * 8] = FromFloat<StateT>(state[n][e]);
    }
  }
}
// The warp's 16 columns of a transition.
__device__ __forceinline__ void StoreTransition(uint32_t* to, int warp, int lane, const float (&state)[16][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * t + e;  // of 8 n .. 8 n + 7
      to[((n / 2 * 8 + warp) * 32 + 4 * row + g % 4) * 4 + n % 2 * 2 + g / 4] = PackF16(state[n][e], state[n][e + 2]);
    }
  }
}

}  // namespace k3::cuda
