#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/model/mapped_file.h"
#include "engine/model/safetensors.h"
#include "kernels/core/tensor.h"

namespace k3 {

// The tensors of a model directory: one `model.safetensors`, or the shards that `model.safetensors.index.json` names.
// Open reads headers only, checks every file and that index and files say the same; afterwards each name stands for
// exactly one tensor. Immutable and readable from any thread; tensor data stay mapped while this object lives.
class Checkpoint {
 public:
  // Where a tensor is: shard number and position in that shard's header.
  struct Location {
    uint32_t shard = 0;
    uint32_t index = 0;
  };

  // NotFound: no directory, or no weights in it. DataLoss: anything wrong with the files. Messages name file and tensor
  // and list at most ten names.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& dir);
  // Whether there are any weight files. `plan` works without, also beside an index whose files are not there yet.
  static bool Exists(const std::string& dir);

  std::optional<Location> Find(std::string_view name) const;
  const StoredTensor& Stored(Location at) const { return shards_[at.shard].header.tensors[at.index]; }
  std::string_view Name(Location at) const { return shards_[at.shard].header.Name(Stored(at)); }
  std::span<const int64_t> Shape(Location at) const { return shards_[at.shard].header.Shape(Stored(at)); }
  std::optional<DType> Type(Location at) const { return SafetensorsHeader::Type(Stored(at)); }
  uint64_t Bytes(Location at) const { return Stored(at).end - Stored(at).begin; }
  const MappedFile& File(Location at) const { return *shards_[at.shard].file; }
  // The tensor as it lies in the file. Its type must be one of ours.
  HostTensor View(Location at) const;

  size_t num_shards() const { return shards_.size(); }
  const MappedFile& shard_file(size_t shard) const { return *shards_[shard].file; }
  const SafetensorsHeader& shard_header(size_t shard) const { return shards_[shard].header; }
  size_t num_tensors() const { return by_name_.size(); }
  uint64_t total_bytes() const { return total_bytes_; }

 private:
  struct Shard {
    std::unique_ptr<MappedFile> file;
    SafetensorsHeader header;
  };

  absl::Status OpenShard(const std::string& path);
  absl::Status IndexNames();
  absl::Status OpenSharded(const std::string& dir, const std::string& index_path);

  std::vector<Shard> shards_;
  absl::flat_hash_map<std::string_view, Location> by_name_;  // keys point into the headers
  uint64_t total_bytes_ = 0;
};

}  // namespace k3
