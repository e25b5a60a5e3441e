#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace k3 {

// Where a flag's value came from; a later one overrides an earlier one.
enum class FlagOrigin { kDefault, kFile, kEnvironment, kCommandLine };

// Returns null for an unset variable. Passed in, so that only main touches the process environment.
using GetEnv = std::function<const char*(const char* name)>;

// A listener's port: 0 asks for any free one, nullopt ("off") opens none.
using Port = std::optional<uint16_t>;

// The flags of one command, each bound to a variable that holds its default. One table serves the command line, the
// environment, a TOML file, the help text and --print-config.
class FlagSet {
 public:
  struct Range {
    double low;
    double high;
  };

  // Starts a section of the help text.
  void Group(std::string title);

  // `name` is written without dashes; `value` must outlive the set. Bool flags also take --no-NAME. An unset optional
  // shows as "auto", and "auto" unsets it.
  void Bool(std::string name, bool* value, std::string help);
  void Int(std::string name, int64_t* value, Range range, std::string help);
  void Int(std::string name, std::optional<int64_t>* value, Range range, std::string help);
  void Number(std::string name, double* value, Range range, std::string help);
  void Number(std::string name, std::optional<double>* value, Range range, std::string help);
  void String(std::string name, std::string* value, std::string value_name, std::string help);
  void Choice(std::string name, std::string* value, std::vector<std::string> choices, std::string help);
  // One or more values; on the command line up to the next flag, elsewhere separated by commas or as a TOML array.
  void List(std::string name, std::vector<std::string>* value, std::string value_name, std::string help);
  void PortNumber(std::string name, Port* value, std::string help);

  // Reads the command line. Words that belong to no flag go to `positional`. Values are only remembered here;
  // Resolve applies them. INVALID_ARGUMENT names an unknown flag and the nearest known one.
  absl::Status ParseArgs(const std::vector<std::string>& args, std::vector<std::string>* positional);
  // The value of `name` so far: command line, else environment; for --config, which says where the file is.
  std::optional<std::string> Early(const std::string& name, const std::string& env_prefix, const GetEnv& getenv) const;
  // Reads the TOML text of `path` (named in errors). Keys are flag names, '_' counting as '-'.
  absl::Status ParseToml(std::string_view text, const std::string& path);
  // Reads the variables env_prefix + NAME.
  absl::Status ParseEnv(const std::string& env_prefix, const GetEnv& getenv);
  // Of the process' variables `names` those that look like ones of this set but are none, each as a sentence with the
  // nearest that is one. What Kubernetes sets for a service of the same name is passed over.
  std::vector<std::string> UnknownVariables(const std::string& env_prefix, const std::vector<std::string>& names) const;
  // Stores every value in its variable, the strongest origin winning.
  absl::Status Resolve();

  // True when the flag was given anywhere.
  bool IsSet(const std::string& name) const { return Origin(name) != FlagOrigin::kDefault; }
  FlagOrigin Origin(const std::string& name) const;
  // How messages refer to the place of a value, e.g. "--port" or "K3SERVE_PORT".
  std::string Describe(const std::string& name) const;

  // One line per flag: name, help, default.
  std::string Help() const;
  // "name = value  # origin", valid as TOML. Call after Resolve.
  std::string PrintValues() const;

 private:
  struct Given {
    FlagOrigin origin;
    std::string place;  // for messages
    std::vector<std::string> values;
  };
  struct Flag {
    std::string name;
    std::string value_name;
    std::string help;
    bool is_bool = false;
    bool is_list = false;
    bool is_text = false;
    std::function<absl::Status(const std::vector<std::string>&)> set;
    std::function<std::vector<std::string>()> get;
    std::optional<Given> given;
    std::string default_text;
  };

  static Flag NewFlag(std::string name, std::string value_name, std::string help);
  void Add(Flag flag);
  Flag* Find(const std::string& name);
  const Flag* Find(const std::string& name) const;
  absl::Status UnknownFlag(const std::string& what, const std::string& name, const std::string& prefix) const;
  absl::Status Give(Flag& flag, Given given);

  std::vector<Flag> flags_;
  std::map<size_t, std::string> groups_;  // index of the first flag of a group -> title
};

// Number of single-character insertions, deletions, substitutions and neighbour swaps between two words.
int EditDistance(std::string_view a, std::string_view b);

}  // namespace k3
