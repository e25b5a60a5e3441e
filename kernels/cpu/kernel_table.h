#pragma once

#include <cstdint>

#include "kernels/cpu/panel_matrix.h"
#include "kernels/op_params.h"

namespace k3 {

// Positions per attention block; blocks are anchored at position 0, whatever the page size.
inline constexpr int kMlaBlock = 128;
// Columns of the recurrent state that one task walks: 64 columns of 128 rows are 32 KiB and stay in the first-level
// cache.
inline constexpr int kKdaSlice = 64;

// One token of one head before the recurrence. Pointers are to this head's d channels of q, k and v.
struct KdaPrepareArgs {
  int head_dim = 0;
  int conv_width = 0;
  const float* const* history[3] = {};  // [conv_width] for q, k, v: raw inputs, oldest first, the current token last
  const float* taps[3] = {};            // [conv_width, d] each, rows tap_stride apart
  int64_t tap_stride = 0;
  const float* decay = nullptr;    // [d] logits
  const float* dt_bias = nullptr;  // [d]
  float a_log = 0;
  KdaGate gate_kind = KdaGate::kBounded;
  float lower_bound = 0;
  float* q = nullptr;  // [d] out: l2-normalised, times d^-0.5
  float* k = nullptr;  // [d] out: l2-normalised
  float* v = nullptr;  // [d] out
  // exp(g) = base + delta: base 1 and delta exp(g) - 1 for slow decay, base 0 and delta exp(g) for fast. A rounded
  // exp(g) near 1 would be off in the same direction at every token of a long memory.
  float* decay_base = nullptr;   // [d] out
  float* decay_delta = nullptr;  // [d] out
  float* decayed_k = nullptr;    // [d] out: k exp(g)
};

// One token of one head through the recurrence, columns [0, columns) of the state.
struct KdaStepArgs {
  int head_dim = 0;       // K
  int columns = 0;        // <= kKdaSlice
  void* state = nullptr;  // [K][row_stride], first column of the slice
  DType state_dtype = DType::kF32;
  int64_t row_stride = 0;              // elements
  const float* q = nullptr;            // [K]
  const float* k = nullptr;            // [K]
  const float* decay_base = nullptr;   // [K]
  const float* decay_delta = nullptr;  // [K]
  const float* decayed_k = nullptr;    // [K]
  const float* v = nullptr;            // [columns]
  float beta = 0;
  float* o = nullptr;  // [columns] out
};

// The inner loops, compiled once per instruction set; kernels_<isa>.cc fill one table each. Every function computes
// each output in one fixed order of operations, the same in every table.
struct KernelTable {
  const char* name;

  // y[r][32 * panel_begin ..] (+)= x[r] W^T for the panels [panel_begin, panel_end) and `rows` rows. y[r] points at
  // output 32 * panel_begin. Each output: acc = 0, acc = fma(x[k], w[k], acc) for ascending k, then y = acc or y + acc.
  void (*gemm)(const PanelMatrix& w, int64_t panel_begin, int64_t panel_end, const float* const* x, float* const* y,
               int64_t rows, bool accumulate);

  void (*add)(float* y, const float* x, int64_t n);  // y += x
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // One row of AttnResMix over `count` sources; `scores` holds count floats of scratch.
  void (*attn_res)(const float* const* sources, int count, const float* query, float mix_eps, const float* norm_weight,
                   float norm_eps, int64_t n, float* scores, float* out);
  // One row and site of AttnResClosed over `count` sources, likewise.
  void (*attn_res_closed)(const float* const* sources, int count, const float* query, float mix_eps, int64_t n,
                          float* scores, float* mix, float* top, float* sum);
  // One row of AttnResMix's second phase.
  void (*attn_res_join)(const float* live, const float* mix, float top, float sum, const float* query, float mix_eps,
                        const float* norm_weight, float norm_eps, int64_t n, float* out);
  void (*gated_activation)(const float* gate, const float* up, const ActivationSpec& spec, int64_t n, float* out);
  void (*sigmoid)(const float* x, int64_t n, float* out);
  void (*softmax)(const float* x, int64_t n, float* out);
  void (*widen_bf16)(const uint16_t* x, int64_t n, float* out);
  void (*narrow_bf16)(const float* x, int64_t n, uint16_t* out);

  void (*kda_prepare)(const KdaPrepareArgs& args);
  void (*kda_step)(const KdaStepArgs& args);
  // out = weight * o / sqrt(mean(o^2) + eps) * sigmoid(gate)
  void (*kda_output)(const float* o, const float* weight, float eps, const float* gate, int64_t n, float* out);

  // scores[r][j] = scale * (q[r] . line[j]) for `rows` queries and `keys` lines of `width` elements.
  void (*mla_scores)(const float* const* q, int rows, const void* const* lines, DType dtype, int keys, int64_t width,
                     float scale, float* const* scores);
  // One block of the softmax of one row: p[j] = exp(scores[j] - max) in place; returns max and sum.
  void (*mla_softmax)(float* scores, int keys, float* max, float* sum);
  // out[r] = sum_j p[r][j] line[j][0 .. width), ascending j from zero, for `rows` rows with counts[r] keys each.
  void (*mla_values)(const float* const* p, const int* counts, int rows, const void* const* lines, DType dtype,
                     int64_t width, float* const* out);
  // acc = acc * a + x * b
  void (*scale_add)(float* acc, float a, const float* x, float b, int64_t n);
  void (*mul_sigmoid)(float* y, const float* gate, int64_t n);  // y *= sigmoid(gate)

  // Maximum of z (-inf when empty or all -inf), and whether any entry is NaN or +inf.
  void (*logit_range)(const float* z, int64_t n, float* max, bool* bad);
  // sum over i of exp((z[i] - max) * inverse_temperature), accumulated in double over fixed blocks.
  double (*sum_exp)(const float* z, int64_t n, float max);
  // out[i] = exp(x[i])
  void (*exp)(const float* x, int64_t n, float* out);
};

enum class CpuIsa : uint8_t { kScalar, kAvx2, kAvx512 };

// Null when this build or this processor lacks the instruction set.
const KernelTable* Kernels(CpuIsa isa);
// The fastest table that this processor runs.
const KernelTable& BestKernels();

}  // namespace k3
