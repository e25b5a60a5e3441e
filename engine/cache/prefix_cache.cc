#include "engine/cache/prefix_cache.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/check.h"

namespace k3 {
namespace {

constexpr uint32_t kMostUses = 16;  // beyond, more uses do not make an entry more lasting

// Two 64-bit halves of a 128-bit product folded together: every input bit reaches every output bit.
uint64_t Mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product =
      static_cast<unsigned __int128>(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xd1b54a32d192ed03ull);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

uint64_t ChainHash(uint64_t parent, std::span<const int32_t> page_tokens) {
  uint64_t hash = parent;
  for (size_t i = 0; i < page_tokens.size(); ++i) {
    hash = Mix(hash + i, static_cast<uint64_t>(static_cast<uint32_t>(page_tokens[i])) + 0x632be59bd9b4e019ull);
  }
  return hash;
}

uint64_t ChainRoot(std::string_view salt) {
  uint64_t hash = 0x2545f4914f6cdd1dull + salt.size();
  for (char c : salt) hash = Mix(hash, static_cast<unsigned char>(c) + 1u);
  return hash;
}

uint64_t EpochHash(uint64_t hash, uint64_t epoch) {
  return epoch == 0 ? hash : hash ^ Mix(epoch, 0xa0761d6478bd642full);
}

PrefixCache::PrefixCache(const Sizes& sizes)
    : sizes_(sizes),
      nodes_(static_cast<size_t>(sizes.pages)),
      // Left unset on purpose: a large pool's token table is only touched where pages are published.
      tokens_(new int32_t[static_cast<size_t>(sizes.pages) * static_cast<size_t>(sizes.page_size)]),
      snapshots_(static_cast<size_t>(sizes.snapshot_slots)),
      page_heap_(sizes.pages),
      snapshot_heap_(sizes.snapshot_slots) {
  by_hash_.reserve(static_cast<size_t>(sizes.pages));  // publishing a page allocates nothing
}

PageId PrefixCache::Find(PageId parent, std::string_view salt, uint64_t hash, std::span<const int32_t> tokens,
                         uint64_t epoch) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return {};
  for (PageId page = found->second; page.valid(); page = node(page).next_same_hash) {
    const Node& candidate = node(page);
    if (candidate.parent != parent) continue;
    if (!parent.valid() && (candidate.epoch != epoch || salt_names_.at(candidate.salt) != salt)) continue;
    if (std::equal(tokens.begin(), tokens.end(), TokensOf(page))) return page;
  }
  return {};
}

void PrefixCache::Insert(PageId parent, std::string_view salt, uint64_t hash, std::span<const int32_t> tokens,
                         PageId page, uint64_t publisher, uint64_t epoch) {
  K3_CHECK(static_cast<int32_t>(tokens.size()) == sizes_.page_size);
  Node& added = node(page);
  K3_CHECK(!added.present);
  added = Node{};
  added.present = true;
  added.in_use = true;
  added.parent = parent;
  added.hash = hash;
  added.epoch = epoch;
  added.publisher = publisher;
  added.position = sizes_.page_size;
  added.uses = 1;
  added.clock = page_clock_;
  std::copy(tokens.begin(), tokens.end(), TokensOf(page));
  if (parent.valid()) {
    Node& above = node(parent);
    K3_CHECK(above.present && above.in_use);
    added.position += above.position;
    added.next_sibling = above.first_child;
    if (above.first_child.valid()) node(above.first_child).previous_sibling = page;
    above.first_child = page;
  } else {
    Salt& entry = salts_[std::string(salt)];
    if (entry.nodes == 0) {
      entry.id = next_salt_++;
      salt_names_.emplace(entry.id, salt);
    }
    ++entry.nodes;
    added.salt = entry.id;
  }
  const auto [place, fresh] = by_hash_.try_emplace(hash, page);
  if (!fresh) {
    added.next_same_hash = place->second;
    place->second = page;
  }
  ++nodes_present_;
}

void PrefixCache::AttachSnapshot(PageId page, StateSlot slot, const SnapshotFingerprint& fingerprint) {
  Node& holder = node(page);
  Snapshot& entry = snapshot(slot);
  K3_CHECK(holder.present && !holder.snapshot.valid() && !entry.node.valid());
  K3_CHECK(fingerprint.position == holder.position);
  holder.snapshot = slot;
  entry = Snapshot{page, fingerprint, 0, 1, snapshot_clock_};
  ++snapshots_present_;
  snapshot_heap_.Set(static_cast<int32_t>(SlotIndex(slot)), SnapshotKey(slot));
  UpdateHeap(page);
}

void PrefixCache::DetachSnapshot(StateSlot slot) {
  Snapshot& entry = snapshot(slot);
  K3_CHECK(entry.node.valid() && entry.pins == 0);
  const PageId page = entry.node;
  node(page).snapshot = {};
  entry = Snapshot{};
  --snapshots_present_;
  snapshot_heap_.Erase(static_cast<int32_t>(SlotIndex(slot)));
  UpdateHeap(page);
}

void PrefixCache::Pin(StateSlot slot) {
  Snapshot& entry = snapshot(slot);
  K3_CHECK(entry.node.valid());
  if (entry.pins++ == 0) snapshot_heap_.Erase(static_cast<int32_t>(SlotIndex(slot)));
}

void PrefixCache::Unpin(StateSlot slot) {
  Snapshot& entry = snapshot(slot);
  K3_CHECK(entry.pins > 0);
  if (--entry.pins == 0) snapshot_heap_.Set(static_cast<int32_t>(SlotIndex(slot)), SnapshotKey(slot));
}

void PrefixCache::SetInUse(PageId page, bool in_use) {
  Node& changed = node(page);
  K3_CHECK(changed.present);
  if (changed.in_use == in_use) return;
  changed.in_use = in_use;
  nodes_unused_ += in_use ? -1 : 1;
  UpdateHeap(page);
}

void PrefixCache::RecordHit(std::span<const PageId> pages) {
  for (PageId page : pages) {
    Node& used = node(page);
    used.uses = std::min(used.uses + 1, kMostUses);
    used.clock = page_clock_;
    UpdateHeap(page);
  }
  if (pages.empty() || !node(pages.back()).snapshot.valid()) return;
  const StateSlot slot = node(pages.back()).snapshot;
  Snapshot& entry = snapshot(slot);
  entry.uses = std::min(entry.uses + 1, kMostUses);
  entry.clock = snapshot_clock_;
  if (entry.pins == 0) snapshot_heap_.Set(static_cast<int32_t>(SlotIndex(slot)), SnapshotKey(slot));
}

int32_t PrefixCache::SnapshotBefore(PageId page) const {
  for (PageId above = node(page).parent; above.valid(); above = node(above).parent) {
    if (node(above).snapshot.valid()) return node(above).position;
  }
  return 0;
}

double PrefixCache::SnapshotKey(StateSlot slot) const {
  const Snapshot& entry = snapshot(slot);
  const double saved = node(entry.node).position - SnapshotBefore(entry.node);
  return entry.clock + entry.uses * saved / sizes_.state_bytes;
}

double PrefixCache::PageKey(PageId page) const {
  const Node& leaf = node(page);
  if (!leaf.snapshot.valid()) return leaf.clock;
  // The pages that only this leaf's snapshot needs: up to the next snapshot, fork, or page in use.
  int32_t run = 1;
  for (PageId above = leaf.parent; above.valid(); above = node(above).parent) {
    const Node& next = node(above);
    if (next.snapshot.valid() || next.in_use || node(next.first_child).next_sibling.valid()) break;
    ++run;
  }
  const double saved = leaf.position - SnapshotBefore(page);
  return leaf.clock + leaf.uses * saved / (run * sizes_.page_bytes + sizes_.state_bytes);
}

void PrefixCache::UpdateHeap(PageId page) {
  const Node& changed = node(page);
  if (changed.present && !changed.in_use && !changed.first_child.valid()) {
    page_heap_.Set(page.value, PageKey(page));
  } else {
    page_heap_.Erase(page.value);
  }
}

PrefixCache::Evicted PrefixCache::Unlink(PageId page) {
  Node& gone = node(page);
  K3_CHECK(gone.present && !gone.first_child.valid());
  Evicted evicted{page, gone.snapshot};
  if (gone.snapshot.valid()) {
    Snapshot& entry = snapshot(gone.snapshot);
    K3_CHECK(entry.pins == 0);
    snapshot_heap_.Erase(static_cast<int32_t>(SlotIndex(gone.snapshot)));
    entry = Snapshot{};
    --snapshots_present_;
  }
  const auto chain = by_hash_.find(gone.hash);
  K3_CHECK(chain != by_hash_.end());
  if (chain->second == page) {
    if (gone.next_same_hash.valid()) {
      chain->second = gone.next_same_hash;
    } else {
      by_hash_.erase(chain);
    }
  } else {
    PageId before = chain->second;
    while (node(before).next_same_hash != page) before = node(before).next_same_hash;
    node(before).next_same_hash = gone.next_same_hash;
  }
  if (gone.next_sibling.valid()) node(gone.next_sibling).previous_sibling = gone.previous_sibling;
  if (gone.previous_sibling.valid()) {
    node(gone.previous_sibling).next_sibling = gone.next_sibling;
  } else if (gone.parent.valid()) {
    node(gone.parent).first_child = gone.next_sibling;
  }
  if (!gone.parent.valid()) {
    const auto name = salt_names_.find(gone.salt);
    const auto salt = salts_.find(name->second);
    if (--salt->second.nodes == 0) {
      salts_.erase(salt);
      salt_names_.erase(name);
    }
  }
  page_heap_.Erase(page.value);
  --nodes_present_;
  if (!gone.in_use) --nodes_unused_;
  const PageId parent = gone.parent;
  gone = Node{};
  if (parent.valid()) UpdateHeap(parent);
  return evicted;
}

PrefixCache::Evicted PrefixCache::EvictPage() {
  while (!page_heap_.empty()) {
    const PageId page{page_heap_.Top()};
    // Neighbours may have come or gone since the key was computed; it can only have become too low by what this entry
    // alone still saves.
    const double key = PageKey(page);
    if (key > page_heap_.key(page.value)) {
      page_heap_.Set(page.value, key);
      continue;
    }
    page_clock_ = std::max(page_clock_, key);
    return Unlink(page);
  }
  return {};
}

StateSlot PrefixCache::EvictSnapshot() {
  while (!snapshot_heap_.empty()) {
    const StateSlot slot{snapshot_heap_.Top() + sizes_.first_snapshot_slot};
    const double key = SnapshotKey(slot);
    if (key > snapshot_heap_.key(snapshot_heap_.Top())) {
      snapshot_heap_.Set(snapshot_heap_.Top(), key);
      continue;
    }
    snapshot_clock_ = std::max(snapshot_clock_, key);
    DetachSnapshot(slot);
    return slot;
  }
  return {};
}

void PrefixCache::RemoveSubtree(PageId page, const std::function<void(const Evicted&)>& removed) {
  PageId at = page;
  for (;;) {
    while (node(at).first_child.valid()) at = node(at).first_child;
    const PageId parent = node(at).parent;
    const bool last = at == page;
    removed(Unlink(at));
    if (last) return;
    at = parent;
  }
}

void PrefixCache::CheckInvariants() const {
  page_heap_.CheckInvariants();
  snapshot_heap_.CheckInvariants();
  int32_t present = 0, unused = 0, attached = 0, heap_pages = 0, heap_snapshots = 0, top = 0, hashed = 0;
  for (int32_t id = 0; id < sizes_.pages; ++id) {
    const PageId page{id};
    const Node& checked = node(page);
    if (!checked.present) {
      K3_CHECK(!page_heap_.Contains(id) && !checked.snapshot.valid());
      continue;
    }
    ++present;
    if (!checked.in_use) ++unused;
    const std::span<const int32_t> tokens(TokensOf(page), static_cast<size_t>(sizes_.page_size));
    if (checked.parent.valid()) {
      const Node& above = node(checked.parent);
      K3_CHECK(above.present && above.position + sizes_.page_size == checked.position);
      K3_CHECK(above.in_use || !checked.in_use);
      K3_CHECK(checked.epoch == above.epoch);
      K3_CHECK(checked.hash == EpochHash(ChainHash(EpochHash(above.hash, above.epoch), tokens), checked.epoch));
      bool listed = false;
      for (PageId child = above.first_child; child.valid(); child = node(child).next_sibling) listed |= child == page;
      K3_CHECK(listed);
    } else {
      ++top;
      K3_CHECK(checked.position == sizes_.page_size);
      K3_CHECK(checked.hash == EpochHash(ChainHash(ChainRoot(salt_names_.at(checked.salt)), tokens), checked.epoch));
    }
    const bool evictable = !checked.in_use && !checked.first_child.valid();
    K3_CHECK(page_heap_.Contains(id) == evictable);
    heap_pages += evictable;
    bool hashes_to_it = false;
    for (PageId same = by_hash_.at(checked.hash); same.valid(); same = node(same).next_same_hash) {
      hashes_to_it |= same == page;
    }
    K3_CHECK(hashes_to_it);
    ++hashed;
    if (checked.snapshot.valid()) {
      ++attached;
      const Snapshot& entry = snapshot(checked.snapshot);
      K3_CHECK(entry.node == page && entry.fingerprint.chain == checked.hash);
      K3_CHECK(snapshot_heap_.Contains(static_cast<int32_t>(SlotIndex(checked.snapshot))) == (entry.pins == 0));
      heap_snapshots += entry.pins == 0;
    }
  }
  K3_CHECK(present == nodes_present_ && unused == nodes_unused_ && attached == snapshots_present_);
  K3_CHECK(heap_pages == page_heap_.size() && heap_snapshots == snapshot_heap_.size());
  int32_t salted = 0;
  for (const auto& [name, salt] : salts_) {
    K3_CHECK(salt.nodes > 0 && salt_names_.at(salt.id) == name);
    salted += salt.nodes;
  }
  K3_CHECK(salted == top && hashed == present && salts_.size() == salt_names_.size());
}

}  // namespace k3
