#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/core/bfloat16.h"
#include "kernels/core/random_weights.h"
#include "kernels/core/shape_check.h"
#include "kernels/core/tree_sum.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {

MatrixView CpuOps::MakeTable(const HostTensor& table) {
  const bool plain = table.dtype == DType::kBF16 || table.dtype == DType::kF16 || table.dtype == DType::kF32;
  CheckTrue(plain && table.shape.size() == 2, "MakeTable", table.name + " must be a BF16, F16 or F32 matrix");
  const int64_t rows = table.shape[0], cols = table.shape[1];
  const int64_t ld = table.row_stride > 0 ? table.row_stride : cols;
  CheckTrue(ld >= cols, "MakeTable", table.name + " has a row stride below its width");
  const size_t element = SizeOf(table.dtype);
  const bool aligned = reinterpret_cast<uintptr_t>(table.data) % element == 0;
  if (table.data != nullptr && aligned) return {const_cast<void*>(table.data), table.dtype, rows, cols, ld};

  // Random or unaligned tables are copied, and live as long as the vectors.
  auto* copy = static_cast<char*>(Allocate(static_cast<size_t>(rows * cols) * element + 64));
  for (int64_t r = 0; r < rows; ++r) {
    char* row = copy + static_cast<size_t>(r * cols) * element;
    if (table.data != nullptr) {
      std::memcpy(row, static_cast<const char*>(table.data) + static_cast<size_t>(r * ld) * element,
                  static_cast<size_t>(cols) * element);
      continue;
    }
    for (int64_t c = 0; c < cols; ++c) {
      const float value = RandomWeight(table.random_seed, static_cast<uint64_t>(r * cols + c), table.random_stddev);
      if (table.dtype == DType::kF32) {
        std::memcpy(row + 4 * c, &value, 4);
      } else {
        const uint16_t half = table.dtype == DType::kBF16 ? FloatToBf16(value) : FloatToF16(value);
        std::memcpy(row + 2 * c, &half, 2);
      }
    }
  }
  const std::lock_guard<std::mutex> lock(vectors_mutex_);
  vectors_.insert(copy);
  return {copy, table.dtype, rows, cols, cols};
}

void CpuOps::BeginStep(const BeginStepParams& p, Stream) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (p.tokens[t] >= 0) continue;
    CheckPointer("BeginStep", "drawn", p.drawn);
    p.tokens[t] = std::max(0, p.drawn[-1 - int64_t{p.tokens[t]}]);
  }
  if (p.packed_table == nullptr) return;
  const int64_t stride = *p.packed_stride;
  CheckTrue(stride >= 0 && stride <= p.table_stride, "BeginStep",
            "packed_stride " + std::to_string(stride) + " is above table_stride " + std::to_string(p.table_stride));
  for (int64_t s = 0; s < p.sequences; ++s) {
    std::copy_n(p.packed_table + s * stride, stride, p.table + s * p.table_stride);
  }
}

void CpuOps::Embed(const EmbedParams& p, Stream) {
  CheckMatrix("Embed", "out", p.out, p.out.rows, p.table.cols, DType::kF32);
  CheckTrue(static_cast<bool>(p.table), "Embed", "table is absent");
  if (p.out.rows > 0) CheckPointer("Embed", "tokens", p.tokens);
  for (int64_t t = 0; t < p.out.rows; ++t) {
    const bool in_range = p.tokens[t] >= 0 && (p.is_share || p.tokens[t] < p.table.rows);
    CheckTrue(in_range, "Embed",
              "token " + std::to_string(p.tokens[t]) + " at row " + std::to_string(t) + " is outside the table of " +
                  std::to_string(p.table.rows) + " rows");
  }
  ForRows(p.out.rows, p.out.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = p.tokens[t] - (p.is_share ? p.first_id : 0);
      float* out = p.out.as<float>() + t * p.out.ld;
      if (row < 0 || row >= p.table.rows) {
        std::memset(out, 0, static_cast<size_t>(p.out.cols) * sizeof(float));
        continue;
      }
      const int64_t offset = row * p.table.ld;
      if (p.table.dtype == DType::kF32) {
        std::memcpy(out, p.table.as<float>() + offset, static_cast<size_t>(p.out.cols) * sizeof(float));
      } else if (p.table.dtype == DType::kBF16) {
        kernels_.widen_bf16(p.table.as<uint16_t>() + offset, p.out.cols, out);
      } else {
        for (int64_t c = 0; c < p.out.cols; ++c) out[c] = F16ToFloat(p.table.as<uint16_t>()[offset + c]);
      }
    }
  });
}

void CpuOps::CopyMatrix(const CopyMatrixParams& p, Stream) {
  CheckMatrix("CopyMatrix", "to", p.to, p.from.rows, p.from.cols, p.from.dtype);
  const size_t element = SizeOf(p.from.dtype);
  for (int64_t r = 0; r < p.from.rows; ++r) {
    std::memcpy(p.to.as<char>() + static_cast<size_t>(r * p.to.ld) * element,
                p.from.as<char>() + static_cast<size_t>(r * p.from.ld) * element,
                static_cast<size_t>(p.from.cols) * element);
  }
}

void CpuOps::TreeSum(const TreeSumParams& p, Stream) {
  CheckTrue(p.parts > 0 && p.parts <= kMaxTreeParts, "TreeSum",
            "parts must be in [1, " + std::to_string(kMaxTreeParts) + "], got " + std::to_string(p.parts));
  CheckTrue(p.dtype == DType::kF32, "TreeSum", std::string("dtype must be F32, got ") + Name(p.dtype));
  if (p.count == 0) return;
  CheckPointer("TreeSum", "data", p.data);
  CheckPointer("TreeSum", "out", p.out);
  const auto part = [&](int j) { return static_cast<const float*>(p.data) + j * p.count; };
  ForRows(p.count, p.parts,
          [&](int64_t begin, int64_t end, int) { k3::TreeSum(part, p.parts, begin, end, static_cast<float*>(p.out)); });
}

void CpuOps::GatherRows(const GatherRowsParams& p, Stream) {
  CheckMatrix("GatherRows", "out", p.out, p.out.rows, p.x.cols, p.x.dtype);
  if (p.out.rows > 0) CheckPointer("GatherRows", "row", p.row);
  const size_t element = SizeOf(p.x.dtype);
  for (int64_t i = 0; i < p.out.rows; ++i) {
    CheckTrue(p.row[i] >= 0 && p.row[i] < p.x.rows, "GatherRows",
              "row " + std::to_string(p.row[i]) + " is outside x of " + std::to_string(p.x.rows) + " rows");
    std::memcpy(p.out.as<char>() + static_cast<size_t>(i * p.out.ld) * element,
                p.x.as<char>() + static_cast<size_t>(p.row[i] * p.x.ld) * element,
                static_cast<size_t>(p.x.cols) * element);
  }
}

}  // namespace k3
