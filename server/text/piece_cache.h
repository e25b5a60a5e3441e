#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace k3 {

// Remembers what short pieces were merged into, for the length of one Encode: words come back, and looking one up is
// cheaper than merging it again. Direct-mapped, 96 KiB, so that it stays in the second-level cache.
class PieceCache {
 public:
  static constexpr size_t kMaxPieceBytes = 16;
  static constexpr size_t kMaxIds = 7;

  PieceCache() : entries_(kEntries) {}

  // The ids of a piece of 1 to kMaxPieceBytes bytes; empty when unknown.
  std::span<const int32_t> Find(std::string_view piece) const {
    const Key key = MakeKey(piece);
    const Entry& entry = entries_[SlotOf(key)];
    if (entry.key != key) return {};
    return {entry.ids, entry.count};
  }

  void Store(std::string_view piece, std::span<const int32_t> ids) {
    if (ids.size() > kMaxIds) return;
    const Key key = MakeKey(piece);
    Entry& entry = entries_[SlotOf(key)];
    entry.key = key;
    entry.count = static_cast<uint32_t>(ids.size());
    std::copy(ids.begin(), ids.end(), entry.ids);
  }

 private:
  static constexpr int kEntryBits = 11;
  static constexpr size_t kEntries = 1 << kEntryBits;

  // The bytes, zero-padded, and their number: no two pieces share one, and size 0 is no piece's.
  struct Key {
    uint64_t low = 0;
    uint64_t high = 0;
    uint32_t size = 0;

    bool operator==(const Key&) const = default;
  };
  struct Entry {
    Key key;
    uint32_t count = 0;
    int32_t ids[kMaxIds];
  };

  static Key MakeKey(std::string_view piece) {
    char bytes[kMaxPieceBytes] = {};
    std::memcpy(bytes, piece.data(), piece.size());
    Key key;
    std::memcpy(&key.low, bytes, 8);
    std::memcpy(&key.high, bytes + 8, 8);
    key.size = static_cast<uint32_t>(piece.size());
    return key;
  }

  static size_t SlotOf(const Key& key) {
    const uint64_t mixed = (key.low ^ (key.high << 23 | key.high >> 41) ^ key.size) * 0x9E3779B97F4A7C15ull;
    return mixed >> (64 - kEntryBits);
  }

  std::vector<Entry> entries_;
};

}  // namespace k3
