#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/dtype.h"

namespace k3 {

// One tensor as a safetensors header describes it. Begin and end count from the first byte of the file.
struct StoredTensor {
  uint64_t begin = 0;
  uint64_t end = 0;
  size_t name_begin = 0;  // into SafetensorsHeader::names
  uint32_t name_size = 0;
  uint32_t dims_begin = 0;  // into SafetensorsHeader::dims
  uint16_t rank = 0;
  uint16_t type = 0;  // index of the format's type table, see SafetensorsHeader::TypeName
};

// The parsed header of one file, compact: names and dimensions lie in two shared arrays (the full K3 checkpoint has
// about half a million tensors). Tensors are in the order of their data.
class SafetensorsHeader {
 public:
  std::vector<char> names;
  std::vector<int64_t> dims;
  std::vector<StoredTensor> tensors;

  std::string_view Name(const StoredTensor& tensor) const {
    return {names.data() + tensor.name_begin, tensor.name_size};
  }
  std::span<const int64_t> Shape(const StoredTensor& tensor) const {
    return {dims.data() + tensor.dims_begin, tensor.rank};
  }
  static const char* TypeName(const StoredTensor& tensor);
  // Absent for the format's types that no released checkpoint of these models uses, such as F64.
  static std::optional<DType> Type(const StoredTensor& tensor);
};

// Parses and checks the header of a file whose first bytes are `head` (all of the header must be in it, unless the file
// is too short for it) and whose size is `file_size`:
//   8 + header length + largest end = file size; every offset inside, begin <= end; no overlap and no hole between
//   tensors; bytes = shape x type; known types; names unique.
// Errors are DataLoss and name the file (`file` is used in messages only), the tensor, what was expected and found.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::span<const uint8_t> head, uint64_t file_size,
                                                         const std::string& file);

}  // namespace k3
