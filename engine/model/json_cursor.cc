#include "engine/model/json_cursor.h"

#include "absl/strings/str_cat.h"
#include "engine/model/name_list.h"

namespace k3 {
namespace {

bool IsSpace(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

void AppendUtf8(uint32_t code, std::string& out) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xc0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xe0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (code & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3f));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (code & 0x3f));
  }
}

// Four hex digits at text[pos], or -1.
int32_t Hex4(std::string_view text, size_t pos) {
  if (text.size() < 4 || pos > text.size() - 4) return -1;
  int32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    const int digit = HexDigit(text[pos + i]);
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

}  // namespace

void JsonCursor::SkipSpace() {
  while (pos_ < text_.size() && IsSpace(text_[pos_])) ++pos_;
}

std::string JsonCursor::Here() const {
  if (pos_ >= text_.size()) return "the end of the text";
  return absl::StrCat("'", EscapeName(text_.substr(pos_, 24)), "'");
}

bool JsonCursor::Fail(const std::string& expected) {
  error_ = absl::StrCat("expected ", expected, " at byte ", pos_, ", found ", Here());
  return false;
}

bool JsonCursor::Take(char c) {
  SkipSpace();
  if (pos_ >= text_.size() || text_[pos_] != c) return false;
  ++pos_;
  return true;
}

bool JsonCursor::Expect(char c) { return Take(c) || Fail(absl::StrCat("'", std::string(1, c), "'")); }

bool JsonCursor::AtEnd() {
  SkipSpace();
  return pos_ == text_.size() || Fail("the end of the text");
}

bool JsonCursor::Escape() {
  ++pos_;  // the backslash
  if (pos_ >= text_.size()) return Fail("an escape");
  const char c = text_[pos_];
  switch (c) {
    case '"':
    case '\\':
    case '/':
      unescaped_ += c;
      break;
    case 'b':
      unescaped_ += '\b';
      break;
    case 'f':
      unescaped_ += '\f';
      break;
    case 'n':
      unescaped_ += '\n';
      break;
    case 'r':
      unescaped_ += '\r';
      break;
    case 't':
      unescaped_ += '\t';
      break;
    case 'u': {
      const int32_t unit = Hex4(text_, pos_ + 1);
      if (unit < 0) return Fail("four hex digits");
      pos_ += 4;
      uint32_t code = static_cast<uint32_t>(unit);
      if (code >= 0xd800 && code < 0xdc00 && text_.substr(pos_ + 1, 2) == "\\u") {
        const int32_t low = Hex4(text_, pos_ + 3);
        if (low >= 0xdc00 && low < 0xe000) {
          code = 0x10000 + ((code - 0xd800) << 10) + (static_cast<uint32_t>(low) - 0xdc00);
          pos_ += 6;
        }
      }
      if (code >= 0xd800 && code < 0xe000) return Fail("a pair of surrogates");
      AppendUtf8(code, unescaped_);
      break;
    }
    default:
      return Fail("an escape");
  }
  ++pos_;
  return true;
}

bool JsonCursor::String(std::string_view* out) {
  SkipSpace();
  if (pos_ >= text_.size() || text_[pos_] != '"') return Fail("a string");
  const size_t begin = ++pos_;
  bool escaped = false;
  while (pos_ < text_.size()) {
    const char c = text_[pos_];
    if (c == '"') {
      *out = escaped ? std::string_view(unescaped_) : text_.substr(begin, pos_ - begin);
      ++pos_;
      return true;
    }
    if (static_cast<unsigned char>(c) < 0x20) return Fail("no control character in a string");
    if (c == '\\') {
      if (!escaped) unescaped_.assign(text_.substr(begin, pos_ - begin));
      escaped = true;
      if (!Escape()) return false;
    } else {
      if (escaped) unescaped_ += c;
      ++pos_;
    }
  }
  return Fail("the end of a string");
}

bool JsonCursor::Unsigned(uint64_t* out) {
  SkipSpace();
  const size_t begin = pos_;
  uint64_t value = 0;
  size_t pos = pos_;
  while (pos < text_.size() && IsDigit(text_[pos])) {
    if (__builtin_mul_overflow(value, uint64_t{10}, &value) ||
        __builtin_add_overflow(value, static_cast<uint64_t>(text_[pos] - '0'), &value)) {
      return Fail("a non-negative integer below 2^64");
    }
    ++pos;
  }
  const bool fraction = pos < text_.size() && (text_[pos] == '.' || text_[pos] == 'e' || text_[pos] == 'E');
  if (pos == begin || fraction || (text_[begin] == '0' && pos > begin + 1)) return Fail("a non-negative integer");
  pos_ = pos;
  *out = value;
  return true;
}

bool JsonCursor::SkipValue(int max_depth) {
  int depth = 0;
  do {
    SkipSpace();
    if (pos_ >= text_.size()) return Fail("a value");
    const char c = text_[pos_];
    if (c == '"') {
      std::string_view ignored;
      if (!String(&ignored)) return false;
    } else if (c == '{' || c == '[') {
      if (++depth > max_depth) return Fail(absl::StrCat("at most ", max_depth, " nested brackets"));
      ++pos_;
    } else if (c == '}' || c == ']') {
      if (--depth < 0) return Fail("a value");
      ++pos_;
    } else if (c == ',' || c == ':') {
      if (depth == 0) return Fail("a value");
      ++pos_;
    } else {
      const size_t begin = pos_;
      while (pos_ < text_.size() &&
             (IsDigit(text_[pos_]) || (text_[pos_] >= 'a' && text_[pos_] <= 'z') || text_[pos_] == '-' ||
              text_[pos_] == '+' || text_[pos_] == '.' || text_[pos_] == 'E')) {
        ++pos_;
      }
      if (pos_ == begin) return Fail("a value");
    }
  } while (depth > 0);
  return true;
}

}  // namespace k3
