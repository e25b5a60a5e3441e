#pragma once

#include <cstddef>
#include <string_view>

namespace k3 {

// The cuts that the released tokenizer makes before it splits and merges: every 400,000 characters, and within those
// wherever a run of white space, or of anything else, goes beyond 25,000 characters. The cuts change the ids of long
// inputs, so they are part of the format.
//
// Characters are code points (a byte outside valid UTF-8 counts as one); white space is what Python's str.isspace says,
// which is not the split pattern's \s.
class EncodeChunks {
 public:
  static constexpr size_t kMaxChars = 400'000;
  static constexpr size_t kMaxRun = 25'000;

  // `valid_utf8`: the text is known to be, which allows to look at a few bytes only.
  explicit EncodeChunks(std::string_view text, bool valid_utf8 = false) : text_(text), valid_utf8_(valid_utf8) {}

  // False at the end; an empty text has no chunk.
  bool Next(std::string_view* chunk);

 private:
  void BeginSlice();

  std::string_view text_;
  bool valid_utf8_;
  size_t position_ = 0;
  size_t slice_end_ = 0;            // next cut at kMaxChars
  bool slice_may_have_run_ = true;  // beyond kMaxRun
};

bool IsPythonSpace(char32_t c);
// Whether str.strip would leave nothing of this UTF-8 text.
bool IsPythonBlank(std::string_view text);

}  // namespace k3
