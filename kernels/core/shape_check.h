#pragma once

#include <string>

#include "kernels/core/error.h"
#include "kernels/core/tensor.h"

// Checks that both backends make on the host before an op runs. A violation throws DeviceError with op, parameter,
// expected and actual.
namespace k3 {

inline std::string Describe(const MatrixView& m) {
  if (!m) return "absent";
  return std::string(Name(m.dtype)) + " [" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "] ld " +
         std::to_string(m.ld);
}

inline void CheckMatrix(const char* op, const char* name, const MatrixView& m, int64_t rows, int64_t cols,
                        DType dtype) {
  if (m && m.rows == rows && m.cols == cols && m.dtype == dtype && m.ld >= cols) return;
  // A matrix without elements may lack memory.
  if (!m && rows == 0 && m.rows == 0 && m.cols == cols) return;
  throw DeviceError(std::string(op) + ": " + name + " must be " + Name(dtype) + " [" + std::to_string(rows) + ", " +
                    std::to_string(cols) + "], got " + Describe(m));
}

inline void CheckTrue(bool condition, const char* op, const std::string& what) {
  if (!condition) throw DeviceError(std::string(op) + ": " + what);
}

inline void CheckEqual(const char* op, const char* name, int64_t actual, int64_t expected) {
  if (actual == expected) return;
  throw DeviceError(std::string(op) + ": " + name + " must be " + std::to_string(expected) + ", got " +
                    std::to_string(actual));
}

inline void CheckPointer(const char* op, const char* name, const void* pointer) {
  if (pointer == nullptr) throw DeviceError(std::string(op) + ": " + name + " is null");
}

}  // namespace k3
