// Any bytes through the tiny vocabulary: text that is not UTF-8 is refused, all else comes back byte for byte, ordinary
// text never gives a special id, and the interpreter cuts as the compiled pattern does.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "server/text/detokenizer.h"
#include "server/text/pretokenizer.h"
#include "server/text/tokenizer.h"
#include "server/text/utf8.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

std::vector<uint32_t> Split(const k3::Pretokenizer& pretokenizer, std::string_view text) {
  std::vector<uint32_t> ends;
  pretokenizer.Split(text, &ends);
  return ends;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto tokenizer = k3::Tokenizer::Load(K3_SOURCE_DIR "/configs/models/tiny-k3").value();
  static const auto compiled = k3::Pretokenizer::Create().value();
  static const auto interpreted = k3::Pretokenizer::Create(k3::Pretokenizer::Engine::kInterpreter).value();
  const std::string_view text(reinterpret_cast<const char*>(data), size);

  std::vector<int32_t> raw;
  tokenizer->EncodeBytes(text, &raw);
  Require(tokenizer->Decode(raw) == text);
  Require(Split(*compiled, text) == Split(*interpreted, text));

  const auto ordinary = tokenizer->Encode(text);
  const auto control = tokenizer->Encode(text, k3::EncodeMode::kControl);
  Require(ordinary.ok() == k3::IsValidUtf8(text) && control.ok() == ordinary.ok());
  if (ordinary.ok()) {
    Require(*ordinary == raw);
    Require(tokenizer->Decode(*control) == text);
    for (const int32_t id : *ordinary) Require(!tokenizer->IsSpecial(id));
  }

  k3::Detokenizer detokenizer(tokenizer);
  std::string streamed;
  for (const int32_t id : raw) {
    std::string delta;
    detokenizer.Append(id, &delta);
    Require(k3::IsValidUtf8(delta));
    streamed += delta;
  }
  detokenizer.Flush(&streamed);
  Require(streamed == k3::SanitizeUtf8(text));
  return 0;
}
