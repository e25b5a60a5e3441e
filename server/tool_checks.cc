#include "server/tool_checks.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

constexpr size_t kMaxToolName = 64;
constexpr size_t kMaxTools = 1024;

bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

bool IsNameCharacter(char c) { return IsLetter(c) || (c >= '0' && c <= '9') || c == '_' || c == '-'; }

class ToolChecker {
 public:
  explicit ToolChecker(bool vendor_strict) : strict_(vendor_strict) {}

  absl::Status CheckList(const JsonValue& tools, const std::string& path) {
    if (tools.is_null()) return absl::OkStatus();
    if (!tools.is_array()) return FieldError(path, "expected an array");
    for (size_t i = 0; i < tools.items.size(); ++i) {
      const absl::Status status = CheckTool(tools.items[i], absl::StrCat(path, "[", i, "]"));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  bool empty() const { return names_.empty(); }
  bool Contains(const std::string& name) const { return names_.contains(name); }

 private:
  absl::Status CheckTool(const JsonValue& tool, const std::string& path) {
    if (!tool.is_object()) return FieldError(path, "expected an object");
    const JsonValue* type = tool.Find("type");
    if (type == nullptr || !type->is_string()) return FieldError(path + ".type", "must be \"function\"");
    if (type->text != "function") {
      return FieldError(path + ".type", absl::StrCat("\"", Excerpt(type->text),
                                                     "\" tools are not supported, only "
                                                     "\"function\""));
    }
    const std::string function_path = path + ".function";
    const JsonValue* function = tool.Find("function");
    if (function == nullptr || !function->is_object()) return FieldError(function_path, "expected an object");
    absl::Status status = CheckName(*function, function_path + ".name");
    if (!status.ok()) return status;
    const JsonValue* description = function->Find("description");
    if (description != nullptr && !description->is_null() && !description->is_string()) {
      return FieldError(function_path + ".description", "expected a string");
    }
    const JsonValue* strict = function->Find("strict");
    if (strict != nullptr && !strict->is_null() && !strict->is_bool()) {
      return FieldError(function_path + ".strict", "expected true or false");
    }
    return CheckParameters(*function, function_path + ".parameters");
  }

  absl::Status CheckName(const JsonValue& function, const std::string& path) {
    const JsonValue* name = function.Find("name");
    if (name == nullptr || !name->is_string() || name->text.empty()) return FieldError(path, "a tool needs a name");
    if (name->text.size() > kMaxToolName) {
      return FieldError(path, absl::StrCat("has ", name->text.size(), " characters; at most ", kMaxToolName));
    }
    const bool legal = std::all_of(name->text.begin(), name->text.end(), IsNameCharacter) &&
                       (!strict_ || IsLetter(name->text[0]) || name->text[0] == '_');
    if (!legal) {
      return FieldError(path,
                        absl::StrCat("\"", Excerpt(name->text), "\": a name consists of letters, digits, '_' and '-'",
                                     strict_ ? " and begins with a letter or '_'" : ""));
    }
    if (!names_.insert(name->text).second) {
      return FieldError(path, absl::StrCat("\"", name->text, "\" is the name of another tool"));
    }
    if (names_.size() > kMaxTools) return FieldError(path, absl::StrCat("more than ", kMaxTools, " tools"));
    return absl::OkStatus();
  }

  absl::Status CheckParameters(const JsonValue& function, const std::string& path) const {
    const JsonValue* parameters = function.Find("parameters");
    if (parameters == nullptr || parameters->is_null()) return absl::OkStatus();
    if (!parameters->is_object()) return FieldError(path, "expected a JSON schema object");
    const JsonValue* type = parameters->Find("type");
    if (type == nullptr && !strict_) return absl::OkStatus();
    if (type == nullptr || !type->is_string() || type->text != "object") {
      if (type == nullptr && parameters->keys.empty()) return absl::OkStatus();
      return FieldError(path + ".type", "must be \"object\"");
    }
    return absl::OkStatus();
  }

  const bool strict_;
  absl::flat_hash_set<std::string> names_;
};

bool HasContent(const ChatMessage& message) {
  return std::any_of(message.content.parts.begin(), message.content.parts.end(),
                     [](const ContentPart& part) { return !part.text.empty() || part.type != "text"; });
}

}  // namespace

absl::Status CheckTools(const ChatRequest& request, bool vendor_strict) {
  ToolChecker checker(vendor_strict);
  absl::Status status = checker.CheckList(request.tools, "tools");
  for (size_t i = 0; status.ok() && i < request.messages.size(); ++i) {
    const ChatMessage& message = request.messages[i];
    const std::string path = absl::StrCat("messages[", i, "]");
    if (!message.tools.is_null()) {
      if (message.role != "system" && message.role != "developer") {
        return FieldError(path + ".tools", "only a system message can bring tools");
      }
      if (vendor_strict && HasContent(message)) {
        return FieldError(path + ".content", "a message that brings tools has no content");
      }
      status = checker.CheckList(message.tools, path + ".tools");
    }
    if (vendor_strict && message.role == "tool" && message.tool_call_id.value_or("").empty()) {
      return FieldError(path + ".tool_call_id", "a tool result names the call that it answers");
    }
  }
  if (!status.ok()) return status;
  switch (request.options.tool_choice) {
    case ToolChoice::kRequired:
      if (checker.empty()) return FieldError("tool_choice", "\"required\" needs tools");
      break;
    case ToolChoice::kNamed:
      if (!checker.Contains(request.options.tool_choice_name)) {
        return FieldError("tool_choice",
                          absl::StrCat("there is no tool named \"", Excerpt(request.options.tool_choice_name), "\""));
      }
      break;
    case ToolChoice::kAuto:
    case ToolChoice::kNone:
      break;
  }
  return absl::OkStatus();
}

}  // namespace k3
