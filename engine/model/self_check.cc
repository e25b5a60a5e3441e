#include "engine/model/self_check.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "engine/model/sequence_runner.h"

namespace k3 {
namespace {

constexpr int32_t kPromptLength = static_cast<int32_t>(kSelfCheckTokens);

// Ids spread over the vocabulary, another set for each `start`.
std::vector<int32_t> Prompt(int64_t vocab_size, int64_t start) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < kPromptLength; ++i) {
    tokens.push_back(static_cast<int32_t>((start + i * (vocab_size / kPromptLength)) % vocab_size));
  }
  return tokens;
}

}  // namespace

absl::Status SelfCheck(const Model& model, Ops& ops) {
  const int64_t vocab_size = model.config().vocab_size;
  SequenceRunner runner(model, ops, kPromptLength, kPromptLength);
  const int32_t last = kPromptLength - 1;
  std::vector<float> before;
  for (int64_t start : {int64_t{0}, vocab_size / 11 + 1}) {
    runner.Reset();
    const std::vector<float> logits = runner.Append(Prompt(vocab_size, start), std::span(&last, 1));
    const auto bad = std::find_if(logits.begin(), logits.end(), [](float x) { return !std::isfinite(x); });
    if (bad != logits.end()) {
      return absl::DataLossError(absl::StrCat("self-check: the logit of id ", bad - logits.begin(), " is ", *bad,
                                              " on a prompt of ", kPromptLength, " ids; expected a finite number"));
    }
    const auto [low, high] = std::minmax_element(logits.begin(), logits.end());
    if (*low == *high && vocab_size > 1) {
      return absl::DataLossError(absl::StrCat("self-check: all ", vocab_size, " logits equal ", *low,
                                              "; the output head or the final norm holds no usable weights"));
    }
    if (logits == before) {
      return absl::DataLossError(
          "self-check: two different prompts give the same logits; the embedding or the layers hold no usable weights");
    }
    before = logits;
  }
  return absl::OkStatus();
}

}  // namespace k3
