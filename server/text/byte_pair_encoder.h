#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "server/text/piece_cache.h"
#include "server/text/token_table.h"

namespace k3 {

// Byte-pair merging of one piece: starting from single bytes, always the adjacent pair whose joined bytes have the
// lowest rank, the leftmost among equals, until no pair is in the vocabulary. O(n log n) in the piece's length. Holds a
// reference to the table, in which all 256 single bytes must be present.
class BytePairEncoder {
 public:
  explicit BytePairEncoder(const TokenTable& table) : table_(table) {}

  // Appends the ids of `piece`. A piece that is itself a token is that token, even if merging would not reach it.
  // `cache` may be null; it must have served this encoder only.
  void Encode(std::string_view piece, PieceCache* cache, std::vector<int32_t>* ids) const;

 private:
  void Merge(std::string_view piece, std::vector<int32_t>* ids) const;
  void MergeShort(std::string_view piece, std::vector<int32_t>* ids) const;
  void MergeLong(std::string_view piece, std::vector<int32_t>* ids) const;

  const TokenTable& table_;
};

}  // namespace k3
