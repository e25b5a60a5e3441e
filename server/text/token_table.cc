#include "server/text/token_table.h"

#include <algorithm>
#include <cstring>

namespace k3 {
namespace {

template <typename T>
uint64_t Load(const char* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

uint64_t MultiplyFold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kMix1 = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kMix2 = 0xD1B54A32D192ED03ull;

}  // namespace

uint64_t TokenTable::Key(std::string_view bytes) {
  const char* p = bytes.data();
  const size_t n = bytes.size();
  // Overlapping loads: distinct for distinct bytes of one length.
  if (n <= 8) {
    if (n >= 4) return Load<uint32_t>(p) | Load<uint32_t>(p + n - 4) << 32;
    if (n >= 2) return Load<uint16_t>(p) | Load<uint8_t>(p + n - 1) << 16;
    return n == 1 ? Load<uint8_t>(p) : 0;
  }
  uint64_t hash = kMix1 ^ n;
  size_t i = 0;
  for (; i + 16 < n; i += 16) hash = MultiplyFold(Load<uint64_t>(p + i) ^ hash, Load<uint64_t>(p + i + 8) ^ kMix2);
  const size_t last = n - 8;
  return MultiplyFold(Load<uint64_t>(p + std::min(i, last)) ^ hash, Load<uint64_t>(p + last) ^ kMix2);
}

size_t TokenTable::FirstSlot(uint64_t key, size_t length) const {
  return MultiplyFold(key ^ length * kMix2, kMix1) >> shift_;
}

void TokenTable::Build(const std::vector<std::string>& tokens) {
  offsets_.assign(1, 0);
  arena_.clear();
  size_t capacity = 16;
  int bits = 4;
  while (capacity < tokens.size() * 2) {
    capacity *= 2;
    ++bits;
  }
  shift_ = 64 - bits;
  slots_.assign(capacity, Slot());
  pairs_.assign(1 << 16, kNotFound);
  std::fill(std::begin(bytes_), std::end(bytes_), kNotFound);
  max_token_bytes_ = 0;

  for (size_t id = 0; id < tokens.size(); ++id) {
    const std::string& token = tokens[id];
    arena_ += token;
    offsets_.push_back(static_cast<uint32_t>(arena_.size()));
    max_token_bytes_ = std::max(max_token_bytes_, token.size());
    const auto value = static_cast<int32_t>(id);
    if (token.size() == 1) bytes_[static_cast<uint8_t>(token[0])] = value;
    if (token.size() == 2) pairs_[static_cast<uint8_t>(token[0]) << 8 | static_cast<uint8_t>(token[1])] = value;
    const uint64_t key = Key(token);
    size_t slot = FirstSlot(key, token.size());
    while (slots_[slot].length != 0) slot = (slot + 1) & (capacity - 1);
    slots_[slot] = {key, static_cast<uint32_t>(token.size()), value};
  }
}

int32_t TokenTable::Find(std::string_view bytes) const {
  if (bytes.size() > max_token_bytes_ || bytes.empty()) return kNotFound;
  const uint64_t key = Key(bytes);
  for (size_t at = FirstSlot(key, bytes.size());; at = (at + 1) & (slots_.size() - 1)) {
    const Slot& slot = slots_[at];
    if (slot.length == 0) return kNotFound;
    if (slot.key == key && slot.length == bytes.size() && (bytes.size() <= 8 || Bytes(slot.id) == bytes))
      return slot.id;
  }
}

}  // namespace k3
