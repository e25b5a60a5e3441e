#pragma once

#include <string>

namespace k3 {

// What a regular expression is made of, as far as it decides whether it can be followed.
struct PatternSyntax {
  std::string malformed;    // what is wrong and at which character; empty: it is a regular expression
  std::string unsupported;  // the first part that no grammar can hold, e.g. "\\b"; empty: there is none
  // How often, repetitions written out, one of (nearly) all characters may stand: each is a state in which the whole
  // vocabulary has to be tried.
  double wide = 0;
};

PatternSyntax ReadPatternSyntax(const std::string& pattern);

}  // namespace k3
