#pragma once

#include <malloc.h>
#include <unistd.h>

#include <fstream>

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

}  // namespace k3::testing
