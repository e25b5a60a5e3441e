#include "server/flags.h"

#define TOML_HEADER_ONLY 0
#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace k3 {
namespace {

// The shortest text that reads back as the same number.
std::string NumberText(double value) {
  std::array<char, 32> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return std::string(buffer.data(), end);
}

absl::Status ParseInt(const std::string& text, FlagSet::Range range, int64_t* value) {
  int64_t parsed = 0;
  if (!absl::SimpleAtoi(text, &parsed)) return absl::InvalidArgumentError("must be a whole number");
  if (static_cast<double>(parsed) < range.low || static_cast<double>(parsed) > range.high) {
    return absl::InvalidArgumentError(
        absl::StrCat("must be from ", NumberText(range.low), " to ", NumberText(range.high)));
  }
  *value = parsed;
  return absl::OkStatus();
}

absl::Status ParseNumber(const std::string& text, FlagSet::Range range, double* value) {
  double parsed = 0;
  if (!absl::SimpleAtod(text, &parsed) || !std::isfinite(parsed)) return absl::InvalidArgumentError("must be a number");
  if (parsed < range.low || parsed > range.high) {
    return absl::InvalidArgumentError(
        absl::StrCat("must be from ", NumberText(range.low), " to ", NumberText(range.high)));
  }
  *value = parsed;
  return absl::OkStatus();
}

absl::Status ParseBool(const std::string& text, bool* value) {
  const std::string lower = absl::AsciiStrToLower(text);
  if (lower == "true" || lower == "1" || lower == "on" || lower == "yes") {
    *value = true;
  } else if (lower == "false" || lower == "0" || lower == "off" || lower == "no") {
    *value = false;
  } else {
    return absl::InvalidArgumentError("must be true or false");
  }
  return absl::OkStatus();
}

std::string Dashed(const std::string& name) { return absl::StrReplaceAll(name, {{"_", "-"}}); }

std::string EnvName(const std::string& prefix, const std::string& name) {
  return absl::StrCat(prefix, absl::AsciiStrToUpper(absl::StrReplaceAll(name, {{"-", "_"}})));
}

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

// One TOML value as the words that the command line would have carried.
absl::Status TomlWords(const toml::node& node, std::vector<std::string>* words) {
  if (const auto* array = node.as_array()) {
    for (const toml::node& element : *array) {
      if (element.is_array()) return absl::InvalidArgumentError("must not be a nested array");
      const absl::Status status = TomlWords(element, words);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  if (const auto* text = node.as_string()) {
    words->push_back(text->get());
  } else if (const auto* integer = node.as_integer()) {
    words->push_back(absl::StrCat(integer->get()));
  } else if (const auto* number = node.as_floating_point()) {
    std::ostringstream out;
    out.precision(17);
    out << number->get();
    words->push_back(out.str());
  } else if (const auto* boolean = node.as_boolean()) {
    words->push_back(boolean->get() ? "true" : "false");
  } else {
    return absl::InvalidArgumentError("must be a string, number, boolean or array of these");
  }
  return absl::OkStatus();
}

}  // namespace

int EditDistance(std::string_view a, std::string_view b) {
  const size_t width = b.size() + 1;
  std::vector<int> before(width), previous(width), current(width);
  for (size_t j = 0; j < width; ++j) previous[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = static_cast<int>(i);
    for (size_t j = 1; j < width; ++j) {
      const int substitution = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, substitution});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        current[j] = std::min(current[j], before[j - 2] + 1);
      }
    }
    before.swap(previous);
    previous.swap(current);
  }
  return previous[b.size()];
}

void FlagSet::Group(std::string title) { groups_[flags_.size()] = std::move(title); }

FlagSet::Flag FlagSet::NewFlag(std::string name, std::string value_name, std::string help) {
  Flag flag;
  flag.name = std::move(name);
  flag.value_name = std::move(value_name);
  flag.help = std::move(help);
  return flag;
}

void FlagSet::Add(Flag flag) {
  flag.default_text = absl::StrJoin(flag.get(), " ");
  flags_.push_back(std::move(flag));
}

void FlagSet::Bool(std::string name, bool* value, std::string help) {
  Flag flag = NewFlag(std::move(name), "", std::move(help));
  flag.is_bool = true;
  flag.set = [value](const std::vector<std::string>& words) { return ParseBool(words[0], value); };
  flag.get = [value] { return std::vector<std::string>{*value ? "true" : "false"}; };
  Add(std::move(flag));
}

void FlagSet::Int(std::string name, int64_t* value, Range range, std::string help) {
  Flag flag = NewFlag(std::move(name), "N", std::move(help));
  flag.set = [value, range](const std::vector<std::string>& words) { return ParseInt(words[0], range, value); };
  flag.get = [value] { return std::vector<std::string>{absl::StrCat(*value)}; };
  Add(std::move(flag));
}

void FlagSet::Int(std::string name, std::optional<int64_t>* value, Range range, std::string help) {
  Flag flag = NewFlag(std::move(name), "N", std::move(help));
  flag.set = [value, range](const std::vector<std::string>& words) {
    value->reset();
    if (words[0] == "auto") return absl::OkStatus();
    int64_t parsed = 0;
    const absl::Status status = ParseInt(words[0], range, &parsed);
    if (status.ok()) *value = parsed;
    return status;
  };
  flag.get = [value] { return std::vector<std::string>{value->has_value() ? absl::StrCat(**value) : "auto"}; };
  Add(std::move(flag));
}

void FlagSet::Number(std::string name, double* value, Range range, std::string help) {
  Flag flag = NewFlag(std::move(name), "X", std::move(help));
  flag.set = [value, range](const std::vector<std::string>& words) { return ParseNumber(words[0], range, value); };
  flag.get = [value] { return std::vector<std::string>{NumberText(*value)}; };
  Add(std::move(flag));
}

void FlagSet::Number(std::string name, std::optional<double>* value, Range range, std::string help) {
  Flag flag = NewFlag(std::move(name), "X", std::move(help));
  flag.set = [value, range](const std::vector<std::string>& words) {
    value->reset();
    if (words[0] == "auto") return absl::OkStatus();
    double parsed = 0;
    const absl::Status status = ParseNumber(words[0], range, &parsed);
    if (status.ok()) *value = parsed;
    return status;
  };
  flag.get = [value] { return std::vector<std::string>{value->has_value() ? NumberText(**value) : "auto"}; };
  Add(std::move(flag));
}

void FlagSet::String(std::string name, std::string* value, std::string value_name, std::string help) {
  Flag flag = NewFlag(std::move(name), std::move(value_name), std::move(help));
  flag.is_text = true;
  flag.set = [value](const std::vector<std::string>& words) {
    *value = words[0];
    return absl::OkStatus();
  };
  flag.get = [value] { return std::vector<std::string>{*value}; };
  Add(std::move(flag));
}

void FlagSet::Choice(std::string name, std::string* value, std::vector<std::string> choices, std::string help) {
  Flag flag = NewFlag(std::move(name), absl::StrJoin(choices, "|"), std::move(help));
  flag.is_text = true;
  flag.set = [value, choices = std::move(choices)](const std::vector<std::string>& words) {
    if (std::find(choices.begin(), choices.end(), words[0]) == choices.end()) {
      return absl::InvalidArgumentError(absl::StrCat("must be one of ", absl::StrJoin(choices, ", ")));
    }
    *value = words[0];
    return absl::OkStatus();
  };
  flag.get = [value] { return std::vector<std::string>{*value}; };
  Add(std::move(flag));
}

void FlagSet::List(std::string name, std::vector<std::string>* value, std::string value_name, std::string help) {
  Flag flag = NewFlag(std::move(name), absl::StrCat(value_name, "..."), std::move(help));
  flag.is_list = true;
  flag.is_text = true;
  flag.set = [value](const std::vector<std::string>& words) {
    for (const std::string& word : words) {
      if (word.empty()) return absl::InvalidArgumentError("must not be empty");
    }
    *value = words;
    return absl::OkStatus();
  };
  flag.get = [value] { return *value; };
  Add(std::move(flag));
}

void FlagSet::PortNumber(std::string name, Port* value, std::string help) {
  Flag flag = NewFlag(std::move(name), "PORT|off", std::move(help));
  flag.set = [value](const std::vector<std::string>& words) {
    value->reset();
    if (words[0] == "off") return absl::OkStatus();
    int64_t parsed = 0;
    if (!ParseInt(words[0], {0, 65535}, &parsed).ok()) {
      return absl::InvalidArgumentError("must be a port from 0 to 65535, or off");
    }
    *value = static_cast<uint16_t>(parsed);
    return absl::OkStatus();
  };
  flag.get = [value] { return std::vector<std::string>{value->has_value() ? absl::StrCat(**value) : "off"}; };
  Add(std::move(flag));
}

FlagSet::Flag* FlagSet::Find(const std::string& name) {
  for (Flag& flag : flags_) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

const FlagSet::Flag* FlagSet::Find(const std::string& name) const { return const_cast<FlagSet*>(this)->Find(name); }

absl::Status FlagSet::UnknownFlag(const std::string& what, const std::string& name, const std::string& prefix) const {
  std::string nearest;
  int best = std::numeric_limits<int>::max();
  const std::string wanted = Dashed(name.substr(0, 64));  // a distance costs the product of the lengths
  const auto consider = [&](const std::string& candidate) {
    const int distance = EditDistance(wanted, candidate);
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  };
  for (const Flag& flag : flags_) {
    consider(flag.name);
    if (flag.is_bool) consider(absl::StrCat("no-", flag.name));
  }
  std::string message = absl::StrCat("unknown ", what, " ", prefix, name.substr(0, 100));
  if (!nearest.empty()) absl::StrAppend(&message, "; did you mean ", prefix, nearest, "?");
  return absl::InvalidArgumentError(message);
}

absl::Status FlagSet::Give(Flag& flag, Given given) {
  if (given.values.empty()) return absl::InvalidArgumentError(absl::StrCat(given.place, " needs a value"));
  if (!flag.is_list && given.values.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(given.place, " takes one value, not ", given.values.size()));
  }
  if (flag.given.has_value()) {
    if (flag.given->origin > given.origin) return absl::OkStatus();
    if (flag.given->origin == given.origin) {
      if (flag.is_list) {
        flag.given->values.insert(flag.given->values.end(), given.values.begin(), given.values.end());
        return absl::OkStatus();
      }
      if (flag.given->values != given.values) {
        return absl::InvalidArgumentError(absl::StrCat(
            given.place, " is given twice with different values: ", flag.given->values[0], " and ", given.values[0]));
      }
      return absl::OkStatus();
    }
  }
  flag.given = std::move(given);
  return absl::OkStatus();
}

absl::Status FlagSet::ParseArgs(const std::vector<std::string>& args, std::vector<std::string>* positional) {
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& word = args[i];
    if (word == "--") {  // everything after it is positional
      positional->insert(positional->end(), args.begin() + static_cast<std::ptrdiff_t>(i) + 1, args.end());
      break;
    }
    if (word.size() < 2 || word[0] != '-' || absl::ascii_isdigit(static_cast<unsigned char>(word[1]))) {
      positional->push_back(word);
      continue;
    }
    if (word == "-h" && Find("help") != nullptr) {
      Find("help")->given = Given{FlagOrigin::kCommandLine, "-h", {"true"}};
      continue;
    }
    if (word[1] != '-') return UnknownFlag("flag", word.substr(1), "--");
    std::string name = word.substr(2);
    std::optional<std::string> value;
    if (const size_t equals = name.find('='); equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    Flag* flag = Find(name);
    bool negated = false;
    if (flag == nullptr && name.rfind("no-", 0) == 0) {
      flag = Find(name.substr(3));
      if (flag != nullptr && !flag->is_bool) flag = nullptr;
      negated = flag != nullptr;
    }
    if (flag == nullptr) return UnknownFlag("flag", name, "--");
    Given given{FlagOrigin::kCommandLine, absl::StrCat("--", flag->name), {}};
    const auto is_value = [&](size_t index) {
      if (index >= args.size()) return false;
      const std::string& next = args[index];
      return next.empty() || next[0] != '-' || next.size() == 1 ||
             absl::ascii_isdigit(static_cast<unsigned char>(next[1])) || next[1] == '.';
    };
    if (flag->is_bool) {
      if (negated && value.has_value()) {
        return absl::InvalidArgumentError(absl::StrCat("--no-", flag->name, " takes no value"));
      }
      given.values.push_back(negated ? "false" : value.value_or("true"));
    } else if (value.has_value()) {
      given.values.push_back(*value);
    } else if (flag->is_list) {
      while (is_value(i + 1)) given.values.push_back(args[++i]);
    } else if (is_value(i + 1)) {
      given.values.push_back(args[++i]);
    }
    const absl::Status status = Give(*flag, std::move(given));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::optional<std::string> FlagSet::Early(const std::string& name, const std::string& env_prefix,
                                          const GetEnv& getenv) const {
  const Flag* flag = Find(name);
  if (flag != nullptr && flag->given.has_value()) return flag->given->values[0];
  const char* value = getenv(EnvName(env_prefix, name).c_str());
  if (value != nullptr && *value != '\0') return value;
  return std::nullopt;
}

absl::Status FlagSet::ParseToml(std::string_view text, const std::string& path) {
  toml::table table;
  try {
    table = toml::parse(text);
  } catch (const toml::parse_error& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ":", error.source().begin.line, ":",
                                                   error.source().begin.column, ": ",
                                                   std::string(error.description())));
  }
  for (const auto& [key, node] : table) {
    Flag* flag = Find(Dashed(std::string(key.str())));
    if (flag == nullptr) return UnknownFlag(absl::StrCat("key in ", path, ":"), std::string(key.str()), "");
    Given given{FlagOrigin::kFile, absl::StrCat(path, ":", node.source().begin.line, ": ", flag->name), {}};
    absl::Status status = TomlWords(node, &given.values);
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat(given.place, " ", status.message()));
    status = Give(*flag, std::move(given));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status FlagSet::ParseEnv(const std::string& env_prefix, const GetEnv& getenv) {
  for (Flag& flag : flags_) {
    const std::string name = EnvName(env_prefix, flag.name);
    const char* value = getenv(name.c_str());
    if (value == nullptr || *value == '\0') continue;
    // Kubernetes sets NAME_PORT=tcp://... for every service; one called like this program would break each start.
    if (std::string_view(value).rfind("tcp://", 0) == 0) continue;
    Given given{FlagOrigin::kEnvironment, name, {}};
    if (flag.is_list) {
      for (const absl::string_view word : absl::StrSplit(value, ',')) {
        given.values.push_back(std::string(absl::StripAsciiWhitespace(word)));
      }
    } else {
      given.values.emplace_back(value);
    }
    const absl::Status status = Give(flag, std::move(given));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status FlagSet::Resolve() {
  for (Flag& flag : flags_) {
    if (!flag.given.has_value()) continue;
    const absl::Status status = flag.set(flag.given->values);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(flag.given->place, " ", status.message(), ", not \"",
                                                     flag.given->values[0].substr(0, 100), "\""));
    }
  }
  return absl::OkStatus();
}

FlagOrigin FlagSet::Origin(const std::string& name) const {
  const Flag* flag = Find(name);
  return flag != nullptr && flag->given.has_value() ? flag->given->origin : FlagOrigin::kDefault;
}

std::string FlagSet::Describe(const std::string& name) const {
  const Flag* flag = Find(name);
  return flag != nullptr && flag->given.has_value() ? flag->given->place : absl::StrCat("--", name);
}

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
