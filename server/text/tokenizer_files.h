#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace k3 {

// What a tokenizer's two files say, checked. `path` arguments are for messages only.

// tiktoken.model: a line per token, its bytes in base64, a blank and its rank. The ranks are 0 .. lines - 1 in any
// order and all 256 single bytes are there. INVALID_ARGUMENT naming path and line otherwise. Returns the tokens by
// rank.
absl::StatusOr<std::vector<std::string>> ParseTiktokenModel(std::string_view text, const std::string& path);

// Special tokens follow the ranks: kReserved ids, each with a name.
struct SpecialTokens {
  static constexpr int32_t kReserved = 256;

  std::vector<std::string> names;  // kReserved, by id minus first id
  // -1 where the file names none.
  int32_t bos_id = -1;
  int32_t eos_id = -1;
  int32_t pad_id = -1;
  int32_t unk_id = -1;
};

// tokenizer_config.json: added_tokens_decoder and bos_token, eos_token, pad_token, unk_token. Ids that it leaves out
// are called <|reserved_token_ID|>. INVALID_ARGUMENT for an id outside [first_id, first_id + kReserved), a name given
// twice, or a token that is not among them.
absl::StatusOr<SpecialTokens> ParseTokenizerConfig(std::string_view text, int32_t first_id, const std::string& path);

// K3's released names at their offsets, for a vocabulary that comes without tokenizer_config.json.
SpecialTokens DefaultSpecialTokens(int32_t first_id);

}  // namespace k3
