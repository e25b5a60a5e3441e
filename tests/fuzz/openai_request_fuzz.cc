// Any text as the body of every OpenAI route: a request, or an error that names its field in a body of valid JSON. What
// is taken as JSON is what an independent parser takes.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "server/openai/openai_errors.h"
#include "server/openai/openai_request.h"
#include "server/openai/reply_json.h"
#include "server/text/utf8.h"

namespace {

void Require(bool condition, int line = __builtin_LINE()) {
  if (condition) return;
  std::fprintf(stderr, "line %d\n", line);
  std::abort();
}

void RequireGoodError(const absl::Status& status) {
  Require(status.code() == absl::StatusCode::kInvalidArgument);
  const k3::OpenAiError error = k3::ErrorOf(status);
  Require(error.status == 400 && !error.message.empty());
  const std::string body = k3::ErrorBody(error);
  Require(body.size() < 8192);
  const auto parsed = nlohmann::json::parse(body, nullptr, false);
  Require(!parsed.is_discarded() && parsed["error"].size() == 4);
}

// The deepest nesting, for text that is JSON.
int Depth(std::string_view text) {
  int depth = 0;
  int deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted) {
      if (text[i] == '\\') {
        ++i;
      } else if (text[i] == '"') {
        quoted = false;
      }
    } else if (text[i] == '"') {
      quoted = true;
    } else if (text[i] == '{' || text[i] == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (text[i] == '}' || text[i] == ']') {
      --depth;
    }
  }
  return deepest;
}

// A string that an event stream carries stays one line and comes back as it was, but for ill-formed bytes.
void CheckString(std::string_view text) {
  const std::string json = k3::JsonString(text);
  Require(json.find_first_of("\n\r") == std::string::npos);
  Require(json.find("\xE2\x80\xA8") == std::string::npos && json.find("\xC2\x85") == std::string::npos);
  const auto parsed = nlohmann::json::parse(json, nullptr, false);
  Require(parsed.is_string());
  if (k3::IsValidUtf8(text)) Require(parsed.get_ref<const std::string&>() == text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  CheckString(text);
  const auto body = k3::ParseBody(text);
  const auto other = nlohmann::json::parse(text, nullptr, false);
  // Numbers beyond a double are the one thing that the other refuses besides.
  const bool plain_numbers = text.find_first_of("eE") == std::string_view::npos && size < 300;
  if (body.ok()) {
    Require(!plain_numbers || other.is_object());
  } else {
    RequireGoodError(body.status());
    // It lets a byte order mark pass and takes a NUL for the end.
    const bool marked = text.starts_with("\xEF\xBB\xBF") || text.find('\0') != std::string_view::npos;
    Require(!other.is_object() || marked || Depth(text) > 64);
    return 0;
  }
  for (const bool strict : {false, true}) {
    const k3::OpenAiOptions options{.vendor_strict = strict};
    const auto chat = k3::ParseChatRequest(*body, options);
    if (chat.ok()) {
      Require(chat->prompts.size() == 1 && chat->reply.choices_per_prompt >= 1);
    } else {
      RequireGoodError(chat.status());
    }
    const auto completion = k3::ParseCompletionRequest(*body, options);
    if (completion.ok()) {
      Require(!completion->prompts.empty());
    } else {
      RequireGoodError(completion.status());
    }
    const auto prompt = k3::ParseChatPrompt(*body, options);
    if (!prompt.ok()) RequireGoodError(prompt.status());
  }
  return 0;
}
