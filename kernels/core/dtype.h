#pragma once

#include <cstddef>
#include <cstdint>

namespace k3 {

// Element types that occur in released checkpoints or in device buffers.
enum class DType : uint8_t { kF32, kBF16, kF16, kU8, kI32, kI64 };

constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
      return 1;
    case DType::kI64:
      return 8;
  }
  return 0;
}

constexpr const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kU8:
      return "U8";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
  }
  return "?";
}

}  // namespace k3
