#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "server/text/tokenizer.h"
#include "server/text/utf8.h"

namespace k3 {

// Token ids, one at a time, to valid UTF-8. A character whose bytes are spread over tokens appears with the last of
// them; bytes that can never become a character appear as U+FFFD, one per ill-formed part. One per choice of a request.
class Detokenizer {
 public:
  explicit Detokenizer(std::shared_ptr<const Tokenizer> tokenizer) : tokenizer_(std::move(tokenizer)) {}

  // Appends what `id` completes to `text`; possibly nothing.
  void Append(int32_t id, std::string* text) { stream_.Append(tokenizer_->TokenBytes(id), text); }
  // At the end: a half character becomes one U+FFFD.
  void Flush(std::string* text) { stream_.Flush(text); }

  // Bytes held back until their character is complete.
  std::string_view pending() const { return stream_.pending(); }

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  Utf8Stream stream_;
};

// All of `ids` at once: the same text as a Detokenizer gives.
std::string DetokenizeAll(const Tokenizer& tokenizer, std::span<const int32_t> ids);

}  // namespace k3
