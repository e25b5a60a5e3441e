#include "server/descriptor_limit.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "spdlog/spdlog.h"

namespace k3 {
namespace {

// Descriptors beside those of the connections.
constexpr uint64_t kOtherDescriptors = 1024;
constexpr int kFewConnections = 1024;  // fewer are worth a warning

}  // namespace

int FitDescriptorLimit(int wanted, int listeners) {
  rlimit limit;
  std::error_code error;
  const std::filesystem::directory_iterator files("/proc/self/fd", error);
  if (error || getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  const auto open = static_cast<uint64_t>(std::distance(begin(files), end(files)));
  const rlim_t needed = static_cast<rlim_t>(wanted) * static_cast<rlim_t>(listeners) + kOtherDescriptors + open;
  if (limit.rlim_cur < needed) {
    limit.rlim_cur = limit.rlim_max == RLIM_INFINITY ? needed : std::min(needed, limit.rlim_max);
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
  }
  const int fit = ConnectionsWithin(wanted, listeners, limit.rlim_cur, open);
  if (fit != wanted) {
    const auto level = fit < kFewConnections ? spdlog::level::warn : spdlog::level::info;
    spdlog::log(level, "at most {} connections of each front end, not {}: the limit of open files is {} (ulimit -n)",
                fit, wanted, limit.rlim_cur);
  }
  return fit;
}

int ConnectionsWithin(int wanted, int listeners, uint64_t descriptors, uint64_t open) {
  const uint64_t left = descriptors > open ? descriptors - open : 0;
  const uint64_t fit =
      (left - std::min(kOtherDescriptors, (left + 1) / 2)) / static_cast<uint64_t>(std::max(listeners, 1));
  return static_cast<int>(std::clamp<uint64_t>(fit, 1, static_cast<uint64_t>(std::max(wanted, 1))));
}

}  // namespace k3
