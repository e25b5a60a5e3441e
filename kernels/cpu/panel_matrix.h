#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/core/tensor.h"

namespace k3 {

enum class PanelFormat : uint8_t { kF32, kBf16, kMxfp4 };

// All elements of a BF16, F16 or F32 matrix, row-major without gaps, exactly.
std::vector<float> ToFloats(const HostTensor& matrix);

// A weight matrix W [n, k] stored for y = x W^T: panels of 32 outputs, and within a panel k-major, so that a kernel
// walks one stream and every output is one chain of multiply-adds over ascending k. Outputs are padded to 32 with
// zeros.
//
//   kF32    per k: 32 floats
//   kBf16   per k: 16 words of 32 bits, word c = output c in the low half, output 16 + c in the high half
//   kMxfp4  per 32 k: 32 scale bytes, then per k: 16 bytes, byte c = code of output c low, of output 16 + c high
class PanelMatrix {
 public:
  static constexpr int64_t kWidth = 32;

  PanelMatrix() = default;

  // Rows of all parts stacked, each [rows, k] BF16, F16 or F32. BF16 throughout stays BF16, anything else becomes F32.
  static PanelMatrix Pack(std::span<const HostTensor> parts);
  // `packed` [n, k/2] U8 and `scale` [n, k/32] U8, spec 2.3.
  static PanelMatrix PackMxfp4(const HostTensor& packed, const HostTensor& scale);
  // From values in memory: element (row, col) at values[row * row_stride + col * col_stride].
  static PanelMatrix PackValues(const float* values, int64_t n, int64_t k, int64_t row_stride, int64_t col_stride,
                                PanelFormat format);

  PanelFormat format = PanelFormat::kF32;
  int64_t n = 0;
  int64_t k = 0;

  int64_t panels() const { return (n + kWidth - 1) / kWidth; }
  size_t panel_bytes() const;
  size_t bytes() const { return static_cast<size_t>(panels()) * panel_bytes(); }
  const std::byte* panel(int64_t index) const { return data_.get() + static_cast<size_t>(index) * panel_bytes(); }

 private:
  struct FreeAligned {
    void operator()(std::byte* p) const;
  };
  PanelMatrix(PanelFormat format, int64_t n, int64_t k);
  std::byte* mutable_panel(int64_t index) { return data_.get() + static_cast<size_t>(index) * panel_bytes(); }
  // Writes row `row` of W, given as fp32 values that the format holds exactly.
  void StoreRow(int64_t row, const float* values);

  std::unique_ptr<std::byte[], FreeAligned> data_;
};

}  // namespace k3
