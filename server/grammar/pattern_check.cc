#include "server/grammar/pattern_check.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/grammar/pattern_syntax.h"
#include "server/text/field_error.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

constexpr size_t kMaxPattern = 4'096;
constexpr double kMaxRepeats = 100'000;  // of one repetition, or of nested ones together
constexpr double kMaxWide = 128;         // with 160,000 tokens each costs 0.05 s to compile

absl::Status CheckSize(const std::string& pattern, const std::string& path) {
  if (pattern.size() > kMaxPattern) {
    return FieldError(path, absl::StrCat("has ", pattern.size(), " bytes; at most ", kMaxPattern));
  }
  // Counts what {m,n} multiply to, over all nesting: an upper bound is enough.
  double product = 1;
  int depth = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '\\') {
      ++i;
      if (pattern.compare(i, 2, "u{") == 0) i = std::min(pattern.find('}', i), pattern.size());
      continue;
    }
    if (pattern[i] == '(' && ++depth > 100) return FieldError(path, "has more than 100 nested groups");
    if (pattern[i] == ')') --depth;
    if (pattern[i] != '{') continue;
    double most = 0, number = 0;
    size_t j = i + 1;
    for (; j < pattern.size() && (std::isdigit(static_cast<unsigned char>(pattern[j])) != 0 || pattern[j] == ',');
         ++j) {
      number = pattern[j] == ',' ? 0 : number * 10 + (pattern[j] - '0');
      most = std::max(most, number);
    }
    if (j >= pattern.size() || pattern[j] != '}') continue;
    if (most > kMaxRepeats)
      return FieldError(path, absl::StrCat("repeats something more than ", kMaxRepeats, " times"));
    product *= std::max(1.0, most);
    if (product > 10 * kMaxRepeats) return FieldError(path, "its repetitions multiply to too many");
  }
  return absl::OkStatus();
}

// One character or escape of a pattern.
struct Unit {
  size_t size = 1;  // bytes
  bool known = true;
  uint32_t point = 0;  // where known; else the unit stands for several characters
};

bool JsonEscapes(const Unit& unit) {
  return unit.known && (unit.point < 0x20 || unit.point == '"' || unit.point == '\\');
}

// The unit that begins at byte `at`.
Unit UnitAt(const std::string& pattern, size_t at) {
  if (pattern[at] != '\\' || at + 1 >= pattern.size()) return {1, true, static_cast<unsigned char>(pattern[at])};
  const char kind = pattern[at + 1];
  switch (kind) {
    case 'a':
    case 'e':
    case 'f':
    case 'n':
    case 'r':
    case 't':
    case 'v':
    case '0':
      return {2, true, 0};  // all below U+0020
    case 'c':
      return {3, true, 0};
    case 'x':
    case 'u':
      break;
    default:
      return {2, std::isalnum(static_cast<unsigned char>(kind)) == 0, static_cast<unsigned char>(kind)};
  }
  const bool braces = at + 2 < pattern.size() && pattern[at + 2] == '{';
  size_t i = at + (braces ? 3 : 2);
  const size_t end = braces ? pattern.size() : std::min(pattern.size(), i + (kind == 'x' ? 2 : 4));
  uint32_t point = 0;
  for (; i < end && std::isxdigit(static_cast<unsigned char>(pattern[i])) != 0; ++i) {
    const char digit = static_cast<char>(std::tolower(static_cast<unsigned char>(pattern[i])));
    point = point << 4 | static_cast<uint32_t>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
  }
  if (braces && i < pattern.size() && pattern[i] == '}') ++i;
  return {i - at, true, point};
}

absl::Status CheckSurrogates(const std::string& pattern, const std::string& path) {
  for (size_t i = 0; i < pattern.size();) {
    const Unit unit = UnitAt(pattern, i);
    if (unit.known && unit.point >= 0xd800 && unit.point < 0xe000) {
      return FieldError(path,
                        absl::StrFormat("\\u%04x is half a surrogate pair: write the character, or \\u{...} with its "
                                        "number",
                                        unit.point));
    }
    i += unit.size;
  }
  return absl::OkStatus();
}

// A piece of a pattern: something that takes a character ('c'), an anchor ('^', '$'), a bar ('|'), a parenthesis, or a
// quantifier ('q'; one that allows at most once is '?').
using Pieces = std::vector<char>;

bool IsQuantifier(const std::string& pattern, size_t brace, size_t* end) {
  size_t i = brace + 1;
  while (i < pattern.size() && (std::isdigit(static_cast<unsigned char>(pattern[i])) != 0 || pattern[i] == ',')) ++i;
  if (i == brace + 1 || i >= pattern.size() || pattern[i] != '}') return false;
  *end = i;
  return true;
}

// Of a pattern that ReadPatternSyntax passed.
Pieces Split(const std::string& pattern) {
  Pieces pieces;
  bool in_class = false;
  for (size_t i = pattern.starts_with("(?i)") ? 4 : 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      ++i;
      if (!in_class) pieces.push_back('c');
    } else if (in_class) {
      in_class = c != ']';
    } else if (c == '[') {
      in_class = true;
      pieces.push_back('c');
    } else if (c == '(') {
      if (i + 1 < pattern.size() && pattern[i + 1] == '?') {
        const bool plain = i + 2 < pattern.size() && pattern[i + 2] == ':';
        i = plain ? i + 2 : std::min(pattern.find('>', i), pattern.size());  // or a named group
      }
      pieces.push_back('(');
    } else if (c == ')' || c == '|' || c == '^' || c == '$') {
      pieces.push_back(c);
    } else if (c == '*' || c == '+') {
      pieces.push_back('q');
    } else if (c == '?') {
      pieces.push_back('?');
    } else if (size_t end = 0; c == '{' && IsQuantifier(pattern, i, &end)) {
      pieces.push_back('q');
      i = end;
    } else {
      pieces.push_back('c');
    }
  }
  return pieces;
}

// Whether `anchor` stands only where nothing was taken before it, on any way through `pieces`.
bool AtTheBegin(const Pieces& pieces, char anchor, char open, char close) {
  struct Level {
    bool begin;          // nothing was taken before this group
    bool taken = false;  // by some alternative of it
  };
  std::vector<Level> levels = {{true}};
  bool begin = true;
  for (const char piece : pieces) {
    if (piece == open) {
      levels.push_back({begin});
    } else if (piece == close) {
      if (levels.size() == 1) return true;  // not well formed: the library says so
      const bool taken = levels.back().taken;
      begin = levels.back().begin && !taken;
      levels.pop_back();
      levels.back().taken = levels.back().taken || taken;
    } else if (piece == '|') {
      begin = levels.back().begin;
    } else if (piece == anchor) {
      if (!begin) return false;
    } else if (piece == 'c') {
      begin = false;
      levels.back().taken = true;
    }
  }
  return true;
}

// Whether a group that may come more than once holds an anchor.
bool RepeatsAnAnchor(const Pieces& pieces) {
  std::vector<bool> holds = {false};
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i] == '(') holds.push_back(false);
    if (pieces[i] == '^' || pieces[i] == '$') holds.back() = true;
    if (pieces[i] != ')' || holds.size() == 1) continue;
    const bool held = holds.back();
    holds.pop_back();
    holds.back() = holds.back() || held;
    if (held && i + 1 < pieces.size() && pieces[i + 1] == 'q') return true;
  }
  return false;
}

}  // namespace

absl::Status CheckPattern(const std::string& pattern, const std::string& path, bool strict) {
  absl::Status status = CheckSize(pattern, path);
  if (status.ok()) status = CheckSurrogates(pattern, path);
  if (!status.ok()) return status;
  const PatternSyntax syntax = ReadPatternSyntax(pattern);
  if (!syntax.malformed.empty()) return FieldError(path, absl::StrCat("no regular expression: ", syntax.malformed));
  if (!strict) return absl::OkStatus();
  if (!syntax.unsupported.empty()) return FieldError(path, absl::StrCat(syntax.unsupported, " cannot be enforced"));
  if (syntax.wide > kMaxWide && !AnyCharacters(pattern).has_value()) {
    return FieldError(path, absl::StrCat("any character may come up to ", syntax.wide,
                                         " times, which would take too long to follow; at most ", kMaxWide,
                                         " in all, or * or +, or nothing but a count such as ^.{1,2000}$"));
  }
  const Pieces pieces = Split(pattern);
  const Pieces reversed(pieces.rbegin(), pieces.rend());
  if (!AtTheBegin(pieces, '^', '(', ')') || !AtTheBegin(reversed, '$', ')', '(') || RepeatsAnAnchor(pieces)) {
    return FieldError(path, "^ and $ can be enforced at the ends only");
  }
  return absl::OkStatus();
}

std::optional<CharacterCount> AnyCharacters(const std::string& pattern) {
  std::string_view text = pattern;
  if (text.starts_with('^')) text.remove_prefix(1);
  if (text.ends_with('$')) text.remove_suffix(1);
  if (!text.starts_with(".{") || !text.ends_with('}')) return std::nullopt;
  text = text.substr(2, text.size() - 3);
  CharacterCount count;
  const auto number = [&](int32_t* value) {
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), *value);
    if (parsed.ec != std::errc() || *value < 0 || *value > kMaxRepeats) return false;
    text.remove_prefix(static_cast<size_t>(parsed.ptr - text.data()));
    return true;
  };
  if (!number(&count.least)) return std::nullopt;
  if (text.empty()) {
    count.most = count.least;
    return count;
  }
  if (text[0] != ',') return std::nullopt;
  text.remove_prefix(1);
  if (text.empty()) return count;
  if (!number(&count.most) || !text.empty() || count.most < count.least) return std::nullopt;
  return count;
}

absl::Status CheckPatternInString(const std::string& pattern, const std::string& path) {
  const auto refused = [&] {
    return FieldError(path,
                      "a character that JSON writes with an escape (quotation mark, backslash, control character) "
                      "cannot be enforced in a pattern");
  };
  bool in_class = false, negated = false, escaped = false, plain = false;
  for (size_t i = pattern.starts_with("(?i)") ? 4 : 0; i < pattern.size();) {
    const Unit unit = UnitAt(pattern, i);
    const char c = pattern[i];
    if (!in_class) {
      if (c == '[') {
        in_class = true;
        negated = i + 1 < pattern.size() && pattern[i + 1] == '^';
        escaped = plain = false;
        if (negated) ++i;
      } else if (JsonEscapes(unit)) {
        return refused();
      }
    } else if (c == ']') {
      in_class = false;
      if (escaped && !plain && !negated) return refused();
    } else if (JsonEscapes(unit) || (c == '\\' && i + 1 < pattern.size() && pattern[i + 1] == 'b')) {
      escaped = true;
    } else {
      const bool range = c == '-' && pattern[i - 1] != '[' && i + 1 < pattern.size() && pattern[i + 1] != ']';
      plain = plain || !range;
    }
    i += unit.size;
  }
  return absl::OkStatus();
}

std::string AsciiPattern(const std::string& pattern) {
  if (pattern.starts_with("(?i)")) return "(?i)" + AsciiPattern(pattern.substr(4));
  std::string out;
  bool in_class = false, repeated = false, group = false;  // the last two: of what stands before
  for (size_t i = 0; i < pattern.size();) {
    const bool was_repeated = std::exchange(repeated, false), was_group = std::exchange(group, false);
    if (size_t end = 0; !in_class && pattern[i] == '{' && IsQuantifier(pattern, i, &end)) {
      out.append(pattern, i, end + 1 - i);
      i = end + 1;
      repeated = true;
      continue;
    }
    if (!in_class && (pattern[i] == '*' || pattern[i] == '+' || pattern[i] == '?')) {
      // Behind a repetition: as few as possible, which are the same texts.
      if (!was_repeated) out.append(pattern[i] == '?' && was_group ? "{0,1}" : std::string(1, pattern[i]));
      repeated = true;
      ++i;
      continue;
    }
    if (!in_class && pattern.compare(i, 3, "(?:") == 0) {
      out.append("(?:");
      i += 3;
      continue;
    }
    if (!in_class && pattern.compare(i, 3, "(?<") == 0) {
      out.append("(?<");
      i += 3;
      continue;
    }
    group = !in_class && pattern[i] == ')';
    if (!in_class && pattern.compare(i, 4, "(?P<") == 0) {
      out.append("(?<");
      i += 4;
      continue;
    }
    if (!in_class && pattern[i] == '{') {
      out.append("\\{");
      ++i;
      continue;
    }
    if (pattern[i] == '[' || pattern[i] == ']') in_class = pattern[i] == '[';
    if (pattern.compare(i, 3, "\\u{") == 0) {
      const size_t end = std::min(pattern.find('}', i), pattern.size() - 1) + 1;
      out.append(pattern, i, end - i);
      i = end;
      continue;
    }
    if (pattern[i] == '\\' && i + 1 < pattern.size()) {
      const auto escaped = static_cast<unsigned char>(pattern[i + 1]);
      const bool printable = escaped >= 0x20 && escaped < 0x7f;
      if (printable) out.append(pattern, i, 2);
      i += printable ? 2 : 1;  // other characters need no escape
      if (printable) continue;
    }
    const auto first = static_cast<unsigned char>(pattern[i]);
    if (first >= 0x20 && first < 0x7f) {
      out.push_back(pattern[i++]);
      continue;
    }
    const size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    uint32_t point = length == 1 ? first : first & (0xffu >> (length + 1));
    for (size_t k = 1; k < length && i + k < pattern.size(); ++k) {
      point = point << 6 | (static_cast<unsigned char>(pattern[i + k]) & 0x3f);
    }
    absl::StrAppendFormat(&out, "\\u{%x}", point);
    i += length;
  }
  return out;
}

}  // namespace k3
