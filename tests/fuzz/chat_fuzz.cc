// Any text as a JSON conversation, rendered in both chat formats: an INVALID_ARGUMENT that names a field, or a prompt
// whose special ids are exactly those of its markup and whose text comes back from its ids.

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/text/chat_formats.h"
#include "server/text/chat_renderer.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"
#include "server/text/json_writer.h"
#include "tests/server/text/chat_json.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

size_t CountSpecial(const k3::Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  size_t count = 0;
  for (const int32_t id : ids) count += tokenizer.IsSpecial(id) ? 1 : 0;
  return count;
}

void RequireFieldError(const absl::Status& status) {
  Require(status.code() == absl::StatusCode::kInvalidArgument && !k3::FieldErrorPath(status).empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto tokenizer = k3::Tokenizer::Load(K3_SOURCE_DIR "/configs/models/tiny-k3").value();
  static const k3::ChatRenderer renderer(tokenizer);
  const std::string_view text(reinterpret_cast<const char*>(data), size);

  (void)k3::ParseJson(text, {.python = true});
  const auto value = k3::ParseJson(text);
  if (!value.ok()) {
    Require(value.status().code() == absl::StatusCode::kInvalidArgument);
    return 0;
  }
  const k3::JsonStyle as_written = {.number_as_written = true};
  const auto again = k3::ParseJson(k3::WriteJson(*value, as_written));
  Require(again.ok() && *again == *value);
  const std::string python = k3::WriteJson(*value, {.spaces = true, .sort_keys = true});
  Require(k3::ParseJson(python, {.python = true}).ok());

  const k3::ChatRequest request = k3::testing::ReadChatJson(*value);
  const auto chat = renderer.Render(request);
  if (!chat.ok()) {
    RequireFieldError(chat.status());
  } else {
    const k3::ChatPrompt prompt = renderer.RenderToIds(request).value();
    std::string whole;
    size_t markup = 0;
    for (const k3::Segment& segment : chat->segments) {
      whole += segment.text;
      markup += segment.control ? 1 : 0;
    }
    Require(tokenizer->Decode(prompt.ids) == whole);
    Require(CountSpecial(*tokenizer, prompt.ids) == markup);
  }
  if (k3::CheckChatRequest(request).ok()) {
    const auto k2 = k3::RenderK2(request);
    if (!k2.ok()) RequireFieldError(k2.status());
  }
  return 0;
}
