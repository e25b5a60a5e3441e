#include "server/grammar/answer_grammar.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/grammar/argument_grammar.h"
#include "server/grammar/enforceable_schema.h"
#include "server/grammar/length_limits.h"
#include "server/grammar/pattern_check.h"
#include "server/grammar/schema_check.h"
#include "server/grammar/schema_strict.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"
#include "server/text/json_writer.h"

namespace k3 {
namespace {

constexpr size_t kMaxGrammarText = 256 << 10;

struct Tool {
  std::string name;
  std::string path;      // of its parameters
  JsonValue parameters;  // null: none declared, or not to be looked at
  bool strict = false;
};

// Of a list that CheckTools passed.
void AppendTools(const JsonValue& list, const std::string& path, std::vector<Tool>* tools) {
  for (size_t i = 0; list.is_array() && i < list.items.size(); ++i) {
    const JsonValue* function = list.items[i].Find("function");
    Tool& tool = tools->emplace_back();
    tool.name = function->Find("name")->text;
    tool.path = absl::StrCat(path, "[", i, "].function.parameters");
    if (const JsonValue* parameters = function->Find("parameters")) tool.parameters = *parameters;
    if (tool.parameters.is_object() && tool.parameters.keys.empty()) tool.parameters = JsonValue();
    const JsonValue* strict = function->Find("strict");
    tool.strict = strict != nullptr && strict->is_bool() && strict->boolean;
  }
}

std::vector<Tool> ToolsOf(const ChatRequest& chat) {
  std::vector<Tool> tools;
  AppendTools(chat.tools, "tools", &tools);
  for (size_t i = 0; i < chat.messages.size(); ++i) {
    AppendTools(chat.messages[i].tools, absl::StrCat("messages[", i, "].tools"), &tools);
  }
  return tools;
}

// Arguments are an object, also where their schema does not say so or allows more.
void AsObject(JsonValue* parameters) {
  if (!parameters->is_object()) return;
  for (const char* key : {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}) {
    if (parameters->Find(key) != nullptr) return;
  }
  const JsonValue* type = parameters->Find("type");
  const bool list =
      type != nullptr && type->is_array() &&
      std::any_of(type->items.begin(), type->items.end(), [](const JsonValue& t) { return t.text == "object"; });
  if (type == nullptr || list) parameters->Set("type", JsonValue::String("object"));
}

std::vector<int32_t> ControlTokens(const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  for (int32_t id = tokenizer.num_ranks(); id < tokenizer.vocab_size(); ++id) ids.push_back(id);
  return ids;
}

// Strict says so in the answer's words; a schema that is not strict loses what cannot be enforced.
absl::StatusOr<GrammarNode> SchemaNode(const RequestedConstraint& constraint, const std::string& path, bool compact) {
  const absl::StatusOr<JsonValue> schema = SchemaOf(constraint);
  if (!schema.ok()) return schema.status();
  const absl::Status status = CheckSchema(*schema, path, constraint.strict);
  if (!status.ok()) return status;
  const absl::StatusOr<JsonValue> enforceable = EnforceableSchema(*schema, path, constraint.strict);
  if (!enforceable.ok()) return enforceable.status();
  return GrammarNode::JsonSchema(WriteJson(*enforceable, {.number_as_written = true}), compact);
}

absl::StatusOr<GrammarNode> ConstraintNode(const RequestedConstraint& constraint, const std::string& path) {
  using Kind = RequestedConstraint::Kind;
  if (constraint.text.size() > 2 * kMaxGrammarText) {
    return InvalidField(path, absl::StrCat("has ", constraint.text.size(), " bytes; at most ", 2 * kMaxGrammarText));
  }
  const bool written = constraint.kind != Kind::kJsonObject && constraint.kind != Kind::kNone;
  if (written && constraint.text.empty()) return InvalidField(path, "is empty: says nothing about the answer");
  switch (constraint.kind) {
    case Kind::kJsonObject:
      return GrammarNode::JsonSchema(R"({"type":"object","additionalProperties":true})", /*compact=*/true);
    case Kind::kJsonSchema:
      return SchemaNode(constraint, path, /*compact=*/true);
    case Kind::kRegex: {
      const absl::Status status = CheckPattern(constraint.text, path, /*strict=*/true);
      if (!status.ok()) return status;
      if (const auto count = AnyCharacters(constraint.text)) {
        const LengthLimit limit = {.least = count->least, .most = count->most, .json = false};
        return GrammarNode::Of(GrammarNode::Kind::kEbnf, limit.Grammar(R"([^\\n])"));
      }
      return GrammarNode::Of(GrammarNode::Kind::kRegex, AsciiPattern(constraint.text));
    }
    case Kind::kEbnf:
      return GrammarNode::Foreign(GrammarNode::Kind::kEbnf, constraint.text);
    case Kind::kStructuralTag:
      return GrammarNode::Foreign(GrammarNode::Kind::kStructuralTag, constraint.text);
    case Kind::kNone:
      break;
  }
  return InvalidField(path, "says nothing about the answer");
}

// The answers of one chat format, whose parts differ in their markup only.
class AnswerBuilder {
 public:
  AnswerBuilder(const Tokenizer& tokenizer, ChatFormat format, const ChatPrompt& prompt, bool parallel)
      : tokenizer_(tokenizer), format_(format), prompt_(prompt), parallel_(parallel), free_(ControlTokens(tokenizer)) {}

  // `content`: what the response must be, if anything. `tools`: may be called; none: no call is possible.
  GrammarNode Build(const std::optional<GrammarNode>& content, const std::vector<Tool>& tools, bool must_call,
                    bool relaxed) const {
    return format_ == ChatFormat::kXtml ? XtmlAnswer(content, tools, must_call, relaxed)
                                        : K2Answer(content, tools, must_call, relaxed);
  }

 private:
  GrammarNode Free() const { return GrammarNode::AnyTokens(free_); }
  GrammarNode Token(const char* name) const { return GrammarNode::Token(tokenizer_.SpecialId(name).value()); }

  GrammarNode Calls(std::vector<GrammarNode> calls) const {
    GrammarNode one = calls.size() == 1 ? std::move(calls[0]) : GrammarNode::Choice(std::move(calls));
    return parallel_ ? GrammarNode::OneOrMore(std::move(one)) : std::move(one);
  }

  // The markup as the renderer writes it in the history: think, response, tools, end of message.
  GrammarNode XtmlAnswer(const std::optional<GrammarNode>& content, const std::vector<Tool>& tools, bool must_call,
                         bool relaxed) const {
    const XtmlTokens tokens = {*tokenizer_.SpecialId("<|open|>"), *tokenizer_.SpecialId("<|close|>"),
                               *tokenizer_.SpecialId("<|sep|>")};
    std::vector<GrammarNode> parts;
    const bool thinking = prompt_.open_channel == OpenChannel::kReasoning;
    if (thinking) {
      parts.push_back(Free());
      parts.push_back(XtmlClose(tokens, "think"));
    }
    const auto response = [&](GrammarNode body) {
      std::vector<GrammarNode> channel;
      if (thinking) channel.push_back(XtmlOpen(tokens, "response"));
      channel.push_back(std::move(body));
      channel.push_back(XtmlClose(tokens, "response"));
      return GrammarNode::Sequence(std::move(channel));
    };
    const auto calls = [&] {
      std::vector<GrammarNode> each;
      for (const Tool& tool : tools) {
        const JsonValue none;
        each.push_back(GrammarNode::Sequence(
            {GrammarNode::Token(tokens.open),
             GrammarNode::Literal(absl::StrCat("call tool=\"", tool.name, "\" index=\"")),
             GrammarNode::Of(GrammarNode::Kind::kRegex, "[1-9][0-9]{0,2}"), GrammarNode::Literal("\""),
             GrammarNode::Token(tokens.separator),
             XtmlArguments(tokens, relaxed && !tool.strict ? none : tool.parameters), XtmlClose(tokens, "call")}));
      }
      return GrammarNode::Sequence({XtmlOpen(tokens, "tools"), Calls(std::move(each)), XtmlClose(tokens, "tools")});
    };
    if (tools.empty()) {
      parts.push_back(response(content.value_or(Free())));
    } else if (!content.has_value()) {
      parts.push_back(response(Free()));
      parts.push_back(must_call ? calls() : GrammarNode::Optional(calls()));
    } else {
      // Either the wanted text, after which calls may come, or calls alone.
      GrammarNode silent = GrammarNode::Sequence({response(GrammarNode::Literal("")), calls()});
      if (must_call) {
        parts.push_back(std::move(silent));
      } else {
        parts.push_back(GrammarNode::Choice(
            {GrammarNode::Sequence({response(*content), GrammarNode::Optional(calls())}), std::move(silent)}));
      }
    }
    parts.push_back(XtmlClose(tokens, "message"));
    return GrammarNode::Sequence(std::move(parts));
  }

  GrammarNode K2Answer(const std::optional<GrammarNode>& content, const std::vector<Tool>& tools, bool must_call,
                       bool relaxed) const {
    if (tools.empty()) return content.value_or(Free());
    std::vector<GrammarNode> each;
    for (const Tool& tool : tools) {
      std::string schema = R"({"type":"object","additionalProperties":true})";
      if (tool.parameters.is_object() && (tool.strict || !relaxed)) {
        schema = WriteJson(tool.parameters, {.number_as_written = true});
      }
      each.push_back(GrammarNode::Sequence(
          {Token("<|tool_call_begin|>"), GrammarNode::Literal(absl::StrCat("functions.", tool.name, ":")),
           GrammarNode::Of(GrammarNode::Kind::kRegex, "0|[1-9][0-9]{0,3}"), Token("<|tool_call_argument_begin|>"),
           GrammarNode::JsonSchema(std::move(schema), /*compact=*/false), Token("<|tool_call_end|>")}));
    }
    GrammarNode section = GrammarNode::Sequence(
        {Token("<|tool_calls_section_begin|>"), Calls(std::move(each)), Token("<|tool_calls_section_end|>")});
    if (!content.has_value()) {
      return GrammarNode::Sequence(
          {Free(), must_call ? std::move(section) : GrammarNode::Optional(std::move(section))});
    }
    if (must_call) return section;
    return GrammarNode::Choice({GrammarNode::Sequence({*content, GrammarNode::Optional(section)}), section});
  }

  const Tokenizer& tokenizer_;
  const ChatFormat format_;
  const ChatPrompt& prompt_;
  const bool parallel_;
  const std::vector<int32_t> free_;  // what free text leaves out
};

std::string PathOf(const RequestedConstraint& constraint) {
  using Kind = RequestedConstraint::Kind;
  if (!constraint.path.empty()) return constraint.path;
  switch (constraint.kind) {
    case Kind::kJsonSchema:
      return "constraint.json_schema";
    case Kind::kRegex:
      return "constraint.regex";
    case Kind::kEbnf:
      return "constraint.ebnf";
    case Kind::kJsonObject:
      return "constraint.json_object";
    case Kind::kStructuralTag:
      return "constraint.structural_tag";
    case Kind::kNone:
      break;
  }
  return "constraint";
}

}  // namespace

absl::StatusOr<JsonValue> SchemaOf(const RequestedConstraint& constraint) {
  const std::string path = PathOf(constraint);
  if (constraint.text.empty()) return InvalidField(path, "is empty: says nothing about the answer");
  absl::StatusOr<JsonValue> schema = ParseJson(constraint.text, {.max_depth = 128, .max_values = 200'000});
  if (schema.ok()) return schema;
  return InvalidField(path, absl::StrCat("expected a JSON schema, not the text \"", Excerpt(constraint.text, 60),
                                         "\": ", std::string(schema.status().message())));
}

absl::StatusOr<std::optional<AnswerGrammar>> BuildAnswerGrammar(const GenerationRequest& request,
                                                                const Tokenizer& tokenizer, ChatFormat format,
                                                                const ChatPrompt* prompt) {
  AnswerGrammar answer;
  const bool constrained = request.constraint.kind != RequestedConstraint::Kind::kNone;
  std::optional<GrammarNode> content;
  if (constrained) {
    answer.path = PathOf(request.constraint);
    absl::StatusOr<GrammarNode> node = ConstraintNode(request.constraint, answer.path);
    if (!node.ok()) return node.status();
    content = *std::move(node);
  }
  const auto* chat = std::get_if<ChatRequest>(&request.input);
  if (chat == nullptr || prompt == nullptr) {
    if (!constrained) return std::nullopt;
    answer.root = *std::move(content);
    return answer;
  }

  std::vector<Tool> tools = ToolsOf(*chat);
  const ToolChoice choice = chat->options.tool_choice;
  const bool must_call = choice == ToolChoice::kRequired || choice == ToolChoice::kNamed;
  const bool forbidden = choice == ToolChoice::kNone && !tools.empty();
  if (forbidden) tools.clear();
  if (choice == ToolChoice::kNamed) {
    std::erase_if(tools, [&](const Tool& tool) { return tool.name != chat->options.tool_choice_name; });
  }
  const bool strict = std::any_of(tools.begin(), tools.end(), [](const Tool& tool) { return tool.strict; });
  if (!constrained && !must_call && !strict && !forbidden) return std::nullopt;
  if (prompt->open_channel == OpenChannel::kNone) {
    return FieldError("add_generation_prompt", "must be true when the form of the answer is constrained");
  }

  bool loose = false;  // some schema is followed although it need not be
  for (Tool& tool : tools) {
    if (tool.parameters.is_null()) continue;
    if (!tool.strict && !must_call) {
      tool.parameters = JsonValue();
      continue;
    }
    AsObject(&tool.parameters);
    absl::Status status = CheckSchema(tool.parameters, tool.path, tool.strict);
    if (status.ok() && tool.strict) {
      status = CheckArgumentsEnforced(tool.parameters, tool.path, /*elements=*/format == ChatFormat::kXtml);
    }
    if (status.ok()) {
      absl::StatusOr<JsonValue> enforceable = EnforceableSchema(tool.parameters, tool.path, tool.strict);
      status = enforceable.status();
      if (status.ok()) tool.parameters = *std::move(enforceable);
    }
    if (status.ok() && format == ChatFormat::kXtml && !XtmlArgumentsFit(tool.parameters)) {
      status =
          FieldError(tool.path, "fits no arguments, or becomes too large when its references and numbers are followed");
    }
    if (tool.strict && !status.ok()) return status;
    if (!status.ok()) tool.parameters = JsonValue();
    loose = loose || !tool.strict;
  }
  if (const ChatMessage& last = chat->messages.back(); constrained && last.partial) {
    for (const ContentPart& part : last.content.parts) answer.begun += part.text;
  }
  if (answer.path.empty()) answer.path = strict ? "tools" : "tool_choice";
  const AnswerBuilder builder(tokenizer, format, *prompt, request.parallel_tool_calls);
  answer.root = builder.Build(content, tools, must_call, /*relaxed=*/false);
  if (loose) answer.relaxed = builder.Build(content, tools, must_call, /*relaxed=*/true);
  return answer;
}

}  // namespace k3
