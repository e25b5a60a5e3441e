#include "engine/model/load_progress.h"

#include <unistd.h>

#include <cstdio>
#include <string>

#include "spdlog/spdlog.h"

namespace k3 {
namespace {

constexpr auto kLogInterval = std::chrono::seconds(5);
constexpr auto kBarInterval = std::chrono::milliseconds(100);
constexpr int kBarWidth = 40;

double SecondsLeft(const LoadProgress& progress) {
  if (progress.bytes_done == 0) return 0;
  return progress.seconds * static_cast<double>(progress.bytes_total - progress.bytes_done) / progress.bytes_done;
}

}  // namespace

LoadProgressPrinter::LoadProgressPrinter() : terminal_(isatty(STDERR_FILENO) == 1), last_(Clock::now()) {}

void LoadProgressPrinter::Update(const LoadProgress& progress) {
  const Clock::time_point now = Clock::now();
  if (now - last_ < (terminal_ ? std::chrono::milliseconds(kBarInterval) : std::chrono::milliseconds(kLogInterval)))
    return;
  last_ = now;
  if (!terminal_) {
    spdlog::info("loading weights: {:.1f} % ({:.2f} GB/s, {:.0f} s left)", progress.percent(),
                 progress.gigabytes_per_second(), SecondsLeft(progress));
    return;
  }
  const int filled = static_cast<int>(progress.percent() / 100 * kBarWidth);
  const std::string bar = std::string(filled, '#') + std::string(kBarWidth - filled, ' ');
  std::fprintf(stderr, "\r[%s] %5.1f %% %6.2f GB/s %5.0f s left ", bar.c_str(), progress.percent(),
               progress.gigabytes_per_second(), SecondsLeft(progress));
  std::fflush(stderr);
  drawn_ = true;
}

void LoadProgressPrinter::Finish(const LoadProgress& progress) {
  if (drawn_) std::fputc('\n', stderr);
  drawn_ = false;
  spdlog::info("loaded {:.3f} GB of weights in {:.2f} s ({:.2f} GB/s)", static_cast<double>(progress.bytes_done) / 1e9,
               progress.seconds, progress.gigabytes_per_second());
}

}  // namespace k3
