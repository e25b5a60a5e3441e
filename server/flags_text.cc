#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/flags.h"

// What a flag set says about itself: --help and --print-config.
namespace k3 {
namespace {

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Breaks `text` at spaces into lines of at most `width` characters.
std::vector<std::string> Wrap(const std::string& text, size_t width) {
  std::vector<std::string> lines;
  std::string line;
  for (const absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    if (!line.empty() && line.size() + 1 + word.size() > width) {
      lines.push_back(std::move(line));
      line.clear();
    }
    if (!line.empty()) line += ' ';
    line.append(word.data(), word.size());
  }
  if (!line.empty()) lines.push_back(std::move(line));
  return lines;
}

}  // namespace

std::string FlagSet::Help() const {
  constexpr size_t kHelpColumn = 34;
  constexpr size_t kWidth = 110;
  std::string out;
  for (size_t i = 0; i < flags_.size(); ++i) {
    const Flag& flag = flags_[i];
    if (const auto group = groups_.find(i); group != groups_.end()) absl::StrAppend(&out, "\n", group->second, ":\n");
    std::string head = absl::StrCat("  --", flag.is_bool ? "[no-]" : "", flag.name);
    if (!flag.value_name.empty()) absl::StrAppend(&head, " ", flag.value_name);
    std::string help = flag.help;
    if (!flag.default_text.empty() && !(flag.is_bool && flag.default_text == "false")) {
      absl::StrAppend(&help, " [", flag.is_bool ? "on" : flag.default_text, "]");
    }
    const std::vector<std::string> lines = Wrap(help, kWidth - kHelpColumn);
    if (head.size() + 2 > kHelpColumn) {
      absl::StrAppend(&out, head, "\n");
      head.clear();
    }
    for (const std::string& line : lines) {
      absl::StrAppend(&out, head, std::string(kHelpColumn - head.size(), ' '), line, "\n");
      head.clear();
    }
  }
  return out;
}

std::string FlagSet::PrintValues() const {
  std::string out;
  for (const Flag& flag : flags_) {
    const std::vector<std::string> values = flag.get();
    std::string text;
    if (flag.is_list) {
      std::vector<std::string> quoted;
      for (const std::string& value : values) quoted.push_back(Quoted(value));
      text = absl::StrCat("[", absl::StrJoin(quoted, ", "), "]");
    } else {
      const bool is_word = flag.is_text || values[0] == "auto" || values[0] == "off";
      text = is_word ? Quoted(values[0]) : values[0];
    }
    std::string origin = "default";
    if (flag.given.has_value()) {
      switch (flag.given->origin) {
        case FlagOrigin::kFile:
          origin = absl::StrCat("file ", flag.given->place.substr(0, flag.given->place.rfind(": ")));
          break;
        case FlagOrigin::kEnvironment:
          origin = absl::StrCat("environment ", flag.given->place);
          break;
        default:
          origin = "command line";
      }
    }
    absl::StrAppend(&out, flag.name, " = ", text, "  # ", origin, "\n");
  }
  return out;
}

}  // namespace k3
