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

struct CharKind {
  size_t length;
  bool is_space;
};

CharKind KindAt(std::string_view text, size_t at) {
  const auto byte = static_cast<uint8_t>(text[at]);
  if (byte < 0x80) return {1, kAsciiSpace[byte]};
  const Utf8Char c = DecodeUtf8(text.substr(at));
  if (c.length == 0) return {1, false};
  return {static_cast<size_t>(c.length), IsPythonSpace(c.code_point)};
}

// Where `count` characters of valid UTF-8 end.
size_t SkipChars(std::string_view text, size_t count) {
  if (text.size() <= count) return text.size();
  constexpr size_t kBlock = 4096;
  size_t at = 0;
  const auto starts_char = [&](size_t i) { return static_cast<int8_t>(text[i]) >= -64; };
  while (at + kBlock <= text.size()) {
    size_t starts = 0;
    for (size_t i = at; i < at + kBlock; ++i) starts += starts_char(i) ? 1 : 0;
    if (starts > count) break;
    count -= starts;
    at += kBlock;
  }
  for (; at < text.size(); ++at) {
    if (starts_char(at) && count-- == 0) break;
  }
  return at;
}

// False when no run goes beyond kMaxRun. Such a run would cover the whole way between two marks of half that distance,
// and near a mark one usually sees a few bytes on that it does not.
bool MayHaveLongRun(std::string_view text) {
  constexpr size_t kDistance = EncodeChunks::kMaxRun / 2;
  for (size_t mark = 0; mark + kDistance < text.size(); mark += kDistance) {
    size_t at = mark;
    while (at < text.size() && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) ++at;
    bool one_kind = true;
    if (at < text.size()) {
      const bool is_space = KindAt(text, at).is_space;
      while (one_kind && at < mark + kDistance) {
        const CharKind kind = KindAt(text, at);
        one_kind = kind.is_space == is_space;
        at += kind.length;
      }
    }
    if (one_kind) return true;
  }
  return false;
}

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

void EncodeChunks::BeginSlice() {
  const std::string_view rest = text_.substr(position_);
  if (rest.size() <= kMaxRun) {
    slice_end_ = text_.size();
    slice_may_have_run_ = false;
  } else if (valid_utf8_) {
    slice_end_ = position_ + SkipChars(rest, kMaxChars);
    slice_may_have_run_ = MayHaveLongRun(text_.substr(position_, slice_end_ - position_));
  } else {
    size_t end = 0;
    for (size_t chars = 0; end < rest.size() && chars < kMaxChars; ++chars) end += KindAt(rest, end).length;
    slice_end_ = position_ + end;
    slice_may_have_run_ = true;
  }
}

bool EncodeChunks::Next(std::string_view* chunk) {
  if (position_ == slice_end_) {
    if (position_ == text_.size()) return false;
    BeginSlice();
  }
  const size_t begin = position_;
  if (!slice_may_have_run_) {
    position_ = slice_end_;
  } else {
    size_t run = 0;
    bool run_is_space = false;
    while (position_ < slice_end_) {
      const CharKind kind = KindAt(text_, position_);
      if (run > 0 && kind.is_space == run_is_space) {
        if (run == kMaxRun) break;
        ++run;
      } else {
        run = 1;
        run_is_space = kind.is_space;
      }
      position_ += kind.length;
    }
  }
  *chunk = text_.substr(begin, position_ - begin);
  return true;
}

}  // namespace k3
