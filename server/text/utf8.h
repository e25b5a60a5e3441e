#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

// UTF-8 as Unicode defines it: no surrogates, no overlong forms, nothing above U+10FFFF.
namespace k3 {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

struct Utf8Char {
  uint32_t code_point = 0;
  int length = 0;  // bytes; 0 where no valid character starts
};

// The character at the start of `text`, which may not be empty.
Utf8Char DecodeUtf8(std::string_view text);

// Bytes of the longest valid prefix; text.size() when all of it is valid.
size_t ValidUtf8Prefix(std::string_view text);
inline bool IsValidUtf8(std::string_view text) { return ValidUtf8Prefix(text) == text.size(); }

void AppendUtf8(uint32_t code_point, std::string* out);

// Turns bytes that arrive in any pieces into valid UTF-8: a character is released when its last byte is there, and each
// maximal ill-formed subpart becomes one U+FFFD. The joined output does not depend on how the input was cut.
class Utf8Stream {
 public:
  void Append(std::string_view bytes, std::string* out);
  // At the end of the input: a character that was cut short becomes one U+FFFD.
  void Flush(std::string* out);
  bool HasPending() const { return pending_size_ > 0; }
  std::string_view pending() const { return {pending_, static_cast<size_t>(pending_size_)}; }

 private:
  void AppendByte(uint8_t byte, std::string* out);

  char pending_[4];
  int pending_size_ = 0;
  int needed_ = 0;  // continuation bytes still missing
  // Range of the next continuation byte: narrower than 80..BF after some lead bytes.
  uint8_t lower_ = 0x80;
  uint8_t upper_ = 0xBF;
};

// `bytes` with every ill-formed subpart replaced: what a Utf8Stream makes of it.
std::string SanitizeUtf8(std::string_view bytes);

}  // namespace k3
