#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace k3::bench {

// One measured figure, named as in the table of performance goals.
struct Result {
  std::string name;
  double value = 0;
  std::string unit;
  std::optional<double> floor_ratio;  // time over the byte floor at the same run's copy speed
  std::optional<double> copy_TBps;    // ceilings of the same run
  std::optional<double> gemm_TFLOPs;
};

// What the machine calls itself: the GPU's name, or the processor's with the number of usable cores.
std::string CpuName();

// Writes the figures as a JSON list with machine, commit and command. `device` is the GPU or CPU name. An empty path
// writes nothing. Throws std::runtime_error when the file cannot be written.
void WriteResults(const std::string& path, const std::vector<Result>& results, const std::string& device, int argc,
                  char** argv);

}  // namespace k3::bench
