#include "server/text/byte_pair_encoder.h"

#include <algorithm>
#include <functional>
#include <queue>

namespace k3 {
namespace {

constexpr uint32_t kNoRank = UINT32_MAX;
// Up to here scanning for the lowest rank beats keeping a heap.
constexpr size_t kShortPiece = 64;
static_assert(kShortPiece < 256 && TokenTable::kMaxTokens < 1 << 24);

uint32_t ToRank(int32_t id) { return id == TokenTable::kNotFound ? kNoRank : static_cast<uint32_t>(id); }

}  // namespace

void BytePairEncoder::Encode(std::string_view piece, PieceCache* cache, std::vector<int32_t>* ids) const {
  if (piece.size() == 1) {
    ids->push_back(table_.FindByte(static_cast<uint8_t>(piece[0])));
    return;
  }
  const int32_t whole = table_.Find(piece);
  if (whole != TokenTable::kNotFound) {
    ids->push_back(whole);
    return;
  }
  if (cache == nullptr || piece.size() > PieceCache::kMaxPieceBytes) {
    Merge(piece, ids);
    return;
  }
  const std::span<const int32_t> known = cache->Find(piece);
  if (!known.empty()) {
    ids->insert(ids->end(), known.begin(), known.end());
    return;
  }
  const size_t before = ids->size();
  Merge(piece, ids);
  cache->Store(piece, std::span<const int32_t>(*ids).subspan(before));
}

void BytePairEncoder::Merge(std::string_view piece, std::vector<int32_t>* ids) const {
  if (piece.size() <= kShortPiece) {
    MergeShort(piece, ids);
  } else {
    MergeLong(piece, ids);
  }
}

void BytePairEncoder::MergeShort(std::string_view piece, std::vector<int32_t>* ids) const {
  // Parts are named by their first byte. order[i] is the rank of part i joined with the next one, above i itself: the
  // smallest is the lowest rank, leftmost. Where no part begins, or the pair is no token, it is kNone.
  constexpr uint32_t kNone = UINT32_MAX;
  uint32_t order[kShortPiece];
  int32_t id[kShortPiece];
  uint8_t next[kShortPiece];  // also the part's end
  uint8_t previous[kShortPiece + 1];
  const size_t size = piece.size();
  const auto ordered = [](int32_t joined, size_t i) {
    return joined == TokenTable::kNotFound ? kNone : static_cast<uint32_t>(joined) << 8 | static_cast<uint32_t>(i);
  };
  for (size_t i = 0; i < size; ++i) {
    order[i] = i + 1 < size ? ordered(table_.FindPair(piece[i], piece[i + 1]), i) : kNone;
    id[i] = table_.FindByte(static_cast<uint8_t>(piece[i]));
    next[i] = static_cast<uint8_t>(i + 1);
    previous[i] = static_cast<uint8_t>(i - 1);
  }
  const auto update = [&](size_t i) {
    order[i] = next[i] < size ? ordered(table_.Find(piece.substr(i, next[next[i]] - i)), i) : kNone;
  };
  while (true) {
    uint32_t best = kNone;
    for (size_t i = 0; i < size; ++i) best = std::min(best, order[i]);
    if (best == kNone) break;
    const size_t at = best & 0xFF;
    const size_t removed = next[at];
    id[at] = static_cast<int32_t>(best >> 8);
    next[at] = next[removed];
    previous[next[removed]] = static_cast<uint8_t>(at);
    order[removed] = kNone;
    update(at);
    if (at > 0) update(previous[at]);
  }
  for (size_t i = 0; i < size; i = next[i]) ids->push_back(id[i]);
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
