#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/stream_event.h"
#include "server/text/tokenizer.h"

namespace k3 {

// Items of the chat route's logprobs.content, {"token","logprob","bytes","top_logprobs"}, joined by commas and with a
// comma before them when `out` is not empty.
void AppendChatLogprobs(const LogprobRows& rows, const Tokenizer& tokenizer, int32_t top_logprobs, std::string* out);

// The completion route's logprobs: four parallel arrays, kept as the inside of their JSON text.
class CompletionLogprobs {
 public:
  // `top_logprobs` best ones besides; the token itself is always among them, with the identical number.
  CompletionLogprobs(const Tokenizer& tokenizer, int32_t top_logprobs)
      : tokenizer_(tokenizer), top_logprobs_(top_logprobs) {}

  // A token without a value: the first of an echoed prompt.
  void AppendUnscored(int32_t token);
  // `generated`: of the answer, in whose text the tokens that end or pad it do not appear; else of an echoed prompt.
  void Append(const LogprobRows& rows, bool generated);
  bool empty() const { return tokens_.empty(); }
  // Appends the object and forgets the tokens; offsets go on.
  void Take(std::string* out);

 private:
  void AppendToken(int32_t token, bool silent);

  const Tokenizer& tokenizer_;
  const int32_t top_logprobs_;
  std::string tokens_;
  std::string values_;
  std::string tops_;
  std::string offsets_;
  int64_t offset_ = 0;  // in characters
};

// vLLM's prompt_logprobs: null for the first token, then {"ID":{"logprob","rank","decoded_token"}} with the token first
// and the best ones after it.
std::string PromptLogprobsJson(const std::vector<int32_t>& prompt_ids, const LogprobRows& rows,
                               const Tokenizer& tokenizer, int32_t top_logprobs);

// What stands for one token by itself: its text, or "bytes:\xE4\xB8" when its bytes are no whole characters.
std::string TokenLabel(const Tokenizer& tokenizer, int32_t token);

}  // namespace k3
