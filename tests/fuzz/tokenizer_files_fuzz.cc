// Any text as tiktoken.model and, after a zero byte, as tokenizer_config.json: an INVALID_ARGUMENT that says where, or
// a vocabulary that encodes.

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <vector>

#include "server/text/tokenizer.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t zero = input.find('\0');
  std::optional<std::string_view> config;
  if (zero != std::string_view::npos) config = input.substr(zero + 1);

  if (config.has_value()) {
    const auto special = k3::ParseTokenizerConfig(*config, 256, "tokenizer_config.json");
    Require(special.ok() || special.status().code() == absl::StatusCode::kInvalidArgument);
    if (special.ok()) Require(special->names.size() == k3::SpecialTokens::kReserved);
  }
  const auto tokenizer = k3::Tokenizer::FromContents(input.substr(0, zero), config, "dir");
  if (!tokenizer.ok()) {
    Require(tokenizer.status().code() == absl::StatusCode::kInvalidArgument);
    Require(tokenizer.status().message().substr(0, 4) == "dir/");
    return 0;
  }
  constexpr std::string_view kText = "Some text, 漢字 and <|open|> 12345\n";
  for (const k3::EncodeMode mode : {k3::EncodeMode::kOrdinary, k3::EncodeMode::kControl}) {
    Require((*tokenizer)->Decode((*tokenizer)->Encode(kText, mode).value()) == kText);
  }
  for (int32_t id = -1; id <= (*tokenizer)->vocab_size(); ++id) Require(!(*tokenizer)->TokenBytes(id).empty());
  return 0;
}
