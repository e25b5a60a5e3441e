#pragma once

#include <malloc.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace k3::testing {

// Resident memory of this process in MB, without what the allocator keeps for later.
inline double ResidentMegabytes() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
  std::ifstream file("/proc/self/statm");
  double total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) * 1e-6;
}

// The most that was ever resident.
inline double PeakMegabytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stod(line.substr(6)) * 1.024e-3;
  }
  return 0;
}

}  // namespace k3::testing
