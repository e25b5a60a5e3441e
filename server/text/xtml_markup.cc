#include "server/text/xtml_markup.h"

#include "absl/strings/str_replace.h"

namespace k3 {

std::string XtmlAttribute(std::string_view value) {
  return absl::StrReplaceAll(std::string(value), {{"&", "&amp;"}, {"\"", "&quot;"}});
}

const char* XtmlType(const JsonValue& value) {
  switch (value.kind) {
    case JsonValue::Kind::kNull:
      return "null";
    case JsonValue::Kind::kBool:
      return "boolean";
    case JsonValue::Kind::kInteger:
    case JsonValue::Kind::kFloat:
      return "number";
    case JsonValue::Kind::kString:
      return "string";
    case JsonValue::Kind::kArray:
      return "array";
    case JsonValue::Kind::kObject:
      break;
  }
  return "object";
}

}  // namespace k3
