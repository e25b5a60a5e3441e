#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// The fixed order in which partial sums of ranks and of expert groups are added: neighbours first, then neighbours of
// the pairs, and so on. For a power of two this is a balanced binary tree over contiguous groups, so that a rank that
// adds its own group and a tree over ranks give together the bits of one rank that adds all groups.
namespace k3 {

// values[0] becomes the sum of all n; the rest is overwritten.
template <typename T>
inline void AddTree(T* values, int n, int64_t width) {
  for (int stride = 1; stride < n; stride *= 2) {
    for (int i = 0; i + stride < n; i += 2 * stride) {
      for (int64_t c = 0; c < width; ++c) values[i * width + c] += values[(i + stride) * width + c];
    }
  }
}

inline constexpr int kMaxTreeParts = 1024;

// out[i] = sum over j of parts(j)[i] for i in [begin, end). `parts(j)` yields a const float*. `out` may be one of them.
template <typename Parts>
void TreeSum(const Parts& parts, int n, int64_t begin, int64_t end, float* out) {
  constexpr int64_t kBudget = 8192;  // floats of the tile on the stack
  const int64_t width = std::clamp<int64_t>(kBudget / n, 1, 256);
  float tile[kBudget];
  for (int64_t at = begin; at < end; at += width) {
    const int64_t count = std::min(width, end - at);
    for (int j = 0; j < n; ++j)
      std::memcpy(tile + j * count, parts(j) + at, static_cast<size_t>(count) * sizeof(float));
    AddTree(tile, n, count);
    std::memcpy(out + at, tile, static_cast<size_t>(count) * sizeof(float));
  }
}

}  // namespace k3
