#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace k3 {

// A whole file mapped read-only for as long as this object lives. Safe to read from any thread. A file that shrinks
// while mapped faults the reader: checkpoints must not be changed under a running server.
class MappedFile {
 public:
  // NotFound when the file does not exist, DataLoss when it is no regular file, else the system's error.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  const uint8_t* data() const { return data_; }  // null when the file is empty
  std::span<const uint8_t> bytes() const { return {data_, size_}; }

  // Hints about [begin, end): start reading it ahead, or give its memory back (the bytes stay readable, from the page
  // cache or the disk).
  void Prefetch(uint64_t begin, uint64_t end) const;
  void Release(uint64_t begin, uint64_t end) const;

 private:
  MappedFile(std::string path, const uint8_t* data, uint64_t size) : path_(std::move(path)), data_(data), size_(size) {}

  std::string path_;
  const uint8_t* data_;
  uint64_t size_;
};

}  // namespace k3
