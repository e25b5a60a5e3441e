#include "server/text/token_table.h"

#include <algorithm>

namespace k3 {

uint64_t TokenTable::LongKey(std::string_view bytes) {
  const char* p = bytes.data();
  const size_t n = bytes.size();
  uint64_t hash = kMix1 ^ n;
  size_t i = 0;
  for (; i + 16 < n; i += 16) hash = MultiplyFold(Load<uint64_t>(p + i) ^ hash, Load<uint64_t>(p + i + 8) ^ kMix2);
  const size_t last = n - 8;
  return MultiplyFold(Load<uint64_t>(p + std::min(i, last)) ^ hash, Load<uint64_t>(p + last) ^ kMix2);
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

}  // namespace k3
