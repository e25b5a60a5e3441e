#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/core/tensor.h"

// One parameter struct per op. Letters: T tokens of this step, S sequences of this step, R logits rows, D hidden size,
// H heads of this rank, E experts, V vocabulary. All pointers are device memory (on the CPU: host memory) unless a
// comment says host. "act" is Ops::activation_dtype(): F32 on the CPU, BF16 or F32 on CUDA.
namespace k3 {

class LinearWeight;
class ExpertWeights;
class LatentProjection;

// The sequences of one step, packed: sequence s owns rows [token_begin[s], token_begin[s+1]) of every [T, ...] matrix,
// which are its positions context[s], context[s]+1, ... . Every sequence has at least one token.
struct SequenceBatch {
  int32_t num_tokens = 0;     // T
  int32_t num_sequences = 0;  // S
  // Padding: rows and sequences of a step that exist only so that it has the size of a captured one. They come last,
  // have one token each, state slot -1 and page ids -1 (no memory), and no experts. [1], the tokens that are not
  // padding; or null when all are.
  const int32_t* live_tokens = nullptr;
  const int32_t* token_begin = nullptr;  // [S + 1]
  const int32_t* context = nullptr;      // [S] tokens of the sequence computed before this step
  const int32_t* state_slot = nullptr;   // [S] slot of KdaParams' pools; written in place
  const int32_t* page_table = nullptr;   // [S, page_table_stride] ids into MlaPages; entries past the length unread
  int64_t page_table_stride = 0;
  const int32_t* sequence_of_token = nullptr;  // [T]
  const int32_t* position = nullptr;           // [T]
  const int32_t* epoch_slot = nullptr;         // [S] slot of RouterBalance's bias, or null: slot 0 for all
  // States to store in passing: after packed row snapshot_row[i] of its sequence has been applied, the state is copied
  // to slot snapshot_slot[i]. Rows ascend. A snapshot slot is never any sequence's state_slot. Entries whose row is
  // kNoRow come last and ask for nothing.
  int32_t num_snapshots = 0;
  const int32_t* snapshot_row = nullptr;   // [num_snapshots]
  const int32_t* snapshot_slot = nullptr;  // [num_snapshots]
  // Host copies for choosing variants and grids; same contents.
  const int32_t* host_token_begin = nullptr;  // host, [S + 1]
  const int32_t* host_context = nullptr;      // host, [S]
};

// A snapshot_row that is none.
constexpr int32_t kNoRow = 0x7fffffff;

// What a step does first. Token ids below 0 stand for tokens that the step before has drawn: -1 - r becomes drawn[r],
// or 0 where that row has no token (its sequence has failed; what is computed for it here is dropped). And a page table
// that came packed is spread to rows of a fixed stride, so that a captured step finds it where it was captured.
struct BeginStepParams {
  int32_t* tokens = nullptr;  // [T], in and out
  int64_t num_tokens = 0;
  const int32_t* drawn = nullptr;          // tokens of the step before; may be null when no id is below 0
  const int32_t* packed_table = nullptr;   // [sequences, *packed_stride], or null
  const int32_t* packed_stride = nullptr;  // [1], at most table_stride
  int64_t sequences = 0;
  int32_t* table = nullptr;  // [sequences, table_stride]; entries past packed_stride stay as they are
  int64_t table_stride = 0;
};

// out[t] = table[tokens[t]]. A table that is one rank's share of the vocabulary starts at id `first_id`; tokens of the
// other ranks then give rows of zeros, so that the sum over ranks is the whole.
struct EmbedParams {
  const int32_t* tokens = nullptr;  // [T], each in [0, table.rows), or in [0, V) for a share
  MatrixView table;                 // [V, D], or a share of its rows, as made by Ops::MakeTable
  MatrixView out;                   // [T, D] act
  bool is_share = false;
  int64_t first_id = 0;
};

// to = from, row by row; equal shape and dtype.
struct CopyMatrixParams {
  MatrixView from;
  MatrixView to;
};

// out[i] = sum over parts of data[part][i], added in the fixed order of tree_sum.h; BF16 parts are added in fp32 and
// rounded once.
struct TreeSumParams {
  const void* data = nullptr;  // [parts][count] of dtype
  int32_t parts = 0;
  int64_t count = 0;
  DType dtype = DType::kF32;  // F32, on devices also BF16; of data and out
  void* out = nullptr;        // [count]; may be the first part
};

// Sorts rows by the ranks whose experts they chose, one copy a row and rank. Peer p holds the experts of part
// first_part + p of `parts`, which are [experts * part / parts, experts * (part + 1) / parts). Its block of `rows`
// slots gets those of the T rows that have an expert there, in ascending order, and no experts (-1) in the slots
// behind.
struct PackSlotsParams {
  MatrixView x;                    // [T, W] F32 or BF16
  const int32_t* ids = nullptr;    // [T, top_k]; -1 is nobody's
  const float* weights = nullptr;  // [T, top_k]
  int32_t top_k = 0;
  int32_t experts = 0;
  int32_t parts = 0;
  int32_t first_part = 0;
  int32_t peers = 0;
  int64_t rows = 0;              // slots of a peer, at least T
  MatrixView out;                // [peers * rows, W], x's dtype; slots without a row stay as they are
  int32_t* out_ids = nullptr;    // [peers * rows, top_k]
  float* out_weights = nullptr;  // [peers * rows, top_k]; likewise
  int32_t* counts = nullptr;     // [peers] rows of each peer
  int32_t* slots = nullptr;      // [peers, rows]: row t's slot in the block of peer p, or -1; entries past T unwritten
};

// out[t] = sum over peers of what came back in row t's slots of PackSlots; a peer without row t adds 0. The order and
// the rounding are TreeSum's.
struct SumSlotsParams {
  const void* data = nullptr;      // [peers][rows][W] of out's dtype
  const int32_t* slots = nullptr;  // [peers, rows]
  int32_t peers = 0;
  int64_t rows = 0;
  MatrixView out;  // [T, W] F32, on devices also BF16; T <= rows
};

// y = x W^T, or y += x W^T.
struct LinearParams {
  MatrixView x;  // [T, in] act
  const LinearWeight* weight = nullptr;
  MatrixView y;  // [T, out] act, or F32
  bool accumulate = false;
};

// out[i] = x[row[i]].
struct GatherRowsParams {
  MatrixView x;                  // [T, D]
  const int32_t* row = nullptr;  // [R]
  MatrixView out;                // [R, D], x's dtype
};

// out = weight * x / sqrt(mean(x^2) + eps), fp32 inside, one rounding (spec 3.0).
struct RmsNormParams {
  MatrixView x;                   // [T, D] act
  const float* weight = nullptr;  // [D]
  float eps = 0;
  MatrixView out;  // [T, D] act; may be x itself
};

// stream += delta, then out = RmsNorm(stream): the ordinary pre-norm residual of Kimi-Linear. `delta` may be absent.
struct AddRmsNormParams {
  MatrixView stream;              // [T, D] act, in and out
  MatrixView delta;               // [T, D] act, or absent
  const float* weight = nullptr;  // [D]
  float eps = 0;
  MatrixView out;  // [T, D] act
};

// Block attention residuals (spec 3.2), fused with the running-sum update and the next RMSNorm.
//   live = bank[live_block]; if delta: live = restart ? delta : live + delta (stored back, rounded to act)
//   a_j = softmax over j in 0..live_block of sum_c bank[j][c] * rsqrt(mean(bank[j]^2) + mix_eps) * query[c]
//   out = RmsNorm(sum_j a_j bank[j]), the norm applied to the unrounded fp32 mix.
// With live_block == 0 the mix is the live sum itself. Blocks before live_block are not what the op before this wrote.
//
// Two forms with the same result up to rounding (Ops::ChooseAttnResForm): all sources in one pass, or, with `mixes`,
// the second of two phases, which reads the closed blocks' mix as AttnResClosed left it and adds the live sum by a
// softmax of two: with m = max(top, s), s the live sum's score, u = sum exp(top - m), v = exp(s - m):
//   out = RmsNorm((u mix + v live) / (u + v)).
// A row's bits depend on nothing but the row and the form.
struct AttnResMixParams {
  void* bank = nullptr;  // [live_block + 1][T, D] act, block-major; block j starts at element j * block_stride
  int64_t block_stride = 0;
  int32_t live_block = 0;
  int64_t rows = 0;              // T
  int64_t cols = 0;              // D
  MatrixView delta;              // [T, D] act, or absent
  bool restart = false;          // the live block holds nothing yet: the sum starts with delta
  const float* query = nullptr;  // [D] key-norm weight times pseudo-query, folded at load
  float mix_eps = 0;
  const float* norm_weight = nullptr;  // [D]
  float norm_eps = 0;
  MatrixView out;  // [T, D] act
  // Two phases: AttnResClosedParams::mixes of a call with the same bank, closed == live_block, rows, cols and mix_eps,
  // and this site's place among that call's queries. Null: one pass.
  const void* mixes = nullptr;
  int32_t site = 0;
  bool mixes_settled = false;  // the op before this was not that AttnResClosed
};

// Sites of one AttnResClosed call at most.
constexpr int32_t kAttnResSites = 8;

// The first of the two phases (spec C.2). The depth queries do not depend on activations, so the closed blocks are read
// once and mixed for several sites that follow, as long as no further block is closed:
//   s_j = sum_c bank[j][c] * rsqrt(mean(bank[j]^2) + mix_eps) * query[c],  j in [0, closed)
//   top = max_j s_j;  sum = sum_j exp(s_j - top);  mix = sum_j exp(s_j - top) / sum * bank[j]
// for each row and site. `mixes` is written and read by the backend alone: (top, sum) in fp32 and mix with the size of
// act. F32 keeps mix as it is. BF16 keeps it as fp16 under a power of two for each row and site, so that it is rounded
// by at most 2^-12 of itself (an eighth of a rounding to BF16), or 2^-28 of a bound of its largest element.
struct AttnResClosedParams {
  const void* bank = nullptr;  // as in AttnResMixParams
  int64_t block_stride = 0;
  int32_t closed = 0;                        // blocks to mix, from the bank's first
  int64_t rows = 0;                          // T
  int64_t cols = 0;                          // D
  int32_t sites = 0;                         // in [1, kAttnResSites]
  const float* queries[kAttnResSites] = {};  // host array of [D], the first `sites` set
  float mix_eps = 0;
  void* mixes = nullptr;  // AttnResMixesBytes, 256-byte aligned; owned by the caller, valid until its next use
};

// Bytes of AttnResClosedParams::mixes, whatever the number of sites.
constexpr size_t AttnResMixesBytes(int64_t rows, int64_t cols, DType act) {
  return static_cast<size_t>(kAttnResSites * rows) * (static_cast<size_t>(cols) * SizeOf(act) + 16);
}

enum class KdaGate : uint8_t {
  kBounded,   // g = lower_bound * sigmoid(exp(A_log) * z), in (lower_bound, 0): K3
  kSoftplus,  // g = -exp(A_log) * softplus(z), unbounded below: Kimi-Linear
};

// Everything of one KDA layer between the input products and the output product (spec 3.3): short convolution with
// SiLU, l2norm, decay and write-strength gates, delta-rule recurrence on the paged state, gated RMSNorm. For K = V =
// head_dim = d. State S[k][v] is kept as [H, K, V] fp32 (or BF16, see state_dtype), K-major:
//   S <- diag(exp(g)) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q.
struct KdaParams {
  const SequenceBatch* batch = nullptr;
  int32_t heads = 0;       // H
  int32_t head_dim = 0;    // d
  int32_t conv_width = 0;  // W, taps per channel; tap W-1 meets the current token
  MatrixView qkv;          // [T, 3*H*d] act: raw q | k | v before the convolution
  MatrixView decay;        // [T, H*d] act: f_b(f_a(x)), dt_bias not yet added
  MatrixView beta;         // [T, H] act: write-strength logits
  MatrixView gate;         // [T, H*d] act: output-gate logits
  // [3*H*d, W]. Null, together with norm_weight: the recurrence alone, with its norms of q and k and its gates, as
  // public chunked kernels have it. qkv holds convolved q, k and v, out takes what the recurrence gives; conv_state and
  // gate are not used.
  const float* conv_taps = nullptr;
  const float* dt_bias = nullptr;      // [H*d]
  const float* a_log = nullptr;        // [H]
  const float* norm_weight = nullptr;  // [d], or null, see conv_taps
  KdaGate gate_kind = KdaGate::kBounded;
  float gate_lower_bound = 0;  // kBounded only, in [-5, 0)
  float norm_eps = 0;
  // The state pool of this layer. Slot s, recurrent part: [H, d, d] at state + s * slot_stride bytes; convolution part:
  // [W-1, 3*H*d] act-typed raw inputs, oldest first, at conv_state + s * slot_stride bytes.
  void* state = nullptr;
  void* conv_state = nullptr;
  int64_t slot_stride = 0;  // bytes
  DType state_dtype = DType::kF32;
  // Whether what was queued right before this op writes neither to this batch's slots nor to the batch's arrays, so
  // that a device may read them while it still runs. Everything queued earlier is done by then.
  bool slots_settled = false;
  MatrixView out;           // [T, H*d] act
  void* scratch = nullptr;  // Ops::KdaScratchBytes
};

// A pool of MLA latent pages of one layer: page p holds page_size lines of latent_dim + rope_dim elements starting at
// byte p * page_stride of `data`. A line is [c (after norm) | k_pe] of one token, shared by all heads.
struct MlaPages {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t page_stride = 0;  // bytes between pages of this layer
  int32_t page_size = 0;    // tokens
};

// Writes the cache line of each token of the step to its page (spec 3.4).
struct MlaAppendParams {
  const SequenceBatch* batch = nullptr;
  MatrixView kv_a;                     // [T, latent_dim + rope_dim] act
  const float* norm_weight = nullptr;  // [latent_dim]
  float norm_eps = 0;                  // --latent-norm-eps
  int32_t latent_dim = 0;
  int32_t rope_dim = 0;  // never rotated
  MlaPages pages;
};

// Causal attention of the step's tokens over their sequences' pages (this step's lines included), then the output gate.
struct MlaAttentionParams {
  const SequenceBatch* batch = nullptr;
  int32_t heads = 0;
  int32_t nope_dim = 0;
  int32_t rope_dim = 0;
  int32_t latent_dim = 0;
  int32_t value_dim = 0;
  MatrixView q;                                  // [T, H * (nope_dim + rope_dim)] act, per head nope then rope
  const LatentProjection* projection = nullptr;  // kv_b, split per head into key and value parts
  MatrixView gate;                               // [T, H * value_dim] act logits, or absent
  float scale = 0;                               // (nope_dim + rope_dim)^-0.5
  MlaPages pages;
  MatrixView out;           // [T, H * value_dim] act
  void* scratch = nullptr;  // Ops::MlaScratchBytes
};

enum class Activation : uint8_t {
  kSitu,    // beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)
  kSwiglu,  // silu(g) * u
};

struct ActivationSpec {
  Activation kind = Activation::kSitu;
  float beta = 1;
  float linear_beta = 0;  // kSitu: 0 leaves u uncapped
};

// out = f(gate, up) with gate_up = [gate | up].
struct GatedActivationParams {
  MatrixView gate_up;  // [T, 2*I] act
  ActivationSpec activation;
  MatrixView out;  // [T, I] act
};

enum class RouterScore : uint8_t { kSigmoid, kSoftmax };

// Balance of a layer's experts over destination ranks ("groups"): a bias of each group on top of the experts' own, and
// counts of what the router chose and of how near it came to choosing otherwise. All counts are integers that are added
// to, so they do not depend on the order in which tokens are routed.
//
// Margin of candidate j of a token: x = a - s_j - b_j, a the (top_k + 1)-th best of s + b + delta, which j must beat.
// It is chosen while x < delta of its group. Counted for the token's candidates, its 2 * top_k best.
struct RouterBalance {
  int32_t groups = 0;            // expert e belongs to GroupOfExpert(e)
  const float* delta = nullptr;  // slot s and group g: delta[s * slot_stride + g], at most 0
  int64_t slot_stride = 0;
  const int32_t* slot_of_sequence = nullptr;   // [S]
  const int32_t* sequence_of_token = nullptr;  // [T]
  // Rows whose margins, gap and overrides are counted: every so many, from the first.
  int64_t observe_every = 1;
  uint32_t* margins = nullptr;  // [groups, kMarginBins]
  uint32_t* load = nullptr;     // [groups] choices of all rows
  uint64_t* sums = nullptr;     // [kBalanceSums]: rows counted; gaps between top_k-th and last candidate in units of
                                // 2^-kGapBits; choices that s + b alone would not have made; choices swapped by the cap
  // For RouterSoftCap: the candidates of every row, best first, -1 where there are no more. Null: not wanted.
  int32_t* candidates = nullptr;      // [T, 2 * top_k]
  float* candidate_values = nullptr;  // [T, 2 * top_k] biased
  float* candidate_scores = nullptr;  // [T, 2 * top_k] what weights are made of
};
constexpr int32_t kMarginBins = 128;
constexpr float kMarginLow = -0.25f, kMarginHigh = 0.25f;
constexpr int32_t kGapBits = 20;
constexpr int32_t kBalanceSums = 4;

// Experts are spread over ranks as contiguous shares [floor(experts * r / ranks), floor(experts * (r + 1) / ranks)).
constexpr int32_t GroupOfExpert(int32_t expert, int32_t experts, int32_t groups) {
  return static_cast<int32_t>(((static_cast<uint32_t>(expert) + 1) * static_cast<uint32_t>(groups) - 1) /
                              static_cast<uint32_t>(experts));
}

// Selects experts (spec 3.6). Scores, bias and comparison in fp32; ties go to the lower id. Ids come out ascending.
struct RouterTopKParams {
  const float* logits = nullptr;  // [T, E]
  int64_t tokens = 0;
  int32_t experts = 0;
  int32_t top_k = 0;
  int32_t groups = 1;  // E divides into `groups`; only the best topk_group of them take part
  int32_t topk_group = 1;
  const float* bias = nullptr;  // [E] selection only
  RouterScore score = RouterScore::kSigmoid;
  bool renormalize = true;
  bool biased_weights = false;  // --kl-router-weights biased
  float scale = 1;
  const int32_t* forced_ids = nullptr;     // [T, top_k] or null: take these, weights still from the own scores (verify)
  const int32_t* live_tokens = nullptr;    // [1] or null: tokens from this one on are padding, get ids -1 and weights 0
  int32_t* ids = nullptr;                  // [T, top_k] out, ascending per token
  float* weights = nullptr;                // [T, top_k] out
  const RouterBalance* balance = nullptr;  // host; null: exact, and nothing is counted
};

// Behind RouterTopK: no group gets more than ceil(factor * tokens * top_k / groups) of this step's choices where that
// can be had cheaply. Tokens in order of their rows, choices best first: one beyond its group's capacity is replaced by
// the token's best candidate of a group with room whose biased value is at most `tau` below the cutoff; else it stands.
// Capacity is filled by the router's own choices first. Never drops one.
struct RouterSoftCapParams {
  const RouterBalance* balance = nullptr;  // host; with candidates
  int64_t tokens = 0;
  int32_t experts = 0;
  int32_t top_k = 0;
  float factor = 1.10f;
  float tau = 0.03f;
  bool renormalize = true;
  float scale = 1;
  const int32_t* live_tokens = nullptr;  // as RouterTopKParams
  int32_t* ids = nullptr;                // [T, top_k] in and out, ascending
  float* weights = nullptr;              // [T, top_k] in and out
};

// y[t] = sum over j with ids[t, j] in this rank's experts of weights[t, j] * W2 f(W1 x[t], W3 x[t]).
// The sum over j runs in ascending expert order in fp32 whatever the batch. Rows without a local expert come out 0.
struct MoeExpertsParams {
  MatrixView x;                    // [T, in] act
  const int32_t* ids = nullptr;    // [T, top_k], ascending per token; -1 is nobody's
  const float* weights = nullptr;  // [T, top_k]
  int32_t top_k = 0;
  const ExpertWeights* experts = nullptr;
  ActivationSpec activation;
  // The inputs of both products are rounded to MXFP8 (core/mxfp8.h), as quantisation-aware training saw them; `in` and
  // the inner width are multiples of 32 then.
  bool mxfp8_inputs = false;
  MatrixView out;           // [T, in] act, or F32 when partial sums are still to be reduced over ranks
  void* scratch = nullptr;  // Ops::MoeScratchBytes
};

// Sampling of R rows. Order of operations on a row's logits z (fp32):
//   1. finite check: any NaN or +inf, or nothing above -inf, marks the row kNonFinite and gives no token;
//   2. log-probabilities (token and top) are log_softmax of the raw z;
//   3. logit edits, in the order of their kinds below; 4. mask of allowed ids; 5. temperature; 6. top-k; 7. top-p; 8.
//   min-p;
//   9. draw by inverse transform of `uniform` over the kept ids in ascending id order; temperature 0 takes the arg-max,
//      ties to the lowest id.
enum class SampleStatus : int32_t { kOk = 0, kNonFinite = 1, kNothingAllowed = 2 };

enum class LogitEditKind : int32_t {
  kPenalty = 0,  // `count` occurrences generated, `in_prompt` says whether the prompt holds it too
  kBias = 1,     // add `value`; -inf bans the id
};

struct LogitEdit {
  int32_t id = 0;
  LogitEditKind kind = LogitEditKind::kBias;
  int32_t count = 0;      // kPenalty: occurrences among generated tokens
  int32_t in_prompt = 0;  // kPenalty
  float value = 0;        // kBias
};

// Per-row parameters, packed so that one upload carries them.
struct SampleRow {
  float temperature = 0;       // 0 = greedy
  float top_p = 1;             // (0, 1]
  float min_p = 0;             // [0, 1)
  int32_t top_k = 0;           // 0 = off
  float presence_penalty = 0;  // z -= presence (count > 0), z -= frequency * count
  float frequency_penalty = 0;
  float repetition_penalty = 1;  // count > 0 or in_prompt: z > 0 ? z / r : z * r, before the other two
  float uniform = 0;             // [0, 1), from the engine's counter-based stream (seed, choice, position)
  int32_t edit_begin = 0;        // this row's slice of `edits`, kPenalty entries first
  int32_t edit_end = 0;
  int32_t mask_row = -1;     // row of `allowed_mask`, or -1
  int32_t top_logprobs = 0;  // how many of the best raw log-probabilities to return, <= max_top_logprobs
  int32_t logprob_of = -1;   // also return the log-probability of this id (prompt log-probabilities); -1: of the chosen
  int32_t draw = 1;          // 0: log-probabilities only, no token
};

struct SampleParams {
  MatrixView logits;                // [R, V] F32; may be overwritten
  const SampleRow* rows = nullptr;  // [R]
  const LogitEdit* edits = nullptr;
  const uint32_t* allowed_mask = nullptr;  // [mask rows, ceil(V/32)], bit set = allowed
  int32_t max_top_logprobs = 0;            // stride of the two top arrays below
  int32_t* token = nullptr;                // [R] out; -1 where status is not kOk or draw is 0
  int32_t* status = nullptr;               // [R] out, SampleStatus
  float* logprob = nullptr;                // [R] out: of the chosen id, or of `logprob_of`
  int32_t* top_ids = nullptr;              // [R, max_top_logprobs] out, best first, ties to the lower id
  float* top_logprobs = nullptr;           // [R, max_top_logprobs] out
  void* scratch = nullptr;                 // Ops::SampleScratchBytes
};

}  // namespace k3
