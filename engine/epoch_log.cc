#include "engine/epoch_log.h"

#include <spdlog/spdlog.h>

#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

constexpr size_t kDigits = 8;

}  // namespace

absl::StatusOr<std::unique_ptr<EpochLog>> EpochLog::Open(const std::string& path) {
  std::ofstream file(path, std::ios::app);
  if (!file) {
    return absl::InvalidArgumentError(absl::StrCat("--routing-log: cannot write ", path, ": ", std::strerror(errno)));
  }
  return std::unique_ptr<EpochLog>(new EpochLog(path, std::move(file)));
}

void EpochLog::Append(int32_t rank, const BiasEpoch& epoch) {
  std::string line =
      absl::StrCat("rank ", rank, " epoch ", epoch.number, " layers ",
                   epoch.delta.size() / static_cast<size_t>(epoch.groups), " groups ", epoch.groups, " delta ");
  for (const float value : epoch.delta) {
    absl::StrAppend(&line, absl::Hex(std::bit_cast<uint32_t>(value), absl::kZeroPad8));
  }
  line += '\n';
  std::lock_guard lock(mutex_);
  if (file_ << line << std::flush) return;
  file_.clear();  // there may be room again
  spdlog::error("--routing-log: cannot write to {}: epoch {} of rank {} cannot be replayed", path_, epoch.number, rank);
}

absl::StatusOr<BiasEpoch> EpochLog::Find(const std::string& path, int32_t rank, uint64_t number) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read the epoch log ", path));
  std::optional<BiasEpoch> found;
  int64_t at = 0;
  for (std::string line; std::getline(file, line);) {
    ++at;
    std::istringstream words(line);
    std::string names[5], digits;
    int32_t line_rank = -1, groups = 0;
    uint64_t line_number = 0;
    size_t layers = 0;
    words >> names[0] >> line_rank >> names[1] >> line_number >> names[2] >> layers >> names[3] >> groups >> names[4] >>
        digits;
    const bool named = names[0] == "rank" && names[1] == "epoch" && names[2] == "layers" && names[3] == "groups" &&
                       names[4] == "delta";
    const bool sized = groups > 0 && layers < 100000 && groups < 100000 &&
                       digits.size() == layers * static_cast<size_t>(groups) * kDigits;
    if (!words || !named || !sized) return absl::DataLossError(absl::StrCat(path, ": line ", at, " is damaged"));
    if (line_rank != rank || line_number != number) continue;
    BiasEpoch epoch;
    epoch.number = number;
    epoch.groups = groups;
    for (size_t i = 0; i < digits.size(); i += kDigits) {
      uint32_t bits = 0;
      const auto [end, error] = std::from_chars(digits.data() + i, digits.data() + i + kDigits, bits, 16);
      const float value = std::bit_cast<float>(bits);
      if (error != std::errc() || end != digits.data() + i + kDigits || !(value <= 0 && value >= -1)) {
        return absl::DataLossError(absl::StrCat(path, ": line ", at, " holds the bias ", digits.substr(i, kDigits)));
      }
      epoch.delta.push_back(value);
    }
    found = std::move(epoch);
  }
  if (found.has_value()) return *std::move(found);
  return absl::NotFoundError(absl::StrCat(path, " holds no epoch ", number, " of rank ", rank));
}

}  // namespace k3
