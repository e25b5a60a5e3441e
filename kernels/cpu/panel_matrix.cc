#include "kernels/cpu/panel_matrix.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "kernels/core/bfloat16.h"
#include "kernels/core/error.h"
#include "kernels/core/mxfp4.h"
#include "kernels/core/random_weights.h"

namespace k3 {
namespace {

std::string ShapeText(const HostTensor& t) {
  std::string text = std::string(Name(t.dtype)) + " [";
  for (size_t i = 0; i < t.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(t.shape[i]);
  return text + "]";
}

void CheckFloatMatrix(const HostTensor& t, int64_t cols) {
  const bool plain = t.dtype == DType::kBF16 || t.dtype == DType::kF16 || t.dtype == DType::kF32;
  if (plain && t.shape.size() == 2 && t.shape[1] == cols && (t.row_stride == 0 || t.row_stride >= cols)) return;
  throw DeviceError("weight " + t.name + ": expected BF16, F16 or F32 [rows, " + std::to_string(cols) + "], got " +
                    ShapeText(t));
}

void ReadRow(const HostTensor& t, int64_t row, float* out) {
  const int64_t cols = t.shape[1];
  const int64_t begin = row * (t.row_stride > 0 ? t.row_stride : cols);
  for (int64_t c = 0; c < cols; ++c) {
    if (t.data == nullptr) {
      const float value = RandomWeight(t.random_seed, static_cast<uint64_t>(row * cols + c), t.random_stddev);
      out[c] = t.dtype == DType::kBF16 ? Bf16ToFloat(FloatToBf16(value)) : value;
    } else if (t.dtype == DType::kF32) {
      std::memcpy(&out[c], static_cast<const char*>(t.data) + 4 * (begin + c), 4);
    } else {
      uint16_t half;
      std::memcpy(&half, static_cast<const char*>(t.data) + 2 * (begin + c), 2);
      out[c] = t.dtype == DType::kBF16 ? Bf16ToFloat(half) : F16ToFloat(half);
    }
  }
}

}  // namespace

std::vector<float> ToFloats(const HostTensor& matrix) {
  CheckFloatMatrix(matrix, matrix.shape.size() == 2 ? matrix.shape[1] : -1);
  std::vector<float> values(static_cast<size_t>(matrix.elements()));
  for (int64_t row = 0; row < matrix.shape[0]; ++row) ReadRow(matrix, row, values.data() + row * matrix.shape[1]);
  return values;
}

void PanelMatrix::FreeAligned::operator()(std::byte* p) const { std::free(p); }

PanelMatrix::PanelMatrix(PanelFormat format_in, int64_t n_in, int64_t k_in) : format(format_in), n(n_in), k(k_in) {
  const size_t size = (bytes() + 63) / 64 * 64;
  void* p = size > 0 ? std::aligned_alloc(64, size) : nullptr;
  if (size > 0 && p == nullptr) throw DeviceError("cannot allocate " + std::to_string(size) + " bytes for weights");
  data_.reset(static_cast<std::byte*>(p));
  if (size > 0) std::memset(p, 0, size);  // padding outputs: zero weights (MXFP4: code 0)
}

size_t PanelMatrix::panel_bytes() const {
  const size_t depth = static_cast<size_t>(k);
  switch (format) {
    case PanelFormat::kF32:
      return depth * kWidth * 4;
    case PanelFormat::kBf16:
      return depth * kWidth * 2;
    case PanelFormat::kMxfp4:
      return depth / kMxfp4Group * (kWidth + kMxfp4Group * kWidth / 2);
  }
  return 0;
}

void PanelMatrix::StoreRow(int64_t row, const float* values) {
  std::byte* panel = mutable_panel(row / kWidth);
  const int64_t c = row % kWidth;
  for (int64_t i = 0; i < k; ++i) {
    if (format == PanelFormat::kF32) {
      std::memcpy(panel + (i * kWidth + c) * 4, values + i, 4);
    } else {
      const uint16_t half = FloatToBf16(values[i]);
      std::memcpy(panel + i * 64 + (c % 16) * 4 + (c / 16) * 2, &half, 2);
    }
  }
}

PanelMatrix PanelMatrix::Pack(std::span<const HostTensor> parts) {
  if (parts.empty()) throw DeviceError("a weight needs at least one part");
  const int64_t k = parts[0].shape.size() == 2 ? parts[0].shape[1] : -1;
  int64_t n = 0;
  bool bf16 = true;
  for (const HostTensor& part : parts) {
    CheckFloatMatrix(part, k);
    n += part.shape[0];
    bf16 = bf16 && part.dtype == DType::kBF16;
  }
  PanelMatrix matrix(bf16 ? PanelFormat::kBf16 : PanelFormat::kF32, n, k);
  std::vector<float> values(static_cast<size_t>(k));
  int64_t row = 0;
  for (const HostTensor& part : parts) {
    for (int64_t r = 0; r < part.shape[0]; ++r) {
      ReadRow(part, r, values.data());
      matrix.StoreRow(row++, values.data());
    }
  }
  return matrix;
}

PanelMatrix PanelMatrix::PackValues(const float* values, int64_t n, int64_t k, int64_t row_stride, int64_t col_stride,
                                    PanelFormat format) {
  PanelMatrix matrix(format, n, k);
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < k; ++i) row[i] = values[r * row_stride + i * col_stride];
    matrix.StoreRow(r, row.data());
  }
  return matrix;
}

PanelMatrix PanelMatrix::PackMxfp4(const HostTensor& packed, const HostTensor& scale) {
  const bool shapes = packed.dtype == DType::kU8 && scale.dtype == DType::kU8 && packed.shape.size() == 2 &&
                      scale.shape.size() == 2 && packed.shape[0] == scale.shape[0] &&
                      packed.shape[1] * 2 == scale.shape[1] * kMxfp4Group;
  if (!shapes) {
    throw DeviceError("MXFP4 weight " + packed.name + ": expected U8 [rows, in/2] and scales U8 [rows, in/32], got " +
                      ShapeText(packed) + " and " + ShapeText(scale));
  }
  const int64_t n = packed.shape[0];
  const int64_t k = packed.shape[1] * 2;
  PanelMatrix matrix(PanelFormat::kMxfp4, n, k);
  const int64_t packed_stride = packed.row_stride > 0 ? packed.row_stride : packed.shape[1];
  const int64_t scale_stride = scale.row_stride > 0 ? scale.row_stride : scale.shape[1];
  const auto* codes = static_cast<const uint8_t*>(packed.data);
  const auto* scales = static_cast<const uint8_t*>(scale.data);
  const uint8_t random_scale = RandomWeightMxfp4Scale(packed.random_stddev);
  for (int64_t row = 0; row < n; ++row) {
    auto* panel = reinterpret_cast<uint8_t*>(matrix.mutable_panel(row / kWidth));
    const int64_t c = row % kWidth;
    for (int64_t group = 0; group < k / kMxfp4Group; ++group) {
      uint8_t* out = panel + group * (kWidth + kMxfp4Group * kWidth / 2);
      out[c] = scales != nullptr ? scales[row * scale_stride + group] : random_scale;
      for (int64_t i = 0; i < kMxfp4Group; ++i) {
        const int64_t column = (group * kMxfp4Group + i) / 2;
        const uint64_t random_index = static_cast<uint64_t>(row * packed.shape[1] + column);
        const uint8_t pair = codes != nullptr ? codes[row * packed_stride + column]
                                              : RandomWeightMxfp4Byte(packed.random_seed, random_index);
        const int code = (pair >> (4 * (i & 1))) & 15;
        out[kWidth + i * 16 + c % 16] |= static_cast<uint8_t>(code << (4 * (c / 16)));
      }
    }
  }
  return matrix;
}

}  // namespace k3
