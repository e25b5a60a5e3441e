#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

// The mergeable tokens of a vocabulary: bytes of an id, id of bytes. Ids are 0, 1, 2, ... in the order of Build and
// double as merge ranks. Immutable after Build.
class TokenTable {
 public:
  static constexpr int32_t kNotFound = -1;
  static constexpr int32_t kMaxTokens = (1 << 24) - 1;

  // Tokens must be distinct and non-empty, at most kMaxTokens.
  void Build(const std::vector<std::string>& tokens);

  int32_t size() const { return static_cast<int32_t>(offsets_.size()) - 1; }
  size_t max_token_bytes() const { return max_token_bytes_; }

  std::string_view Bytes(int32_t id) const {
    return std::string_view(arena_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }

  // The id of exactly these bytes, or kNotFound.
  int32_t Find(std::string_view bytes) const {
    if (bytes.size() > max_token_bytes_ || bytes.empty()) return kNotFound;
    const uint64_t key = Key(bytes);
    for (size_t at = FirstSlot(key, bytes.size());; at = (at + 1) & (slots_.size() - 1)) {
      const Slot& slot = slots_[at];
      if (slot.key == key && slot.length == bytes.size() && (bytes.size() <= 8 || Bytes(slot.id) == bytes))
        return slot.id;
      if (slot.length == 0) return kNotFound;
    }
  }
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
  template <typename T>
  static uint64_t Load(const char* p) {
    T value;
    std::memcpy(&value, p, sizeof(T));
    return value;
  }
  static uint64_t MultiplyFold(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  static uint64_t Key(std::string_view bytes) {
    const char* p = bytes.data();
    const size_t n = bytes.size();
    if (n > 8) return LongKey(bytes);
    // Overlapping loads: distinct for distinct bytes of one length.
    if (n >= 4) return Load<uint32_t>(p) | Load<uint32_t>(p + n - 4) << 32;
    if (n >= 2) return Load<uint16_t>(p) | Load<uint8_t>(p + n - 1) << 16;
    return n == 1 ? Load<uint8_t>(p) : 0;
  }
  static uint64_t LongKey(std::string_view bytes);
  size_t FirstSlot(uint64_t key, size_t length) const { return MultiplyFold(key ^ length * kMix2, kMix1) >> shift_; }

  static constexpr uint64_t kMix1 = 0x9E3779B97F4A7C15ull;
  static constexpr uint64_t kMix2 = 0xD1B54A32D192ED03ull;

  std::string arena_;
  std::vector<uint32_t> offsets_;
  std::vector<Slot> slots_;  // open addressing, linear probing; a power of two
  int shift_ = 64;
  size_t max_token_bytes_ = 0;
  std::vector<int32_t> pairs_;
  int32_t bytes_[256];
};

}  // namespace k3
