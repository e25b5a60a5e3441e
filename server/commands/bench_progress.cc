#include "server/commands/bench_progress.h"

#include <algorithm>
#include <chrono>
#include <ostream>
#include <utility>

#include "absl/strings/str_format.h"

namespace k3 {
namespace {

constexpr int64_t kBarWidth = 30;
constexpr auto kLineInterval = std::chrono::seconds(10);

}  // namespace

std::string ProgressLine(const std::string& name, const BenchProgress& progress) {
  const int64_t filled =
      progress.total > 0 ? std::min(kBarWidth, kBarWidth * progress.done / progress.total) : kBarWidth;
  const double rate = progress.seconds > 0 ? static_cast<double>(progress.output_tokens) / progress.seconds : 0;
  return absl::StrFormat("%s [%s%s] %d/%d, %d in flight, %.1f tokens/s, %d failed", name,
                         std::string(static_cast<size_t>(filled), '#'),
                         std::string(static_cast<size_t>(kBarWidth - filled), '.'), progress.done, progress.total,
                         progress.sent - progress.done, rate, progress.failed);
}

BenchProgressPrinter::BenchProgressPrinter(std::ostream& out, bool is_terminal, std::string name)
    : out_(out), is_terminal_(is_terminal), name_(std::move(name)), next_(Clock::now() + kLineInterval) {}

void BenchProgressPrinter::Show(const BenchProgress& progress) {
  const Clock::time_point now = Clock::now();
  if (!is_terminal_) {
    if (now < next_) return;
    next_ = now + kLineInterval;
    out_ << ProgressLine(name_, progress) << std::endl;
    return;
  }
  std::string line = ProgressLine(name_, progress);
  const size_t length = line.size();
  if (length < drawn_) line.append(drawn_ - length, ' ');
  drawn_ = length;
  out_ << '\r' << line << std::flush;
}

void BenchProgressPrinter::Finish() {
  if (is_terminal_ && drawn_ > 0) out_ << std::endl;
  drawn_ = 0;
}

}  // namespace k3
