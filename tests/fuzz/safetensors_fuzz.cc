// Any bytes as a safetensors file, whole or the beginning of a longer one: an error or a header that holds what
// ParseSafetensorsHeader promises.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "engine/model/json_cursor.h"
#include "engine/model/safetensors.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void Check(std::span<const uint8_t> head, uint64_t file_size) {
  const auto header = k3::ParseSafetensorsHeader(head, file_size, "fuzz");
  if (!header.ok()) {
    Require(header.status().code() == absl::StatusCode::kDataLoss && !header.status().message().empty());
    return;
  }
  uint64_t end = 8;
  for (const k3::StoredTensor& tensor : header->tensors) {
    Require(tensor.begin >= end && tensor.end >= tensor.begin && tensor.end <= file_size);
    end = tensor.end;
    Require(header->Name(tensor).size() == tensor.name_size);
    for (int64_t dim : header->Shape(tensor)) Require(dim >= 0);
    Require(k3::SafetensorsHeader::TypeName(tensor) != nullptr);
  }
  Require(header->tensors.empty() || end == file_size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const uint8_t> bytes(data, size);
  Check(bytes, size);
  // As the header alone, its length put right, with as much data behind it as the first eight bytes say.
  std::vector<uint8_t> file(bytes.begin(), bytes.end());
  if (size >= 8) {
    uint64_t data_size = 0;
    std::memcpy(&data_size, data, 8);
    const uint64_t length = size - 8;
    std::memcpy(file.data(), &length, 8);
    Check(file, size + data_size % (uint64_t{1} << 50));
  }
  k3::JsonCursor cursor({reinterpret_cast<const char*>(data), size});
  if (cursor.SkipValue(16)) {
    Require(cursor.offset() <= size);
    cursor.AtEnd();
  }
  return 0;
}
