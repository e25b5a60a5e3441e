#include "server/text/json_parser.h"

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/text/field_error.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

// Keys up to here are compared one by one; beyond, an index keeps wide objects linear.
constexpr size_t kSmallObject = 16;
// A path is for people: outer members suffice.
constexpr size_t kMaxPathBytes = 200;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Parser {
 public:
  Parser(std::string_view text, const JsonParseOptions& options) : text_(text), options_(options) {}

  absl::StatusOr<JsonValue> Parse() {
    const size_t valid = ValidUtf8Prefix(text_);
    if (valid != text_.size()) {
      at_ = valid;
      Fail("invalid UTF-8");
      return status_;
    }
    if (text_.starts_with("\xef\xbb\xbf")) {
      Fail("expected JSON, not a byte order mark");
      return status_;
    }
    JsonValue value;
    SkipBlanks();
    if (ParseValue(&value)) {
      SkipBlanks();
      if (at_ != text_.size()) Fail("text after the JSON value");
    }
    if (!status_.ok()) return status_;
    return value;
  }

 private:
  struct PathStep {
    const std::string* key;  // null: an array's item
    size_t index;
  };

  bool Fail(std::string_view what) {
    if (status_.ok()) status_ = FieldError(Path(), absl::StrCat(std::string(what), " at byte ", at_));
    return false;
  }

  std::string Path() const {
    std::string path;
    for (const PathStep& step : path_) {
      if (step.key == nullptr) {
        absl::StrAppend(&path, "[", step.index, "]");
      } else {
        absl::StrAppend(&path, path.empty() ? "" : ".", *step.key);
      }
      if (path.size() > kMaxPathBytes) {
        path.resize(ValidUtf8Prefix(std::string_view(path).substr(0, kMaxPathBytes)));
        return path + "...";
      }
    }
    return path;
  }

  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool Take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  bool TakeWord(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  void SkipBlanks() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
      ++at_;
    }
  }

  bool ParseValue(JsonValue* value) {
    if (++values_ > options_.max_values) return Fail(absl::StrCat("more than ", options_.max_values, " values"));
    switch (Peek()) {
      case '{':
        return ParseObject(value);
      case '[':
        return ParseArray(value);
      case '"':
        value->kind = JsonValue::Kind::kString;
        return ParseString(&value->text);
      case 't':
      case 'f':
        value->kind = JsonValue::Kind::kBool;
        value->boolean = Peek() == 't';
        return TakeWord(value->boolean ? "true" : "false") || Fail("expected a value");
      case 'n':
        return TakeWord("null") || Fail("expected a value");
      default:
        return ParseNumber(value);
    }
  }

  bool EnterNested() {
    if (++depth_ <= options_.max_depth) return true;
    return Fail(absl::StrCat("nested deeper than ", options_.max_depth));
  }

  bool ParseArray(JsonValue* value) {
    if (!EnterNested()) return false;
    value->kind = JsonValue::Kind::kArray;
    ++at_;
    SkipBlanks();
    if (!Take(']')) {
      do {
        SkipBlanks();
        path_.push_back({nullptr, value->items.size()});
        if (!ParseValue(&value->items.emplace_back())) return false;
        path_.pop_back();
        SkipBlanks();
      } while (Take(','));
      if (!Take(']')) return Fail("expected ',' or ']'");
    }
    --depth_;
    return true;
  }

  bool ParseObject(JsonValue* value) {
    if (!EnterNested()) return false;
    value->kind = JsonValue::Kind::kObject;
    ++at_;
    std::unordered_map<std::string, size_t> index;
    SkipBlanks();
    if (!Take('}')) {
      do {
        SkipBlanks();
        if (Peek() != '"') return Fail("expected a key");
        std::string key;
        if (!ParseString(&key)) return false;
        SkipBlanks();
        if (!Take(':')) return Fail("expected ':'");
        SkipBlanks();
        JsonValue member;
        path_.push_back({&key, 0});
        if (!ParseValue(&member)) return false;
        path_.pop_back();
        SetMember(value, std::move(key), std::move(member), &index);
        SkipBlanks();
      } while (Take(','));
      if (!Take('}')) return Fail("expected ',' or '}'");
    }
    --depth_;
    return true;
  }

  static void SetMember(JsonValue* object, std::string key, JsonValue member,
                        std::unordered_map<std::string, size_t>* index) {
    if (object->keys.size() < kSmallObject) {
      object->Set(std::move(key), std::move(member));
      return;
    }
    if (index->empty()) {
      for (size_t i = 0; i < object->keys.size(); ++i) index->emplace(object->keys[i], i);
    }
    const auto [it, added] = index->emplace(key, object->keys.size());
    if (added) {
      object->keys.push_back(std::move(key));
      object->items.push_back(std::move(member));
    } else {
      object->items[it->second] = std::move(member);
    }
  }

  bool ParseString(std::string* out) {
    ++at_;
    while (true) {
      const size_t begin = at_;
      while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' &&
             static_cast<uint8_t>(text_[at_]) >= 0x20) {
        ++at_;
      }
      out->append(text_.substr(begin, at_ - begin));
      if (at_ == text_.size()) return Fail("string without end");
      if (Take('"')) return true;
      if (!Take('\\')) return Fail("control character in a string");
      if (!ParseEscape(out)) return false;
    }
  }

  bool ParseEscape(std::string* out) {
    static constexpr std::string_view kEscapes = "\"\\/bfnrt";
    static constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    if (at_ == text_.size()) return Fail("string without end");
    const char c = text_[at_];
    if (const size_t i = kEscapes.find(c); i != std::string_view::npos) {
      ++at_;
      out->push_back(kMeanings[i]);
      return true;
    }
    uint32_t unit = 0;
    if (!TakeUnicodeEscape(&unit)) return Fail("invalid escape");
    if (unit >= 0xD800 && unit < 0xDC00) {
      const size_t after_first = at_;
      uint32_t low = 0;
      if (Take('\\') && TakeUnicodeEscape(&low) && low >= 0xDC00 && low < 0xE000) {
        AppendUtf8(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00), out);
        return true;
      }
      at_ = after_first;
    }
    if (unit >= 0xD800 && unit < 0xE000) {
      if (!options_.python) return Fail("half a surrogate pair");
      out->append(kReplacementCharacter);
      return true;
    }
    AppendUtf8(unit, out);
    return true;
  }

  // "uXXXX" after the backslash; leaves the position alone when that is not there.
  bool TakeUnicodeEscape(uint32_t* unit) {
    if (text_.size() - at_ < 5 || text_[at_] != 'u') return false;
    uint32_t value = 0;
    for (size_t i = 1; i <= 4; ++i) {
      const char c = text_[at_ + i];
      if (IsDigit(c)) {
        value = value << 4 | (c - '0');
      } else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')) {
        value = value << 4 | ((c | 0x20) - 'a' + 10);
      } else {
        return false;
      }
    }
    at_ += 5;
    *unit = value;
    return true;
  }

  bool ParseNumber(JsonValue* value) {
    const size_t begin = at_;
    if (options_.python) {
      for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
        if (!TakeWord(word)) continue;
        value->kind = JsonValue::Kind::kFloat;
        value->text = word;
        return true;
      }
    }
    Take('-');
    if (!IsDigit(Peek())) {
      at_ = begin;
      return Fail("expected a value");
    }
    value->kind = JsonValue::Kind::kInteger;
    if (!Take('0')) SkipDigits();
    if (Peek() == '.') {
      ++at_;
      if (!SkipDigits()) return Fail("expected a digit");
      value->kind = JsonValue::Kind::kFloat;
    }
    if (Peek() == 'e' || Peek() == 'E') {
      ++at_;
      if (!Take('+')) Take('-');
      if (!SkipDigits()) return Fail("expected a digit");
      value->kind = JsonValue::Kind::kFloat;
    }
    value->text = text_.substr(begin, at_ - begin);
    return true;
  }

  bool SkipDigits() {
    const size_t begin = at_;
    while (IsDigit(Peek())) ++at_;
    return at_ > begin;
  }

  std::string_view text_;
  const JsonParseOptions& options_;
  size_t at_ = 0;
  int depth_ = 0;
  size_t values_ = 0;
  std::vector<PathStep> path_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<JsonValue> ParseJson(std::string_view text, const JsonParseOptions& options) {
  return Parser(text, options).Parse();
}

}  // namespace k3
