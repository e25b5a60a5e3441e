#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/dtype.h"

namespace k3 {

// A tensor in host memory that someone else owns: row-major. Checkpoint tensors are handed to the backends in this
// form, pointing into the mapped file; they must stay mapped while a backend may keep the pointer (see Ops::MakeTable).
// With `data` null the tensor stands for normally distributed random values (mean 0, deviation `random_stddev`) drawn
// from a counter-based generator keyed by (random_seed, element index): `serve --random-weights`.
struct HostTensor {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t row_stride =
      0;             // 2-D only: elements between row starts, 0 = contiguous; a column shard has row_stride > cols
  std::string name;  // for error messages
  float random_stddev = 0;
  uint64_t random_seed = 0;

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  size_t bytes() const { return static_cast<size_t>(elements()) * SizeOf(dtype); }
};

// A matrix in device memory that someone else owns: `rows` x `cols`, row i starts at element i * ld. A column slice of
// a wider matrix is again a MatrixView. A null `data` means "absent" where a parameter struct allows it.
struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;  // elements between row starts; ld >= cols

  explicit operator bool() const { return data != nullptr; }
  MatrixView Columns(int64_t begin, int64_t count) const {
    return {static_cast<char*>(data) + begin * static_cast<int64_t>(SizeOf(dtype)), dtype, rows, count, ld};
  }
  MatrixView Rows(int64_t begin, int64_t count) const {
    return {static_cast<char*>(data) + begin * ld * static_cast<int64_t>(SizeOf(dtype)), dtype, count, cols, ld};
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace k3
