#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/quantile_control.h"

namespace k3 {

// The bias epochs of a server as text, one a line, bit for bit: with it an answer can be computed again. Thread-safe.
//
//   rank 0 epoch 3 layers 92 groups 16 delta <8 hexadecimal digits a value>
class EpochLog {
 public:
  // Begins a file, or goes on behind what an earlier run has written.
  static absl::StatusOr<std::unique_ptr<EpochLog>> Open(const std::string& path);
  // An epoch that requests of data-parallel rank `rank` are routed by from now on. A failure is logged.
  void Append(int32_t rank, const BiasEpoch& epoch);

  // The epoch of a log, of the last run that has one of this number; NOT_FOUND when it is not there, DATA_LOSS with the
  // line when a line is damaged.
  static absl::StatusOr<BiasEpoch> Find(const std::string& path, int32_t rank, uint64_t number);

 private:
  EpochLog(std::string path, std::ofstream file) : path_(std::move(path)), file_(std::move(file)) {}
  const std::string path_;
  std::mutex mutex_;
  std::ofstream file_;
};

}  // namespace k3
