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

std::string Dashed(const std::string& name) { return absl::StrReplaceAll(name, {{"_", "-"}}); }

std::string EnvName(const std::string& prefix, const std::string& name) {
  return absl::StrCat(prefix, absl::AsciiStrToUpper(absl::StrReplaceAll(name, {{"-", "_"}})));
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

std::vector<std::string> FlagSet::UnknownVariables(const std::string& env_prefix,
                                                   const std::vector<std::string>& names) const {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name.rfind(env_prefix, 0) != 0) continue;
    const std::string rest = name.substr(env_prefix.size());
    // {NAME}_SERVICE_HOST, {NAME}_SERVICE_PORT_HTTP, {NAME}_PORT_8000_TCP_ADDR, ...
    const bool kubernetes = rest.rfind("SERVICE_HOST", 0) == 0 || rest.rfind("SERVICE_PORT", 0) == 0 ||
                            (rest.rfind("PORT_", 0) == 0 && rest.find("_TCP") != std::string::npos);
    std::string nearest;
    int best = std::numeric_limits<int>::max();
    for (const Flag& flag : flags_) {
      const std::string candidate = EnvName(env_prefix, flag.name);
      const int distance = EditDistance(name.substr(0, 100), candidate);
      if (distance >= best) continue;
      best = distance;
      nearest = candidate;
    }
    if (kubernetes || best == 0) continue;
    found.push_back(absl::StrCat("unknown environment variable ", name.substr(0, 100), " has no effect; did you mean ",
                                 nearest, "?"));
  }
  std::sort(found.begin(), found.end());
  return found;
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

}  // namespace k3
