#pragma once

#include "kernels/cuda/kda_team.cuh"

// KDA of more than a few tokens (spec 4.1-4.3): preparation and recurrence in one kernel, so that nothing between them
// leaves the multiprocessor. One block walks a (sequence, head), or a segment of it, in tiles of up to 16 tokens. Teams
// of two warps prepare a tile each, six tiles at a time; a warpgroup keeps the state in registers and takes the tiles
// in order. With C the decay from a tile's start, all products transposed:
//   V^T = (v - (k e^C) S)^T (T diag(beta))^T
//   O^T = S^T (q e^C)^T + V^T M^T
//   S^T <- S^T diag(e^C_end) + V^T (k e^(C_end - C))
// with T the inverse of I + A. Tiles end at multiples of 16 of the absolute position and after snapshot rows. Products
// with the state are the warpgroup's, k e^C and q e^C as one operand of 32 tokens. Each score matrix is one product,
// of k and q times e^(C_i - R) and of k times e^(R - C_j). With the bounded gate R = 0: exponents lie within 80 nats.
// The unbounded gate fits into the range of fp32 by two measures: a token's decay counts as at least 2^-21, and R is
// C_7 + B for rows 0-7, C_7 - B for the others, B = kAnchorShift (base 2). Scores between the two come out 2^2B times
// too large and are scaled after the sum.
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
  const int64_t home = static_cast<int64_t>(head) * kTileDim * kTileDim;
  const bool transition = kSplit && __any_sync(kAllLanes, run.transition);
  const int value = 16 * warp;
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

  const uint32_t teams = SharedAddress(&shared.teams[0]);
  const uint64_t reads = SharedOperand(&shared.teams[0].half[0].decayed_k);
  const uint64_t restored_k = SharedOperand(&shared.teams[0].half[0].restored_k, 1024, kHalfBytes);
  constexpr int kInFlight = 3;
  uint32_t base = teams, team = 0, parity = 0;
  KdaTile tile = tiles.From(batch, tiles.first);
  while (__any_sync(kAllLanes, tile.begin < tiles.last)) {
    BarrierWait(&shared.full[team], parity);
    // The lane's row of ldmatrix for tokens as columns of a product.
    const uint32_t fresh = Fresh(lane), token = fresh / 16 * 8 + fresh % 8, token_piece = fresh / 8 % 2;
    const uint32_t own =
        base + offsetof(KdaTeamHalf, value) + parity * sizeof(KdaHalfTile) + TeamPiece(token, 2 * warp + token_piece);
    const uint32_t small = base + (token * kSmallStride + token_piece * 8) * 2;
    const uint32_t operands = team * (sizeof(KdaTeam) / 16);  // of descriptors
    const float* decays = shared.teams[team].decay + 4 * (fresh % 4);
    float read[16];     // (k e^C) S of the tokens, then (q e^C) S
    GroupMmaWait<0>();  // no product is in flight; tells the compiler
                        // Few products are in flight at a time so that few copies of the state take up registers.
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float(&low)[4] = state[2 * k], (&high)[4] = state[2 * k + 1];
      const uint32_t rows[4] = {PackF16(low[0], low[1]), PackF16(low[2], low[3]), PackF16(high[0], high[1]),
                                PackF16(high[2], high[3])};
      GroupMmaFence();
      GroupMmaF16<32>(read, rows, reads + operands + k / 4 * (kHalfBytes / 16) + k % 4 * 2, k > 0);
      GroupMmaCommit();
      // The decay of what is being read.
      const float4 decay = *reinterpret_cast<const float4*>(decays + 16 * k);
      low[0] *= decay.x;
      low[1] *= decay.y;
      low[2] *= decay.x;
      low[3] *= decay.y;
      high[0] *= decay.z;
      high[1] *= decay.w;
      high[2] *= decay.z;
      high[3] *= decay.w;
      if (k >= kInFlight - 1 && k < 7) GroupMmaWait<kInFlight - 1>();
    }
    uint32_t inverse[4], values[4] = {};
    LoadMatrix4<offsetof(KdaTeam, inverse)>(inverse, small);
    if (!transition) LoadMatrix4Transposed<0>(values, own);
    GroupMmaWait<0>();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = kConvolved ? float2{LowBf16(values[i]), HighBf16(values[i])} : UnpackF16(values[i]);
      read[2 * i] = v.x - read[2 * i];
      read[2 * i + 1] = v.y - read[2 * i + 1];
    }
    float w[2][4], o[2][4];
    const uint32_t v[4] = {PackF16(read[0], read[1]), PackF16(read[2], read[3]), PackF16(read[4], read[5]),
                           PackF16(read[6], read[7])};
    MmaF16From0(w[0], v, inverse[0], inverse[1]);
    MmaF16From0(w[1], v, inverse[2], inverse[3]);
    const uint32_t columns[4] = {PackF16(w[0][0], w[0][1]), PackF16(w[0][2], w[0][3]), PackF16(w[1][0], w[1][1]),
                                 PackF16(w[1][2], w[1][3])};
    GroupMmaFence();
    GroupMmaF16<128, true>(reinterpret_cast<float(&)[64]>(state), columns, restored_k + operands);
    GroupMmaCommit();
    uint32_t scores[4];
    LoadMatrix4<offsetof(KdaTeam, scores)>(scores, small);
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i / 4][i % 4] = read[8 + i];
    MmaF16(o[0], columns, scores[0], scores[1]);
    MmaF16(o[1], columns, scores[2], scores[3]);
    uint32_t outputs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = o[i / 2][i % 2 * 2], y = o[i / 2][i % 2 * 2 + 1];
      outputs[i] = transition ? PackF16(x, y) : PackBf16(x, y);
    }
    StoreMatrix4Transposed<0>(own, outputs);
    const KdaTile next = tiles.From(batch, tile.end);
    GroupMmaWait<0>();
    ArriveAsWarp(&shared.done[team], lane);
    base += sizeof(KdaTeam);
    if (++team == kTeams) team = 0, base = teams, parity ^= 1;
    while (__any_sync(kAllLanes, snapshot_row == tile.end - 1)) {
      if (transition) {
        StoreTransition(split.snapshots + (snapshot * static_cast<int64_t>(p.heads) + head) * kTransitionWords, warp,
                        lane, state);
      } else {
        StoreState(reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[snapshot])) + home, value, lane,
                   state);
      }
      ++snapshot;
      snapshot_row = snapshot < batch.num_snapshots ? batch.snapshot_row[snapshot] : kNoRow;
    }
    tile = next;
  }
  if (kSplit && (run.segment > 0 || !run.last)) {
    if (transition) {
      StoreTransition(run.border->transition, warp, lane, state);
    } else {
      StoreState(run.segment == 0 ? run.border[p.heads].in : run.border->zero, value, lane, state);
    }
  } else if (slot >= 0) {
    StoreState(reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + home, value, lane, state);
  }
}

// Registers a thread of the walkers and of the teams.
constexpr int kWalkRegisters = 120, kTeamRegisters = 80;

// Grid (heads, sequences), with kSplit (heads, sequences, 2 x segments), first the segments' values, then their
// transitions. kConvolved: qkv holds q, k and v as the recurrence takes them. kNorm, not with kSplit: outputs are
// normed and gated. kAligned: rows
// start on 16 bytes, as they must with kSplit.
template <bool kBounded, bool kConvolved, bool kNorm, bool kSplit, bool kAligned, typename StateT>
__global__ void __launch_bounds__(kFusedThreads, 1)
    KdaFusedKernel(const __grid_constant__ KdaParams p, const __grid_constant__ SequenceBatch batch,
                   const __grid_constant__ KdaOrder order, const __grid_constant__ KdaSplit split, int step_tokens) {
  KdaFusedShared& shared = *DynamicShared<KdaFusedShared>();
  KdaRun run = {};
  run.sequence = order.given ? order.sequence[blockIdx.y] : static_cast<int>(blockIdx.y);
  const int begin = batch.token_begin[run.sequence], end = batch.token_begin[run.sequence + 1];
  if (end - begin <= step_tokens) return;
  const int head = blockIdx.x, warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
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
    KdaPrepareTiles<kBounded, kConvolved, kNorm, kAligned>(p, batch, shared, tiles, split, run.transition, begin, slot,
                                                           head, warp - kWalkers);
  }
}

}  // namespace k3::cuda
