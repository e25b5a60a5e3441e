// Any text as a schema, a pattern or a grammar of a request: refused with its place, or compiled within seconds to
// masks that always leave a token to choose, whose choice is accepted.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "server/error_details.h"
#include "server/grammar/answer_grammar.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"

namespace {

void Require(bool condition, int line = __builtin_LINE()) {
  if (condition) return;
  std::fprintf(stderr, "line %d\n", line);
  std::abort();
}

k3::GenerationRequest Request(uint8_t kind, const std::string& text) {
  using Kind = k3::RequestedConstraint::Kind;
  constexpr Kind kKinds[] = {Kind::kJsonSchema, Kind::kRegex, Kind::kEbnf, Kind::kStructuralTag};
  k3::GenerationRequest request;
  k3::ChatRequest chat;
  chat.messages.emplace_back();
  chat.messages[0].role = "user";
  if (kind % 8 < 6) {
    request.constraint.kind = kKinds[kind % 8 < 3 ? 0 : kind % 8 - 2];
    request.constraint.text = text;
    request.constraint.strict = kind % 16 < 8;
  } else {
    // As the parameters of a tool that must be called.
    auto parameters = k3::ParseJson(text, {.max_depth = 64});
    k3::JsonValue function = k3::JsonValue::Object();
    function.Set("name", k3::JsonValue::String("f"));
    function.Set("parameters", parameters.ok() ? *std::move(parameters) : k3::JsonValue());
    function.Set("strict", k3::JsonValue::Bool(kind % 8 == 6));
    k3::JsonValue tool = k3::JsonValue::Object();
    tool.Set("type", k3::JsonValue::String("function"));
    tool.Set("function", std::move(function));
    chat.tools = k3::JsonValue::Array({std::move(tool)});
    chat.options.tool_choice = k3::ToolChoice::kRequired;
  }
  request.input = std::move(chat);
  return request;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto tokenizer = k3::Tokenizer::Load(std::string(K3_SOURCE_DIR) + "/configs/models/tiny-k3").value();
  if (size == 0) return 0;
  const k3::GenerationRequest request =
      Request(data[0], std::string(reinterpret_cast<const char*>(data + 1), size - 1));
  k3::ChatPrompt prompt;
  prompt.open_channel = k3::OpenChannel::kContent;
  const auto grammar = k3::BuildAnswerGrammar(request, *tokenizer, k3::ChatFormat::kXtml, &prompt);
  if (!grammar.ok()) {
    Require(grammar.status().code() == absl::StatusCode::kInvalidArgument);
    Require(!k3::FieldErrorPath(grammar.status()).empty() || !k3::DetailsOf(grammar.status()).fields.empty());
    return 0;
  }
  Require(grammar->has_value());
  std::string key;
  (*grammar)->root.AppendKey(&key);
  Require(!key.empty() && key.size() < 4096 * (size + 4096));
  return 0;
}
