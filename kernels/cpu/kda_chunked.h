#pragma once

#include <cstdint>

#include "kernels/op_params.h"

namespace k3 {

inline constexpr int kKdaChunk = 64;  // tokens per chunk
inline constexpr int kKdaTile = 16;   // rows of the tiles from which a chunk's matrices are built

// The KDA recurrence of one head in its chunked (WY) form: the algorithm of the device kernels in plain fp32, against
// which they are debugged. Serving on the CPU uses the token recurrence.
struct KdaChunkedParams {
  int64_t tokens = 0;           // T
  int64_t head_dim = 0;         // d = K = V
  int64_t stride = 0;           // elements between the rows of q, k, v, g and out
  const float* q = nullptr;     // [T, d] l2-normalised and scaled by d^-0.5
  const float* k = nullptr;     // [T, d] l2-normalised
  const float* v = nullptr;     // [T, d]
  const float* g = nullptr;     // [T, d] log-decay, <= 0
  const float* beta = nullptr;  // [T] write strength in [0, 1]
  int64_t beta_stride = 1;
  // kBounded promises g >= -5: the diagonal tiles then factor around an anchor in their middle.
  KdaGate gate_kind = KdaGate::kBounded;
  float* state = nullptr;  // [K, V], in and out
  float* out = nullptr;    // [T, d]
};

void KdaChunked(const KdaChunkedParams& params);

}  // namespace k3
