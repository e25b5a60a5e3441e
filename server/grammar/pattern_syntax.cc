#include "server/grammar/pattern_syntax.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

constexpr int kMaxNesting = 128;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  PatternSyntax Read() {
    if (text_.starts_with("(?i)")) at_ = 4;
    result_.wide = Alternatives(0);
    if (ok() && at_ < text_.size()) Malformed("')' closes no group");
    return result_;
  }

 private:
  bool ok() const { return result_.malformed.empty(); }
  bool AtEnd() const { return at_ >= text_.size(); }
  char Peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  void Malformed(std::string_view what) {
    if (ok()) result_.malformed = absl::StrCat(std::string(what), " at character ", at_ + 1);
  }
  void Unsupported(std::string_view what) {
    if (result_.unsupported.empty()) result_.unsupported = std::string(what);
  }

  double Alternatives(int depth) {
    if (depth > kMaxNesting) Malformed("groups are nested too deeply");
    double wide = Sequence(depth);
    while (ok() && Peek() == '|') {
      ++at_;
      wide += Sequence(depth);
    }
    return wide;
  }

  double Sequence(int depth) {
    double wide = 0;
    while (ok() && !AtEnd() && Peek() != '|' && Peek() != ')') {
      bool anchor = false;
      const double atom = Atom(depth, &anchor);
      wide += atom * Quantifier(anchor);
    }
    return wide;
  }

  double Atom(int depth, bool* anchor) {
    switch (Peek()) {
      case '(':
        return Group(depth);
      case '[':
        return Class();
      case '\\':
        return Escape(/*in_class=*/false);
      case '*':
      case '+':
      case '?':
        Malformed("there is nothing to repeat");
        return 0;
      case '^':
      case '$':
        *anchor = true;
        ++at_;
        return 0;
      case '.':
        ++at_;
        return 1;
      default:
        ++at_;
        return 0;
    }
  }

  // How often the atom before may be written out.
  double Quantifier(bool anchor) {
    double factor = 1;
    if (Peek() == '*' || Peek() == '+' || Peek() == '?') {
      ++at_;
    } else if (Peek() == '{' && (IsDigit(Peek(1)) || Peek(1) == ',')) {
      const std::optional<double> count = Count();
      if (!count.has_value()) return 1;
      factor = *count;
    } else {
      return 1;
    }
    if (anchor && ok()) Unsupported("a repeated ^ or $");
    if (Peek() == '?') ++at_;  // as few as possible: the same texts
    if (Peek() == '*' || Peek() == '+' || Peek() == '?' || (Peek() == '{' && IsDigit(Peek(1)))) {
      Malformed("a repetition is repeated");
    }
    return factor;
  }

  // {m}, {m,} or {m,n}; other braces are text.
  std::optional<double> Count() {
    size_t i = at_ + 1;
    double least = 0, most = 0;
    const size_t digits = i;
    for (; i < text_.size() && IsDigit(text_[i]); ++i) least = least * 10 + (text_[i] - '0');
    const bool has_least = i > digits;
    most = least;
    bool endless = false;
    if (i < text_.size() && text_[i] == ',') {
      const size_t more = ++i;
      most = 0;
      for (; i < text_.size() && IsDigit(text_[i]); ++i) most = most * 10 + (text_[i] - '0');
      endless = i == more;
    }
    if (i >= text_.size() || text_[i] != '}') return std::nullopt;
    if (!has_least) {
      Malformed("a repetition needs its smallest number: {0,n}");
      return std::nullopt;
    }
    if (!endless && most < least) Malformed("a repetition's largest number is below its smallest");
    at_ = i + 1;
    return endless ? least + 1 : most;
  }

  double Group(int depth) {
    ++at_;
    if (Peek() == '?') {
      const char kind = Peek(1), next = Peek(2);
      if (kind == ':') {
        at_ += 2;
      } else if (kind == '=' || kind == '!') {
        Unsupported("looking ahead");
        at_ += 2;
      } else if (kind == '<' && (next == '=' || next == '!')) {
        Unsupported("looking behind");
        at_ += 3;
      } else if (kind == '<' || (kind == 'P' && next == '<')) {
        const size_t end = text_.find('>', at_);
        if (end == std::string_view::npos) {
          Malformed("a group's name has no end");
          return 0;
        }
        at_ = end + 1;
      } else {
        Malformed("a group of an unknown kind");
        return 0;
      }
    }
    const double wide = Alternatives(depth + 1);
    if (!ok()) return wide;
    if (Peek() != ')') {
      Malformed("'(' has no end: expected ')'");
      return wide;
    }
    ++at_;
    return wide;
  }

  double Class() {
    const size_t begin = at_++;
    const bool negated = Peek() == '^';
    if (negated) ++at_;
    bool any = false, wide = negated;
    while (ok() && !AtEnd() && Peek() != ']') {
      const size_t from = at_;
      wide = Unit() > 0 || wide;
      const uint32_t low = point_;
      const bool one = is_point_;
      if (ok() && one && Peek() == '-' && Peek(1) != ']' && at_ + 1 < text_.size()) {
        ++at_;
        wide = Unit() > 0 || wide;
        if (ok() && !is_point_) {
          at_ = from;
          Malformed("a range ends with a class");
        }
        if (ok() && point_ < low) {
          at_ = from;
          Malformed("a range's end is before its begin");
        }
        wide = wide || (is_point_ && point_ > 0x2000 && low < 0x80);
      }
      any = true;
    }
    if (!ok()) return 0;
    if (AtEnd()) {
      at_ = begin;
      Malformed("'[' has no end: expected ']'");
      return 0;
    }
    ++at_;
    if (!any && !negated) {
      at_ = begin;
      Malformed("an empty class fits no character");
    }
    return wide ? 1 : 0;
  }

  // One character or escape of a class.
  double Unit() {
    is_point_ = true;
    if (Peek() == '\\') return Escape(/*in_class=*/true);
    const auto first = static_cast<unsigned char>(Peek());
    const size_t length = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    point_ = length == 1 ? first : first & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; ++i) point_ = point_ << 6 | (static_cast<unsigned char>(Peek(i)) & 0x3f);
    at_ += std::min(length, text_.size() - at_);
    return 0;
  }

  double Escape(bool in_class) {
    const size_t begin = at_++;
    if (AtEnd()) {
      at_ = begin;
      Malformed("an escape has no end");
      return 0;
    }
    const char kind = text_[at_++];
    is_point_ = true;
    point_ = static_cast<unsigned char>(kind);
    if (std::isalnum(static_cast<unsigned char>(kind)) == 0) {
      // A character of several bytes is escaped for nothing.
      while (!AtEnd() && (static_cast<unsigned char>(Peek()) & 0xc0) == 0x80) ++at_;
      return 0;
    }
    switch (kind) {
      case 'd':
      case 'w':
      case 's':
        is_point_ = false;
        return 0;
      case 'D':
      case 'W':
      case 'S':
        is_point_ = false;
        return 1;
      case 'c':
        if (std::isalpha(static_cast<unsigned char>(Peek())) == 0) Malformed("\\c needs a letter");
        point_ = static_cast<unsigned char>(Peek()) & 31;
        ++at_;
        return 0;
      case 'x':
      case 'u':
        Hexadecimal(kind);
        return 0;
      case 'n':
      case 't':
      case 'r':
      case 'f':
      case 'v':
      case 'a':
      case 'e':
      case '0':
        point_ = kind == '0' ? 0 : 9;
        return 0;
      case 'b':
        if (in_class) {
          point_ = 8;
          return 0;
        }
        break;
      default:
        break;
    }
    Unsupported(kind == 'p' || kind == 'P' ? absl::StrCat("\\", std::string(1, kind), ", a class of Unicode,")
                : IsDigit(kind)            ? absl::StrCat("\\", std::string(1, kind), ", a reference to a group,")
                                           : absl::StrCat("\\", std::string(1, kind)));
    is_point_ = false;
    if ((kind == 'p' || kind == 'P') && Peek() == '{') {
      const size_t end = text_.find('}', at_);
      if (end == std::string_view::npos) {
        Malformed("a class of Unicode has no end");
      } else {
        at_ = end + 1;
      }
    }
    return 0;
  }

  void Hexadecimal(char kind) {
    const bool braces = kind == 'u' && Peek() == '{';  // \x{2} is twice an x to some
    if (kind == 'x' && Peek() == '{') return Malformed("\\x needs two hexadecimal digits: write \\u{...}");
    if (braces) ++at_;
    const size_t most = braces ? 6 : kind == 'x' ? 2 : 4;
    size_t digits = 0;
    point_ = 0;
    for (; digits < most && std::isxdigit(static_cast<unsigned char>(Peek())) != 0; ++digits, ++at_) {
      const auto digit = static_cast<char>(std::tolower(static_cast<unsigned char>(Peek())));
      point_ = point_ << 4 | static_cast<uint32_t>(IsDigit(digit) ? digit - '0' : digit - 'a' + 10);
    }
    if (braces ? digits == 0 || Peek() != '}' : digits < most) {
      return Malformed(absl::StrCat("\\", std::string(1, kind), " needs ",
                                    kind == 'x' ? "two hexadecimal digits" : "four hexadecimal digits",
                                    ", or others in braces"));
    }
    if (braces) ++at_;
    if (point_ > 0x10ffff) Malformed("there is no character of that number");
  }

  const std::string_view text_;
  size_t at_ = 0;
  PatternSyntax result_;
  // Of the last unit of a class.
  uint32_t point_ = 0;
  bool is_point_ = true;
};

}  // namespace

PatternSyntax ReadPatternSyntax(const std::string& pattern) { return Reader(pattern).Read(); }

}  // namespace k3
