#include "server/openai/reply_json.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "server/text/utf8.h"

namespace k3 {
namespace {

constexpr float kLeastLogprob = -9999.0f;

// Bytes that may need more than being copied: control characters, DEL, quote, backslash, and all non-ASCII leads of
// which a few are special.
constexpr std::array<bool, 256> MakeSpecial() {
  std::array<bool, 256> special{};
  for (int i = 0; i < 0x20; ++i) special[i] = true;
  special['"'] = true;
  special['\\'] = true;
  special[0x7F] = true;
  special[0xC2] = true;  // U+0085
  special[0xE2] = true;  // U+2028, U+2029
  return special;
}
constexpr std::array<bool, 256> kSpecial = MakeSpecial();

void AppendUnicodeEscape(uint32_t unit, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  const char text[6] = {'\\', 'u', kHex[unit >> 12 & 15], kHex[unit >> 8 & 15], kHex[unit >> 4 & 15], kHex[unit & 15]};
  out->append(text, 6);
}

// Appends the escape for what begins at `text` and returns its length in `text`.
size_t AppendEscaped(std::string_view text, std::string* out) {
  const auto byte = static_cast<uint8_t>(text[0]);
  switch (byte) {
    case '"':
      out->append("\\\"");
      return 1;
    case '\\':
      out->append("\\\\");
      return 1;
    case '\n':
      out->append("\\n");
      return 1;
    case '\r':
      out->append("\\r");
      return 1;
    case '\t':
      out->append("\\t");
      return 1;
    default:
      break;
  }
  if (text.starts_with("\xC2\x85")) {
    AppendUnicodeEscape(0x85, out);
    return 2;
  }
  if (text.starts_with("\xE2\x80\xA8") || text.starts_with("\xE2\x80\xA9")) {
    AppendUnicodeEscape(text[2] == '\xA8' ? 0x2028 : 0x2029, out);
    return 3;
  }
  if (byte < 0x80) {
    AppendUnicodeEscape(byte, out);
  } else {
    out->push_back(text[0]);
  }
  return 1;
}

}  // namespace

void AppendJsonString(std::string_view text, std::string* out) {
  std::string repaired;
  if (!IsValidUtf8(text)) {
    repaired = SanitizeUtf8(text);
    text = repaired;
  }
  out->push_back('"');
  size_t plain = 0;
  for (size_t i = 0; i < text.size();) {
    if (!kSpecial[static_cast<uint8_t>(text[i])]) {
      ++i;
      continue;
    }
    out->append(text, plain, i - plain);
    i += AppendEscaped(text.substr(i), out);
    plain = i;
  }
  out->append(text, plain);
  out->push_back('"');
}

std::string JsonString(std::string_view text) {
  std::string out;
  AppendJsonString(text, &out);
  return out;
}

void AppendInteger(int64_t value, std::string* out) {
  char text[24];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  out->append(text, end - text);
}

void AppendFloat(float value, std::string* out) {
  if (std::isnan(value) || value < kLeastLogprob) value = kLeastLogprob;
  if (std::isinf(value)) value = std::numeric_limits<float>::max();
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  const std::string_view written(text, end - text);
  out->append(written);
  // So that typed clients read a float.
  if (written.find_first_of(".e") == std::string_view::npos) out->append(".0");
}

}  // namespace k3
