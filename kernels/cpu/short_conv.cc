#include "kernels/cpu/short_conv.h"

#include <cstring>

#include "kernels/cpu/cpu_ops.h"

namespace k3 {

void StoreConvState(const ConvHistory& history, int64_t count, int64_t channels, int width, float* to) {
  // The row at offset r is what tap r of token `count` reads, which for short chunks is an older row of the state
  // itself.
  for (int r = 0; r + 1 < width; ++r) {
    std::memmove(to + r * channels, history.Row(count, r), static_cast<size_t>(channels) * sizeof(float));
  }
}

void TransposeTaps(const float* taps, int64_t channels, int width, float* out) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int j = 0; j < width; ++j) out[j * channels + c] = taps[c * width + j];
  }
}

const float* CpuOps::TransposedTaps(const float* taps, int64_t channels, int width, float* scratch) {
  const auto found = transposed_taps_.find(taps);
  if (found != transposed_taps_.end()) return found->second.data();
  bool owned = false;
  {
    const std::lock_guard<std::mutex> lock(vectors_mutex_);
    owned = vectors_.count(taps) > 0;
  }
  if (owned) {
    std::vector<float>& transposed = transposed_taps_[taps];
    transposed.resize(static_cast<size_t>(channels * width));
    scratch = transposed.data();
  }
  TransposeTaps(taps, channels, width, scratch);
  return scratch;
}

}  // namespace k3
