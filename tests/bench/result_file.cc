#include "tests/bench/result_file.h"

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

namespace k3::bench {
namespace {

std::string FirstLine(const char* command) {
  std::string line;
  if (FILE* pipe = popen(command, "r")) {
    char buffer[256];
    if (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) line = buffer;
    pclose(pipe);
  }
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) line.pop_back();
  return line;
}

nlohmann::ordered_json OrNull(const std::optional<double>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  std::string line, name = "unknown CPU";
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) == 0) {
      name = line.substr(line.find(':') + 2);
      break;
    }
  }
  return name + ", " + std::to_string(std::thread::hardware_concurrency()) + " threads";
}

void WriteResults(const std::string& path, const std::vector<Result>& results, const std::string& device, int argc,
                  char** argv) {
  if (path.empty()) return;
  std::string command;
  for (int i = 0; i < argc; ++i) {
    std::string word = argv[i];
    // Folders that only one machine has say nothing.
    if (i == 0 || word[0] == '/') word = word.substr(word.rfind('/') + 1);
    command += (i > 0 ? " " : "") + word;
  }
  // Where the sources are no git checkout (a packed binary on a test machine), the caller names the commit.
  const char* given = std::getenv("K3_BENCH_COMMIT");
  const std::string commit =
      given != nullptr ? given : FirstLine("git -C " K3_SOURCE_DIR " rev-parse --short=12 HEAD 2>/dev/null");
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Result& r : results) {
    list.push_back({{"name", r.name},
                    {"value", r.value},
                    {"unit", r.unit},
                    {"floor_ratio", OrNull(r.floor_ratio)},
                    {"copy_TBps", OrNull(r.copy_TBps)},
                    {"gemm_TFLOPs", OrNull(r.gemm_TFLOPs)},
                    {"gpu", device},
                    {"commit", commit},
                    {"command", command}});
  }
  std::ofstream out(path);
  out << list.dump(1) << "\n";
  if (!out) throw std::runtime_error("cannot write " + path);
}

}  // namespace k3::bench
