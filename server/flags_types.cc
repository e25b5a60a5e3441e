#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/flags.h"

// The kinds of flags: how each reads its words and shows its value.
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

}  // namespace

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

}  // namespace k3
