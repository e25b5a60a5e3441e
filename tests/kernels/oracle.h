#pragma once

#include <cstdint>
#include <vector>

#include "kernels/op_params.h"

// The model's ops in fp64 as plain loops over the formulas of the architecture specification: what every backend's
// results are compared with. Inputs are the fp32 values that the backend really saw (after rounding to its activation
// type). Matrices are row-major without gaps.
namespace k3::testing::oracle {

using Doubles = std::vector<double>;
using Floats = std::vector<float>;

Doubles ToDouble(const Floats& x);

// x [rows, in], w [out, in] -> [rows, out].
Doubles Linear(const Doubles& x, const Floats& w, int64_t rows, int64_t in, int64_t out);

Doubles RmsNorm(const Doubles& x, const Floats& weight, double eps, int64_t rows, int64_t cols);

// blocks [sources][rows, cols]; the mix before and after the norm. With one source the mix is that source.
struct AttnResResult {
  Doubles mix, normed;
};
AttnResResult AttnRes(const std::vector<Doubles>& blocks, const Floats& query, double mix_eps,
                      const Floats& norm_weight, double norm_eps, int64_t rows, int64_t cols);

// gate_up [rows, 2 * width].
Doubles GatedActivation(const Doubles& gate_up, const ActivationSpec& spec, int64_t rows, int64_t width);

// Selection and weights of each token; ids ascend. `margin` is the distance between the last chosen and the first
// rejected biased score (infinite when everything is chosen or groups are used): below rounding a test must not insist.
struct RouterResult {
  std::vector<int32_t> ids;
  Doubles weights, margin;
};
RouterResult Router(const Doubles& logits, const Floats& bias, const RouterTopKParams& params);

// One expert, dequantised.
struct Expert {
  Floats w1, w3, w2;
};
Doubles Moe(const Doubles& x, const std::vector<int32_t>& ids, const Doubles& weights, int32_t top_k,
            const std::vector<Expert>& experts, int32_t first, const ActivationSpec& spec, int64_t rows, int64_t in,
            int64_t inner, bool mxfp8_inputs = false);
// E4M3 elements under the least power of two that keeps 32 of them within 448, by search instead of by bits.
void RoundToMxfp8(Doubles& values);

// Log-decay of one channel.
double KdaLogDecay(KdaGate kind, double lower_bound, double a_log, double z);

// The recurrence alone, one head: q, k (already normalised and scaled), v, g [T, d], beta [T], state [d, d] K-major in
// and out. Returns o [T, d].
Doubles KdaRecurrence(const Doubles& q, const Doubles& k, const Doubles& v, const Doubles& g, const Doubles& beta,
                      int64_t tokens, int64_t d, Doubles& state);

// One sequence through the whole KDA op.
struct KdaInput {
  int64_t tokens = 0, heads = 0, head_dim = 0, conv_width = 0;
  Floats qkv, decay, beta, gate;                  // [T, 3*H*d], [T, H*d], [T, H], [T, H*d]
  Floats conv_taps, dt_bias, a_log, norm_weight;  // as in KdaParams; conv_taps and norm_weight empty for null
  KdaGate gate_kind = KdaGate::kBounded;
  double lower_bound = -5, norm_eps = 1e-5;
  bool bf16_state = false;  // the state is rounded after every token
};
struct KdaState {
  Doubles state;  // [H, d, d]
  Doubles conv;   // [W - 1, 3*H*d]
};
// Advances `state`; `after` (may be null) receives a copy after each token. Returns out [T, H*d].
Doubles Kda(const KdaInput& input, KdaState& state, std::vector<KdaState>* after);

// One sequence: `lines` [context + T, latent + rope] already appended; queries are those of the last T positions.
struct MlaInput {
  int64_t tokens = 0, context = 0, heads = 0, nope = 0, rope = 0, latent = 0, value = 0;
  Floats q;     // [T, H * (nope + rope)]
  Floats gate;  // [T, H * value], or empty
  Floats kv_b;  // [H * (nope + value), latent]
  Doubles lines;
  double scale = 0;
};
Doubles Mla(const MlaInput& input);

// Distribution that a row is drawn from, before the draw: probability 0 where filtered or banned.
struct SampleResult {
  SampleStatus status = SampleStatus::kOk;
  Doubles log_probabilities;  // of the raw logits
  Doubles edited;             // logits after edits and mask
  Doubles kept;               // probabilities after all filters, not renormalised
  int32_t greedy = -1;
};
SampleResult Sample(const Floats& logits, const SampleRow& row, const std::vector<LogitEdit>& edits,
                    const std::vector<uint32_t>& mask);
// The id that `uniform` picks from `kept`, in ascending id order.
int32_t Draw(const SampleResult& result, double uniform);

}  // namespace k3::testing::oracle
