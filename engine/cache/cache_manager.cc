#include "engine/cache/cache_manager.h"

#include <algorithm>

#include "kernels/core/check.h"

namespace k3 {

CacheManager::CacheManager(const EngineConfig& config)
    : page_size_(config.page_size),
      layout_tag_(config.layout_tag),
      pages_(config.latent_pages),
      states_(config.state_slots, config.snapshot_slots),
      cache_({.pages = config.latent_pages,
              .page_size = config.page_size,
              .first_snapshot_slot = config.state_slots,
              .snapshot_slots = config.snapshot_slots,
              .page_bytes = static_cast<double>(config.page_bytes),
              .state_bytes = static_cast<double>(config.state_bytes)}) {
  pinned_.reserve(static_cast<size_t>(config.state_slots));
}

PrefixMatch CacheManager::Match(const PrefixKey& key, int32_t limit) {
  PrefixMatch match;
  const size_t most = std::min(key.hashes.size(), static_cast<size_t>(std::max(limit, 0) / page_size_));
  PageId parent;
  for (size_t i = 0; i < most; ++i) {
    const std::span<const int32_t> tokens = key.tokens.subspan(i * page_size_, static_cast<size_t>(page_size_));
    const PageId page = cache_.Find(parent, key.salt, key.HashOf(i), tokens, key.epoch);
    if (!page.valid()) break;
    match.pages.push_back(page);
    parent = page;
  }
  for (size_t i = match.pages.size(); i > 0; --i) {
    const StateSlot slot = cache_.SnapshotOf(match.pages[i - 1]);
    if (!slot.valid()) continue;
    const SnapshotFingerprint expected{key.HashOf(i - 1), static_cast<int32_t>(i) * page_size_, layout_tag_};
    if (cache_.FingerprintOf(slot) == expected) {
      match.resume_pages = static_cast<int32_t>(i);
      match.snapshot = slot;
      break;
    }
    ++fingerprint_mismatches_;
    if (std::find(pinned_.begin(), pinned_.end(), slot) == pinned_.end()) {
      cache_.DetachSnapshot(slot);
      states_.Release(slot);
    }
  }
  for (int32_t i = 0; i < match.resume_pages; ++i) {
    match.idle_pages += pages_.refs(match.pages[static_cast<size_t>(i)]) == 1;
  }
  return match;
}

void CacheManager::Acquire(const PrefixMatch& match, CacheLease* lease) {
  K3_CHECK(!lease->held() && lease->pages.empty() && lease->snapshots.empty());
  lease->state = states_.AllocateLive();
  K3_CHECK(lease->state.valid());
  const auto resumed = std::span(match.pages).first(static_cast<size_t>(match.resume_pages));
  for (PageId page : resumed) TakeRef(page);
  lease->pages.assign(resumed.begin(), resumed.end());
  lease->published = match.resume_pages;
  lease->unpublishable = false;
  lease->restored_from = {};
  if (match.resume_pages > 0) {
    lease->restored_from = resumed.back();
    cache_.RecordHit(resumed);
    cache_.Pin(match.snapshot);
    pinned_.push_back(match.snapshot);
  }
  NotePeak();
}

int64_t CacheManager::Extend(CacheLease* lease, int64_t tokens) {
  int64_t covered = static_cast<int64_t>(lease->pages.size()) * page_size_;
  if (covered >= tokens) return covered;
  while (covered < tokens) {
    const PageId page = AllocatePage();
    if (!page.valid()) break;
    lease->pages.push_back(page);
    covered += page_size_;
  }
  NotePeak();
  return covered;
}

bool CacheManager::DropOwnSnapshot(CacheLease* lease) {
  // The one whose loss costs the fewest tokens: those back to the snapshot before it. Divergence points were asked for
  // by a real request, so they stay.
  auto& list = lease->snapshots;
  size_t best = list.size();
  int32_t best_cost = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].taken || list[i].at_divergence) continue;
    const int32_t cost = list[i].position - (i > 0 ? list[i - 1].position : 0);
    if (best == list.size() || cost < best_cost) best = i, best_cost = cost;
  }
  if (best == list.size()) return false;
  states_.Release(list[best].slot);
  list.erase(list.begin() + static_cast<ptrdiff_t>(best));
  return true;
}

StateSlot CacheManager::ReserveSnapshot(CacheLease* lease, int32_t position, bool at_divergence) {
  StateSlot slot = states_.AllocateSnapshot();
  if (!slot.valid()) {
    // One long prompt must not push everybody else's snapshots out of the pool: beyond its share it gives up its own.
    const size_t share = static_cast<size_t>(std::max(2, states_.snapshot_total() / 4));
    const bool own_first = lease->snapshots.size() >= share;
    if (own_first && DropOwnSnapshot(lease)) {
      slot = states_.AllocateSnapshot();
    } else if (const StateSlot evicted = cache_.EvictSnapshot(); evicted.valid()) {
      states_.Release(evicted);
      slot = states_.AllocateSnapshot();
    } else if (!own_first && DropOwnSnapshot(lease)) {
      slot = states_.AllocateSnapshot();
    }
  }
  if (!slot.valid()) return {};
  const auto place = std::find_if(lease->snapshots.begin(), lease->snapshots.end(),
                                  [position](const PendingSnapshot& other) { return other.position >= position; });
  K3_CHECK(place == lease->snapshots.end() || place->position != position);
  lease->snapshots.insert(place, PendingSnapshot{position, slot, at_divergence, false});
  return slot;
}

bool CacheManager::Fork(const CacheLease& source, int32_t tokens, CacheLease* copy, RankPlan* plan) {
  K3_CHECK(source.held() && !copy->held() && copy->pages.empty());
  const int32_t full = tokens / page_size_;
  const bool partial = tokens % page_size_ != 0;
  if (states_.live_free() == 0) return false;
  PageId last;
  if (partial) {
    last = AllocatePage();
    if (!last.valid()) return false;
  }
  copy->state = states_.AllocateLive();
  for (int32_t i = 0; i < full; ++i) {
    TakeRef(source.pages[static_cast<size_t>(i)]);
    copy->pages.push_back(source.pages[static_cast<size_t>(i)]);
  }
  copy->published = std::min(source.published, full);
  // Full pages that are shared but not in the cache (caching off) belong to nobody alone and are never published.
  copy->unpublishable = source.unpublishable || copy->published < full;
  copy->restored_from = source.restored_from;
  if (partial) {
    plan->page_copies.push_back({source.pages[static_cast<size_t>(full)], last});
    copy->pages.push_back(last);
  }
  plan->state_copies.push_back({source.state, copy->state});
  NotePeak();
  return true;
}

void CacheManager::Publish(const PrefixKey& key, int32_t pages, uint64_t publisher, CacheLease* lease) {
  while (lease->published < pages && !lease->unpublishable) {
    const size_t i = static_cast<size_t>(lease->published);
    const PageId parent = i > 0 ? lease->pages[i - 1] : PageId{};
    const PageId own = lease->pages[i];
    if ((parent.valid() && !cache_.Contains(parent)) || pages_.refs(own) != 1) {
      lease->unpublishable = true;
      break;
    }
    const std::span<const int32_t> tokens = key.tokens.subspan(i * page_size_, static_cast<size_t>(page_size_));
    const PageId cached = cache_.Find(parent, key.salt, key.HashOf(i), tokens, key.epoch);
    if (cached.valid()) {
      TakeRef(cached);
      DropRef(own);
      lease->pages[i] = cached;
    } else {
      cache_.Insert(parent, key.salt, key.HashOf(i), tokens, own, publisher, key.epoch);
      pages_.AddRef(own);
    }
    ++lease->published;
  }
  // Every snapshot that was taken lies within what was computed, hence within what was just published.
  for (const PendingSnapshot& snapshot : lease->snapshots) {
    if (!snapshot.taken) continue;  // of a step that is still running
    const int32_t index = snapshot.position / page_size_ - 1;
    K3_CHECK(index < lease->published || lease->unpublishable);
    const PageId holder = index < lease->published ? lease->pages[static_cast<size_t>(index)] : PageId{};
    if (holder.valid() && cache_.Contains(holder) && !cache_.SnapshotOf(holder).valid()) {
      cache_.AttachSnapshot(holder, snapshot.slot,
                            {key.HashOf(static_cast<size_t>(index)), snapshot.position, layout_tag_});
    } else {
      states_.Release(snapshot.slot);
    }
  }
  std::erase_if(lease->snapshots, [](const PendingSnapshot& snapshot) { return snapshot.taken; });
}

void CacheManager::LetGoOfRestores() {
  for (StateSlot slot : pinned_) cache_.Unpin(slot);
  pinned_.clear();
}

void CacheManager::SnapshotsTaken(CacheLease* lease, int32_t computed) {
  for (PendingSnapshot& snapshot : lease->snapshots) snapshot.taken |= snapshot.position <= computed;
}

void CacheManager::Release(CacheLease* lease) {
  K3_CHECK(lease->held());
  // Last page first: a node never outlives the use of the one below it.
  for (auto page = lease->pages.rbegin(); page != lease->pages.rend(); ++page) DropRef(*page);
  for (const PendingSnapshot& snapshot : lease->snapshots) states_.Release(snapshot.slot);
  states_.Release(lease->state);
  lease->state = {};
  lease->pages.clear();
  lease->snapshots.clear();
  lease->published = 0;
  lease->restored_from = {};
  ++releases_;
}

void CacheManager::Condemn(uint64_t publisher, CacheLease* lease, std::vector<PageId>* scrub_pages,
                           std::vector<StateSlot>* scrub_slots) {
  K3_CHECK(lease->held());
  if (lease->restored_from.valid() && cache_.Contains(lease->restored_from)) {
    const StateSlot slot = cache_.SnapshotOf(lease->restored_from);
    if (slot.valid()) {
      cache_.DetachSnapshot(slot);
      states_.Release(slot);
      scrub_slots->push_back(slot);
    }
  }
  for (int32_t i = 0; i < lease->published; ++i) {
    const PageId page = lease->pages[static_cast<size_t>(i)];
    if (!cache_.Contains(page) || cache_.PublisherOf(page) != publisher) continue;
    cache_.RemoveSubtree(page, [&](const PrefixCache::Evicted& gone) {
      if (pages_.Release(gone.page) == 0) scrub_pages->push_back(gone.page);
      if (gone.snapshot.valid()) {
        states_.Release(gone.snapshot);
        scrub_slots->push_back(gone.snapshot);
      }
    });
    break;
  }
  for (auto page = lease->pages.rbegin(); page != lease->pages.rend(); ++page) {
    if (DropRef(*page)) scrub_pages->push_back(*page);
  }
  lease->pages.clear();
  for (const PendingSnapshot& snapshot : lease->snapshots) scrub_slots->push_back(snapshot.slot);
  scrub_slots->push_back(lease->state);
  Release(lease);
}

void CacheManager::Flush() {
  for (PrefixCache::Evicted evicted = cache_.EvictPage(); evicted.page.valid(); evicted = cache_.EvictPage()) {
    FreeEvicted(evicted);
  }
  ++releases_;
}

PageId CacheManager::AllocatePage() {
  if (pages_.free_count() == 0) {
    const PrefixCache::Evicted evicted = cache_.EvictPage();
    if (!evicted.page.valid()) return {};
    FreeEvicted(evicted);
  }
  return pages_.Allocate();
}

void CacheManager::FreeEvicted(const PrefixCache::Evicted& evicted) {
  K3_CHECK(pages_.Release(evicted.page) == 0);
  if (evicted.snapshot.valid()) states_.Release(evicted.snapshot);
}

void CacheManager::TakeRef(PageId page) {
  pages_.AddRef(page);
  if (cache_.Contains(page)) cache_.SetInUse(page, true);
}

bool CacheManager::DropRef(PageId page) {
  const int32_t left = pages_.Release(page);
  if (left == 1 && cache_.Contains(page)) cache_.SetInUse(page, false);
  return left == 0;
}

void CacheManager::NotePeak() {
  pages_peak_ = std::max(pages_peak_, pages_.total() - available_pages());
  state_slots_peak_ = std::max(state_slots_peak_, states_.live_total() - states_.live_free());
}

CacheUsage CacheManager::Usage() const {
  CacheUsage usage;
  usage.pages_used = pages_.total() - available_pages();
  usage.pages_cached = cache_.unused_nodes();
  usage.pages_peak = pages_peak_;
  usage.state_slots_used = states_.live_total() - states_.live_free();
  usage.state_slots_peak = state_slots_peak_;
  usage.snapshots_used = states_.snapshot_total() - states_.snapshot_free();
  return usage;
}

void CacheManager::CheckInvariants(std::span<const CacheLease* const> leases) const {
  pages_.CheckInvariants();
  states_.CheckInvariants();
  cache_.CheckInvariants();
  std::vector<int32_t> refs(static_cast<size_t>(pages_.total()), 0);
  std::vector<bool> slots(static_cast<size_t>(states_.live_total() + states_.snapshot_total()), false);
  const auto take_slot = [&](StateSlot slot, bool is_snapshot) {
    K3_CHECK(slot.valid() && states_.IsSnapshot(slot) == is_snapshot && !states_.IsFree(slot));
    K3_CHECK(!slots[static_cast<size_t>(slot.value)]);
    slots[static_cast<size_t>(slot.value)] = true;
  };
  for (const CacheLease* lease : leases) {
    take_slot(lease->state, false);
    int32_t before = -1;
    for (const PendingSnapshot& snapshot : lease->snapshots) {
      take_slot(snapshot.slot, true);
      K3_CHECK(snapshot.position > before && snapshot.position % page_size_ == 0);
      before = snapshot.position;
    }
    K3_CHECK(lease->published <= static_cast<int32_t>(lease->pages.size()));
    for (size_t i = 0; i < lease->pages.size(); ++i) {
      const size_t page = static_cast<size_t>(lease->pages[i].value);
      ++refs[page];
      if (static_cast<int32_t>(i) >= lease->published) {
        K3_CHECK(!cache_.Contains(lease->pages[i]));
      } else if (!lease->unpublishable) {
        // Nodes below a condemned one may have left the cache while this lease goes on reading them.
        K3_CHECK(cache_.Contains(lease->pages[i]) || pages_.refs(lease->pages[i]) >= 1);
      }
    }
  }
  for (int32_t id = 0; id < pages_.total(); ++id) {
    const int32_t cached = cache_.Contains({id}) ? 1 : 0;
    K3_CHECK(pages_.refs({id}) == refs[static_cast<size_t>(id)] + cached);
    if (cached) {
      const StateSlot slot = cache_.SnapshotOf({id});
      if (slot.valid()) take_slot(slot, true);
    }
  }
  for (size_t id = 0; id < slots.size(); ++id) {
    K3_CHECK(slots[id] == !states_.IsFree({static_cast<int32_t>(id)}));
  }
}

}  // namespace k3
