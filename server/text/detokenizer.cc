#include "server/text/detokenizer.h"

namespace k3 {

std::string DetokenizeAll(const Tokenizer& tokenizer, std::span<const int32_t> ids) {
  return SanitizeUtf8(tokenizer.Decode(ids));
}

}  // namespace k3
