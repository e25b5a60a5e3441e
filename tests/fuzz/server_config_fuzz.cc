#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "server/server_config.h"

// Flags, environment and TOML of `serve` from arbitrary text: the input is cut at '\1' into the file, a NAME=value list
// and the arguments. Whatever is accepted must print a configuration that is accepted again with the same values.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::string> parts(1);
  for (size_t i = 0; i < size; ++i) {
    if (data[i] == 1 && parts.size() < 3) {
      parts.emplace_back();
    } else {
      parts.back() += static_cast<char>(data[i]);
    }
  }
  parts.resize(3);
  const auto lines = [](const std::string& text) {
    std::vector<std::string> words(1);
    for (const char c : text) {
      if (c == '\n') {
        words.emplace_back();
      } else if (c != '\0') {
        words.back() += c;
      }
    }
    return words;
  };

  k3::ServerConfig config;
  k3::FlagSet flags;
  std::string gpus;
  k3::AddLayoutFlags(flags, config, &gpus);
  std::vector<std::string> positional;
  std::map<std::string, std::string> environment;
  for (const std::string& line : lines(parts[1])) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) environment[line.substr(0, equals)] = line.substr(equals + 1);
  }
  const k3::GetEnv getenv = [&environment](const char* name) -> const char* {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  };
  if (!flags.ParseArgs(lines(parts[2]), &positional).ok()) return 0;
  if (!flags.ParseToml(parts[0], "fuzz.toml").ok() || !flags.ParseEnv(k3::kEnvPrefix, getenv).ok()) return 0;
  if (!flags.Resolve().ok() || !k3::FinishLayoutFlags(flags, gpus, config).ok()) return 0;

  k3::ServerConfig again;
  k3::FlagSet printed;
  std::string again_gpus;
  k3::AddLayoutFlags(printed, again, &again_gpus);
  if (!printed.ParseToml(flags.PrintValues(), "printed.toml").ok() || !printed.Resolve().ok()) std::abort();
  if (again_gpus != gpus || again.latent_pages != config.latent_pages || again.device != config.device ||
      again.verify_hits != config.verify_hits || again.page_size != config.page_size) {
    std::abort();
  }
  return 0;
}
