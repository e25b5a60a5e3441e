#include "server/text/json_writer.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

void AppendNumber(const JsonValue& value, const JsonStyle& style, std::string* out) {
  if (style.number_as_written) {
    *out += value.text;
  } else if (value.kind == JsonValue::Kind::kInteger) {
    *out += value.text == "-0" ? "0" : value.text;
  } else {
    *out += PythonFloat(value.AsDouble());
  }
}

void AppendString(std::string_view text, std::string* out) {
  out->push_back('"');
  AppendJsonEscaped(text, out);
  out->push_back('"');
}

void Append(const JsonValue& value, const JsonStyle& style, std::string* out) {
  const char* const comma = style.spaces ? ", " : ",";
  switch (value.kind) {
    case JsonValue::Kind::kNull:
      *out += "null";
      break;
    case JsonValue::Kind::kBool:
      *out += value.boolean ? "true" : "false";
      break;
    case JsonValue::Kind::kInteger:
    case JsonValue::Kind::kFloat:
      AppendNumber(value, style, out);
      break;
    case JsonValue::Kind::kString:
      AppendString(value.text, out);
      break;
    case JsonValue::Kind::kArray:
      out->push_back('[');
      for (size_t i = 0; i < value.items.size(); ++i) {
        if (i > 0) *out += comma;
        Append(value.items[i], style, out);
      }
      out->push_back(']');
      break;
    case JsonValue::Kind::kObject: {
      std::vector<size_t> order(value.keys.size());
      std::iota(order.begin(), order.end(), size_t{0});
      if (style.sort_keys) {  // UTF-8 sorts by bytes as it does by code points
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return value.keys[a] < value.keys[b]; });
      }
      out->push_back('{');
      for (size_t i = 0; i < order.size(); ++i) {
        if (i > 0) *out += comma;
        AppendString(value.keys[order[i]], out);
        *out += style.spaces ? ": " : ":";
        Append(value.items[order[i]], style, out);
      }
      out->push_back('}');
      break;
    }
  }
}

}  // namespace

std::string WriteJson(const JsonValue& value, const JsonStyle& style) {
  std::string out;
  Append(value, style, &out);
  return out;
}

void AppendJsonEscaped(std::string_view text, std::string* out) {
  size_t plain = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
    out->append(text.substr(plain, i - plain));
    plain = i + 1;
    switch (byte) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      case '\b':
        *out += "\\b";
        break;
      case '\f':
        *out += "\\f";
        break;
      default:
        absl::StrAppend(out, "\\u", absl::Hex(byte, absl::kZeroPad4));
    }
  }
  out->append(text.substr(plain));
}

std::string PythonFloat(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, end - buffer);  // d[.ddd]e[+-]dd
  const size_t e = text.find('e');
  int exponent = 0;
  const size_t sign = text[e + 1] == '+' ? 2 : 1;
  std::from_chars(text.data() + e + sign, text.data() + text.size(), exponent);
  std::string result = text[0] == '-' ? "-" : "";
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits.push_back(c);
  }

  const auto count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    result += digits.substr(0, 1);
    if (count > 1) absl::StrAppend(&result, ".", digits.substr(1));
    absl::StrAppend(&result, "e", exponent < 0 ? "-" : "+", std::abs(exponent) < 10 ? "0" : "", std::abs(exponent));
  } else if (exponent < 0) {
    absl::StrAppend(&result, "0.", std::string(-exponent - 1, '0'), digits);
  } else if (count <= exponent + 1) {
    absl::StrAppend(&result, digits, std::string(exponent + 1 - count, '0'), ".0");
  } else {
    absl::StrAppend(&result, digits.substr(0, exponent + 1), ".", digits.substr(exponent + 1));
  }
  return result;
}

}  // namespace k3
