#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

// The mergeable tokens of a vocabulary: bytes of an id, id of bytes. Ids are 0, 1, 2, ... in the order of Build and
// double as merge ranks. Immutable after Build.
class TokenTable {
 public:
  static constexpr int32_t kNotFound = -1;

  // Tokens must be distinct and non-empty.
  void Build(const std::vector<std::string>& tokens);

  int32_t size() const { return static_cast<int32_t>(offsets_.size()) - 1; }
  size_t max_token_bytes() const { return max_token_bytes_; }

  std::string_view Bytes(int32_t id) const {
    return std::string_view(arena_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }

  // The id of exactly these bytes, or kNotFound.
  int32_t Find(std::string_view bytes) const;
  // Same for two bytes, by direct indexing: the first round of every merge.
  int32_t FindPair(uint8_t first, uint8_t second) const { return pairs_[first << 8 | second]; }
  int32_t FindByte(uint8_t byte) const { return bytes_[byte]; }

 private:
  // Up to 8 bytes the key is the bytes themselves; beyond that a hash, and the arena decides.
  struct Slot {
    uint64_t key = 0;
    uint32_t length = 0;  // 0 = empty slot
    int32_t id = 0;
  };
  static uint64_t Key(std::string_view bytes);
  size_t FirstSlot(uint64_t key, size_t length) const;

  std::string arena_;
  std::vector<uint32_t> offsets_;
  std::vector<Slot> slots_;  // open addressing, linear probing; a power of two
  int shift_ = 64;
  size_t max_token_bytes_ = 0;
  std::vector<int32_t> pairs_;
  int32_t bytes_[256];
};

}  // namespace k3
