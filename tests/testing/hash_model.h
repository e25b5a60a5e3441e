#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"
#include "kernels/op_params.h"

namespace k3::testing {

// A stand-in for a hybrid model whose every output depends, through 64-bit hashes, on all that a real one depends on:
// the recurrent state (a fold over all tokens), the convolution history (the last three tokens), and one cached line
// per token that attention reads as a sum. A state one token ahead or behind, a stale line, a slot of somebody else or
// a token applied twice therefore changes all later logits. Bytes of 0xFF are poison: whatever reads them is not
// finite.
struct HashState {
  static constexpr int kHistory = 3;
  uint64_t fold = 0;
  uint64_t history[kHistory] = {};  // token + 1, oldest first; 0 = before the first token
  bool operator==(const HashState&) const = default;
};

inline constexpr uint64_t kPoison = ~uint64_t{0};

class HashModel {
 public:
  explicit HashModel(int32_t vocab_size, uint64_t seed = 1) : vocab_size_(vocab_size), seed_(seed) {}

  int32_t vocab_size() const { return vocab_size_; }
  // The line of `token` for attention, from the state before it.
  uint64_t Line(const HashState& before, int32_t token) const;
  void Advance(HashState* state, int32_t token) const;
  // One token's share of attention; shares are added.
  uint64_t Attend(uint64_t line, int32_t token) const;
  // The hidden value after `token`, from the state that includes it; kPoison when anything was.
  uint64_t Output(const HashState& after, uint64_t attention) const;
  // Non-finite when `output` is kPoison.
  void Logits(uint64_t output, std::vector<float>* logits) const;

 private:
  int32_t vocab_size_;
  uint64_t seed_;
};

// Ops::Sample by plain loops, for one row.
struct SampledRow {
  int32_t token = -1;
  SampleStatus status = SampleStatus::kOk;
  float logprob = 0;
  std::vector<TopLogprob> top;
};
SampledRow SampleReference(std::vector<float> logits, const SampleRow& row, std::span<const LogitEdit> edits,
                           std::span<const uint32_t> mask);

// What a request must yield, computed without scheduler, pages or slots.
struct ExpectedChoice {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  FinishReason reason = FinishReason::kLength;
};
ExpectedChoice ExpectedTokens(const HashModel& model, const std::vector<int32_t>& prompt, const SamplingParams& params,
                              int32_t choice, const std::vector<int32_t>& eos, TokenConstraint* constraint = nullptr);
// Of prompt tokens 1, 2, ...
std::vector<float> ExpectedPromptLogprobs(const HashModel& model, const std::vector<int32_t>& prompt);

}  // namespace k3::testing
