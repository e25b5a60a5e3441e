#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace k3 {

// A forward-only reader over JSON text, for files with hundreds of thousands of entries that must not become a tree of
// objects: safetensors headers and their index. Every read returns false at the first thing that is not there; error()
// then says what was expected at which byte. Never recurses, never reads outside the text.
class JsonCursor {
 public:
  explicit JsonCursor(std::string_view text) : text_(text) {}

  // Skips white space, then takes `c` if it is next.
  bool Take(char c);
  bool Expect(char c);
  // A string. `out` points into the text, or into this object until the next call when the text held escapes.
  bool String(std::string_view* out);
  // A non-negative integer without fraction or exponent, at most 2^64 - 1.
  bool Unsigned(uint64_t* out);
  // Any value, at most `max_depth` brackets deep, without looking into it beyond finding its end.
  bool SkipValue(int max_depth);
  // Only white space is left.
  bool AtEnd();

  // What stands at the cursor, shortened, for messages.
  std::string Here() const;
  size_t offset() const { return pos_; }
  const std::string& error() const { return error_; }

 private:
  void SkipSpace();
  bool Fail(const std::string& expected);
  bool Escape();

  std::string_view text_;
  size_t pos_ = 0;
  std::string unescaped_;
  std::string error_;
};

}  // namespace k3
