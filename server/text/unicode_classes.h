#pragma once

#include <cstdint>
#include <span>

// What the split pattern can see of a character, as one printable byte. The pattern only ever asks for general
// categories, the Han script, a few ASCII characters and the letters of the English contractions, so two characters of
// one class are interchangeable in it.
//
//   ' ' blank   '\n' CR, LF   '\t' other white space   '\'' apostrophe
//   s t r e v m l d   lower-case letters that match those of a contraction (long s folds to s); S T ... D their upper
//   case A  other upper or title case   a  other lower case   o  modifier or other letter   k  mark   1  number   . the
//   rest H J K P  Han script: letter, number, mark, the rest
namespace k3 {

struct CharClassRange {
  uint32_t first;   // code point
  char char_class;  // as above
};

// All code points: ascending, each range reaches to the next one's first.
std::span<const CharClassRange> CharClassRanges();

}  // namespace k3
