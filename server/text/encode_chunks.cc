#include "server/text/encode_chunks.h"

#include <array>

#include "server/text/utf8.h"

namespace k3 {
namespace {

constexpr std::array<bool, 128> MakeAsciiSpace() {
  std::array<bool, 128> table{};
  for (int c = 0x09; c <= 0x0D; ++c) table[c] = true;
  for (int c = 0x1C; c <= 0x20; ++c) table[c] = true;
  return table;
}
constexpr std::array<bool, 128> kAsciiSpace = MakeAsciiSpace();

}  // namespace

bool IsPythonSpace(char32_t c) {
  if (c < 0x80) return kAsciiSpace[c];
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

bool IsPythonBlank(std::string_view text) {
  while (!text.empty()) {
    const Utf8Char c = DecodeUtf8(text);
    if (c.length == 0 || !IsPythonSpace(c.code_point)) return false;
    text.remove_prefix(c.length);
  }
  return true;
}

bool EncodeChunks::Next(std::string_view* chunk) {
  if (position_ == text_.size()) return false;
  const size_t begin = position_;
  if (begin == 0 && text_.size() <= kMaxRun) {
    position_ = text_.size();
    *chunk = text_;
    return true;
  }
  while (position_ < text_.size()) {
    const auto byte = static_cast<uint8_t>(text_[position_]);
    int length = 1;
    bool is_space;
    if (byte < 0x80) {
      is_space = kAsciiSpace[byte];
    } else {
      const Utf8Char c = DecodeUtf8(text_.substr(position_));
      if (c.length > 0) length = c.length;
      is_space = c.length > 0 && IsPythonSpace(c.code_point);
    }
    if (slice_chars_ == kMaxChars) {
      slice_chars_ = run_chars_ = 0;  // both counts start afresh in the next slice
      break;
    }
    if (run_chars_ > 0 && is_space == run_is_space_) {
      if (run_chars_ == kMaxRun) {
        run_chars_ = 0;
        break;
      }
      ++run_chars_;
    } else {
      run_chars_ = 1;
      run_is_space_ = is_space;
    }
    ++slice_chars_;
    position_ += length;
  }
  *chunk = text_.substr(begin, position_ - begin);
  return true;
}

}  // namespace k3
