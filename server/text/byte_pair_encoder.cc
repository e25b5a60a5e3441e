#include "server/text/byte_pair_encoder.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <queue>

namespace k3 {
namespace {

constexpr uint32_t kNoRank = UINT32_MAX;
// Up to here scanning for the lowest rank beats keeping a heap.
constexpr size_t kShortPiece = 96;

uint32_t ToRank(int32_t id) { return id == TokenTable::kNotFound ? kNoRank : static_cast<uint32_t>(id); }

}  // namespace

void BytePairEncoder::Encode(std::string_view piece, std::vector<int32_t>* ids) const {
  if (piece.size() == 1) {
    ids->push_back(table_.FindByte(static_cast<uint8_t>(piece[0])));
    return;
  }
  const int32_t whole = table_.Find(piece);
  if (whole != TokenTable::kNotFound) {
    ids->push_back(whole);
  } else if (piece.size() <= kShortPiece) {
    MergeShort(piece, ids);
  } else {
    MergeLong(piece, ids);
  }
}

void BytePairEncoder::MergeShort(std::string_view piece, std::vector<int32_t>* ids) const {
  // Part i is [start[i], start[i + 1]); rank[i] is that of parts i and i + 1 joined.
  uint8_t start[kShortPiece + 1];
  uint32_t rank[kShortPiece];
  int32_t id[kShortPiece];
  size_t parts = piece.size();
  for (size_t i = 0; i < parts; ++i) {
    start[i] = static_cast<uint8_t>(i);
    id[i] = table_.FindByte(static_cast<uint8_t>(piece[i]));
    rank[i] = i + 1 < parts ? ToRank(table_.FindPair(piece[i], piece[i + 1])) : kNoRank;
  }
  start[parts] = static_cast<uint8_t>(parts);

  const auto joined_rank = [&](size_t i) {
    return i + 1 < parts ? ToRank(table_.Find(piece.substr(start[i], start[i + 2] - start[i]))) : kNoRank;
  };
  while (parts > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < parts; ++i) {
      if (rank[i] < rank[best]) best = i;
    }
    if (rank[best] == kNoRank) break;
    id[best] = static_cast<int32_t>(rank[best]);
    --parts;
    const size_t tail = parts - best - 1;
    std::memmove(&start[best + 1], &start[best + 2], (tail + 1) * sizeof(start[0]));
    std::memmove(&rank[best + 1], &rank[best + 2], tail * sizeof(rank[0]));
    std::memmove(&id[best + 1], &id[best + 2], tail * sizeof(id[0]));
    rank[best] = joined_rank(best);
    if (best > 0) rank[best - 1] = joined_rank(best - 1);
  }
  ids->insert(ids->end(), id, id + parts);
}

void BytePairEncoder::MergeLong(std::string_view piece, std::vector<int32_t>* ids) const {
  // Parts are named by their first byte and linked; a merge removes the right one.
  struct Part {
    uint32_t previous;
    uint32_t next;  // also the part's end
    uint32_t rank;  // joined with the next part
    int32_t id;
  };
  const auto size = static_cast<uint32_t>(piece.size());
  std::vector<Part> parts(size);
  // Rank in the upper half, position in the lower: the smallest is the lowest rank, leftmost. Entries are not removed
  // when their pair changes; one that disagrees with its part's rank is stale.
  std::vector<uint64_t> initial;
  initial.reserve(size);
  for (uint32_t i = 0; i < size; ++i) {
    const uint32_t rank = i + 1 < size ? ToRank(table_.FindPair(piece[i], piece[i + 1])) : kNoRank;
    parts[i] = {i - 1, i + 1, rank, table_.FindByte(static_cast<uint8_t>(piece[i]))};
    if (rank != kNoRank) initial.push_back(uint64_t{rank} << 32 | i);
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap(std::greater<>(), std::move(initial));

  const auto update = [&](uint32_t i) {
    const uint32_t next = parts[i].next;
    parts[i].rank = next < size ? ToRank(table_.Find(piece.substr(i, parts[next].next - i))) : kNoRank;
    if (parts[i].rank != kNoRank) heap.push(uint64_t{parts[i].rank} << 32 | i);
  };
  while (!heap.empty()) {
    const auto rank = static_cast<uint32_t>(heap.top() >> 32);
    const auto at = static_cast<uint32_t>(heap.top());
    heap.pop();
    if (parts[at].rank != rank) continue;
    const uint32_t removed = parts[at].next;
    parts[at].id = static_cast<int32_t>(rank);
    parts[at].next = parts[removed].next;
    if (parts[at].next < size) parts[parts[at].next].previous = at;
    parts[removed].rank = kNoRank;
    update(at);
    if (at > 0) update(parts[at].previous);
  }
  for (uint32_t i = 0; i < size; i = parts[i].next) ids->push_back(parts[i].id);
}

}  // namespace k3
