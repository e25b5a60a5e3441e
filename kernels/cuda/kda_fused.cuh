#pragma once

#include "kernels/cuda/kda_team.cuh"

// KDA of more than a few tokens (spec 4.1-4.3): preparation and recurrence in one kernel, so that nothing between them
// leaves the multiprocessor. One block walks a (sequence, head), or a segment of it, in tiles of up to 16 tokens. Teams
// of two warps prepare a tile each, six tiles at a time; eight warps of 16 value columns each keep the state in
// registers and take the tiles in order. With C the decay from a tile's start, all products transposed:
//   V^T = (v - (k e^C) S)^T (T diag(beta))^T
//   O^T = S^T (q e^C)^T + V^T M^T
//   S^T <- S^T diag(e^C_end) + V^T (k e^(C_end - C))
// with T the inverse of I + A. Tiles end at multiples of 16 of the absolute position and after snapshot rows. Each
// score matrix is one product, of k and q times e^(C_i - R) and of k times e^(R - C_j). With the bounded gate R = C_7
// keeps the exponents within +-40 nats. The unbounded gate fits into the range of fp32 by two measures: a token's decay
// counts as at least 2^-21, and R is C_7 + B for rows 0-7, C_7 - B for the others, B = kAnchorShift (base 2). Scores
// between the two come out 2^2B times too large and are scaled after the sum.
namespace k3::cuda {

// What a block walks.
struct KdaRun {
  int sequence;
  int segment;        // of the sequence
  bool last;          // segment of it
  bool transition;    // the segment's transition instead of its values
  KdaBorder* border;  // of this segment; the next segment's is `heads` further on. Null if not split
};

template <bool kConvolved, bool kSplit, typename StateT>
__device__ __forceinline__ void KdaWalkTiles(const KdaParams& p, const SequenceBatch& batch, KdaFusedShared& shared,
                                             const KdaTiles& tiles, const KdaRun& run, const KdaSplit& split, int slot,
                                             int head, int warp) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int value = 16 * warp;
  const int64_t home = static_cast<int64_t>(head) * kTileDim * kTileDim;
  const bool transition = kSplit && run.transition;
  float state[16][4];
  if (slot >= 0 && !(kSplit && run.segment > 0)) {
    LoadState(reinterpret_cast<const StateT*>(KdaStateSlot(p, slot)) + home, value, lane, state);
  } else {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        state[n][e] = transition && 8 * n + 2 * t + e % 2 == value + lane / 4 + e / 2 * 8 ? 1.0f : 0.0f;
      }
    }
  }
  int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, tiles.first) : 0;
  int snapshot_row = snapshot < batch.num_snapshots ? batch.snapshot_row[snapshot] : kNoRow;

  // Addresses within a team of the lane's row of ldmatrix, for tokens as columns of a product (in its piece 0) and as
  // the contraction.
  const int token = lane / 16 * 8 + lane % 8, token_piece = lane / 8 % 2;
  const uint32_t column_row = TilePiece(token, token_piece), inner_row = TilePiece(lane % 16, lane / 16);
  const uint32_t small = (token * kSmallStride + token_piece * 8) * 2;
  const uint32_t teams = SharedAddress(&shared.teams[0]);
  uint32_t base = teams, team = 0, parity = 0;
  for (KdaTile tile = tiles.From(batch, tiles.first); tile.begin < tiles.last; tile = tiles.From(batch, tile.end)) {
    BarrierWait(&shared.full[team], parity);
    const uint32_t column = base + column_row, inner = base + inner_row;
    const uint32_t own = ((column ^ (32 * warp)) + parity * sizeof(KdaTileMatrix));
    float v[2][4], o[2][4];
    {
      uint32_t pairs[4] = {};
      if (!transition) LoadMatrix4Transposed<offsetof(KdaTeam, value)>(pairs, own);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = kConvolved ? float2{LowBf16(pairs[i]), HighBf16(pairs[i])} : UnpackF16(pairs[i]);
        v[i / 2][i % 2 * 2] = x.x;
        v[i / 2][i % 2 * 2 + 1] = x.y;
      }
    }
    const float* decays = shared.teams[team].decay + 4 * t;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t rows[4] = {PackF16(state[2 * k][0], state[2 * k][1]), PackF16(state[2 * k][2], state[2 * k][3]),
                                PackF16(state[2 * k + 1][0], state[2 * k + 1][1]),
                                PackF16(state[2 * k + 1][2], state[2 * k + 1][3])};
      const uint32_t piece = column ^ (32 * k);
      uint32_t columns[4];
      LoadMatrix4<offsetof(KdaTeam, minus_k)>(columns, piece);
      MmaF16(v[0], rows, columns[0], columns[1]);
      MmaF16(v[1], rows, columns[2], columns[3]);
      LoadMatrix4<offsetof(KdaTeam, decayed_q)>(columns, piece);
      if (k == 0) {
        MmaF16From0(o[0], rows, columns[0], columns[1]);
        MmaF16From0(o[1], rows, columns[2], columns[3]);
      } else {
        MmaF16(o[0], rows, columns[0], columns[1]);
        MmaF16(o[1], rows, columns[2], columns[3]);
      }
      // The decay of what has been read, while the products run.
      const float4 decay = *reinterpret_cast<const float4*>(decays + 16 * k);
      state[2 * k][0] *= decay.x;
      state[2 * k][1] *= decay.y;
      state[2 * k][2] *= decay.x;
      state[2 * k][3] *= decay.y;
      state[2 * k + 1][0] *= decay.z;
      state[2 * k + 1][1] *= decay.w;
      state[2 * k + 1][2] *= decay.z;
      state[2 * k + 1][3] *= decay.w;
    }
    float w[2][4];
    {
      const uint32_t rows[4] = {PackF16(v[0][0], v[0][1]), PackF16(v[0][2], v[0][3]), PackF16(v[1][0], v[1][1]),
                                PackF16(v[1][2], v[1][3])};
      uint32_t columns[4];
      LoadMatrix4<offsetof(KdaTeam, inverse)>(columns, base + small);
      MmaF16From0(w[0], rows, columns[0], columns[1]);
      MmaF16From0(w[1], rows, columns[2], columns[3]);
    }
    const uint32_t rows[4] = {PackF16(w[0][0], w[0][1]), PackF16(w[0][2], w[0][3]), PackF16(w[1][0], w[1][1]),
                              PackF16(w[1][2], w[1][3])};
    uint32_t columns[4];
    LoadMatrix4<offsetof(KdaTeam, scores)>(columns, base + small);
    MmaF16(o[0], rows, columns[0], columns[1]);
    MmaF16(o[1], rows, columns[2], columns[3]);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      LoadMatrix4Transposed<offsetof(KdaTeam, restored_k)>(columns, inner ^ (32 * m));
      MmaF16(state[2 * m], rows, columns[0], columns[1]);
      MmaF16(state[2 * m + 1], rows, columns[2], columns[3]);
    }
    uint32_t outputs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = o[i / 2][i % 2 * 2], y = o[i / 2][i % 2 * 2 + 1];
      outputs[i] = transition ? PackF16(x, y) : PackBf16(x, y);
    }
    StoreMatrix4Transposed<offsetof(KdaTeam, value)>(own, outputs);
    ArriveAsWarp(&shared.done[team], lane);
    base += sizeof(KdaTeam);
    if (++team == kTeams) team = 0, base = teams, parity ^= 1;
    while (snapshot_row == tile.end - 1) {
      if (transition) {
        StoreRounded(split.snapshots + snapshot * static_cast<int64_t>(p.heads) * kTileDim * kTileDim + home, value,
                     lane, state);
      } else {
        StoreState(reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[snapshot])) + home, value, lane,
                   state);
      }
      ++snapshot;
      snapshot_row = snapshot < batch.num_snapshots ? batch.snapshot_row[snapshot] : kNoRow;
    }
  }
  if (kSplit && (run.segment > 0 || !run.last)) {
    float* to = run.segment == 0 ? run.border[p.heads].in : transition ? run.border->transition : run.border->zero;
    transition ? StoreRounded(to, value, lane, state) : StoreState(to, value, lane, state);
  } else if (slot >= 0) {
    StoreState(reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + home, value, lane, state);
  }
}

// Registers a thread of the walkers and of the teams.
constexpr int kWalkRegisters = 120, kTeamRegisters = 80;

// Grid (heads, sequences), with kSplit (heads, sequences, 2 x segments), first the segments' values, then their
// transitions. kConvolved: qkv holds q, k and v as the recurrence takes them. kNorm, not with kSplit: outputs are
// normed and gated. aligned: rows start on 16 bytes.
template <bool kBounded, bool kConvolved, bool kNorm, bool kSplit, typename StateT>
__global__ void __launch_bounds__(kFusedThreads, 1)
    KdaFusedKernel(const __grid_constant__ KdaParams p, const __grid_constant__ SequenceBatch batch,
                   const __grid_constant__ KdaOrder order, const __grid_constant__ KdaSplit split, int step_tokens,
                   bool aligned) {
  KdaFusedShared& shared = *DynamicShared<KdaFusedShared>();
  KdaRun run = {};
  run.sequence = order.given ? order.sequence[blockIdx.y] : static_cast<int>(blockIdx.y);
  const int begin = batch.token_begin[run.sequence], end = batch.token_begin[run.sequence + 1];
  if (end - begin <= step_tokens) return;
  const int head = blockIdx.x, warp = threadIdx.x / 32;
  KdaTiles tiles;
  tiles.origin = begin - batch.context[run.sequence] % kTileRows;
  tiles.first = begin;
  tiles.last = end;
  if constexpr (kSplit) {
    run.transition = static_cast<int>(blockIdx.z) >= split.segments;
    run.segment = blockIdx.z % split.segments;
    tiles.first = max(begin, tiles.origin + split.Begin(run.segment));
    tiles.last = min(end, tiles.origin + split.Begin(run.segment + 1));
    if (tiles.first >= end || (run.transition && run.segment == 0)) return;
    run.border = split.border + (static_cast<int64_t>(blockIdx.y) * split.segments + run.segment) * p.heads + head;
    if (threadIdx.x == 0 && !run.transition) run.border->ready = 0;
  }
  run.last = tiles.last == end;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTeams; ++i) {
      BarrierInit(&shared.full[i], 2 * kWarpArrivals);
      BarrierInit(&shared.done[i], kWalkers * kWarpArrivals);
    }
  }
  bool cut = false;
  if (batch.num_snapshots > 0) {
    for (int i = FirstSnapshot(batch, tiles.first) + threadIdx.x; i < batch.num_snapshots; i += kFusedThreads) {
      const int row = batch.snapshot_row[i];
      if (row >= tiles.last - 1) break;
      cut = cut || (row + 1 - tiles.origin) % kTileRows != 0;
    }
  }
  tiles.irregular = __syncthreads_or(cut);
  const int slot = batch.state_slot[run.sequence];
  if (warp < kWalkers) {
    TakeRegisters<kWalkRegisters>();
    KdaWalkTiles<kConvolved, kSplit, StateT>(p, batch, shared, tiles, run, split, slot, head, warp);
  } else {
    GiveRegisters<kTeamRegisters>();
    KdaPrepareTiles<kBounded, kConvolved, kNorm>(p, batch, shared, tiles, split, run.transition, aligned, begin, slot,
                                                 head, warp - kWalkers);
  }
}

}  // namespace k3::cuda
