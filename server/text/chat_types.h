#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/text/json_value.h"

// A conversation as both front ends hand it over, before anything is known about the model's format. Fields follow the
// OpenAI names; what a request left out is empty.
namespace k3 {

struct ContentPart {
  std::string type = "text";  // others are refused by name: this build has no images
  std::string text;
};

struct ChatContent {
  enum class Form : uint8_t {
    kNone,   // missing or null
    kText,   // a string: exactly one text part
    kParts,  // a list
  };
  Form form = Form::kNone;
  std::vector<ContentPart> parts;

  static ChatContent Text(std::string text) { return {Form::kText, {{"text", std::move(text)}}}; }
};

struct ToolCall {
  std::string id;
  std::string name;
  // One of the two, or neither for no arguments: a string that should hold a JSON object, or the object itself.
  std::optional<std::string> arguments_text;
  std::optional<JsonValue> arguments;
};

struct ChatMessage {
  std::string role;  // system, developer, user, assistant, tool
  ChatContent content;
  std::string name;

  // assistant
  std::string reasoning_content;
  std::string reasoning;  // an alias, used when reasoning_content is empty
  std::vector<ToolCall> tool_calls;
  bool partial = false;  // of the last message: it is continued, not answered

  // tool
  std::optional<std::string> tool_call_id;
  std::optional<std::string> id;  // an alias, used when tool_call_id is absent
  std::string tool;               // the called function; else `name`

  // system: tools that join the conversation here (an array), or null
  JsonValue tools;
};

enum class Effort : uint8_t { kNone, kLow, kHigh, kMax };  // kNone: the prompt says nothing about it

enum class ToolChoice : uint8_t { kAuto, kNone, kRequired, kNamed };

enum class ResponseFormat : uint8_t { kText, kJsonObject, kJsonSchema };

struct ChatOptions {
  bool thinking = true;
  Effort effort = Effort::kNone;
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string tool_choice_name;  // kNamed
  ResponseFormat response_format = ResponseFormat::kText;
  JsonValue response_schema;  // kJsonSchema
  bool add_generation_prompt = true;
};

struct ChatRequest {
  std::vector<ChatMessage> messages;
  JsonValue tools;  // [{"type":"function","function":{...}}, ...] as sent, or null
  ChatOptions options;
};

}  // namespace k3
