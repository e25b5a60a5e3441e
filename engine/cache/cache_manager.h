#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "engine/cache/ids.h"
#include "engine/cache/page_pool.h"
#include "engine/cache/prefix_cache.h"
#include "engine/cache/state_pool.h"
#include "engine/engine_config.h"
#include "engine/step.h"

namespace k3 {

// A sequence's tokens as the prefix cache sees them.
struct PrefixKey {
  std::span<const int32_t> tokens;
  std::span<const uint64_t> hashes;  // ChainHash of each full page of `tokens`
  std::string_view salt;
  // Of the routers' bias, under which everything of the sequence is computed: what another one left is no match.
  uint64_t epoch = 0;

  uint64_t HashOf(size_t page) const { return EpochHash(hashes[page], epoch); }
};

// What the cache holds of a sequence. Valid until the next change of the same CacheManager.
struct PrefixMatch {
  std::vector<PageId> pages;  // cached pages from the start on
  int32_t resume_pages = 0;   // the longest run of them that ends in a snapshot
  StateSlot snapshot;         // valid when resume_pages > 0
  int32_t idle_pages = 0;     // of the resumed ones: used by no live sequence, hence counted as available
};

// A snapshot that a step takes or took, not yet published.
struct PendingSnapshot {
  int32_t position = 0;
  StateSlot slot;
  bool at_divergence = false;
  bool taken = false;  // the step that writes it has run
};

// What one running sequence holds in one rank's cache. Owned by the sequence, changed by CacheManager only.
struct CacheLease {
  StateSlot state;
  std::vector<PageId> pages;   // page i holds tokens [i * page_size, (i + 1) * page_size)
  int32_t published = 0;       // leading pages that are nodes of the prefix cache, hence read-only
  bool unpublishable = false;  // a page below was taken out of the cache: nothing can be linked to it any more
  PageId restored_from;        // the node whose snapshot the state was restored from
  std::vector<PendingSnapshot> snapshots;  // ascending positions

  bool held() const { return state.valid(); }
};

struct CacheUsage {
  int64_t pages_used = 0;    // referenced by live sequences
  int64_t pages_cached = 0;  // by the prefix cache alone
  int64_t pages_peak = 0;    // most ever used
  int32_t state_slots_used = 0;
  int32_t state_slots_peak = 0;
  int32_t snapshots_used = 0;
};

// One rank's pages, state slots and prefix cache: the only writer of the three. Matching, acquiring and extending
// happen while a step is planned; publishing, releasing and condemning when it is committed. Engine thread only.
class CacheManager {
 public:
  explicit CacheManager(const EngineConfig& config);

  // The longest run of cached pages of `key`, and the longest resumable one, both within its first `limit` tokens. A
  // snapshot whose fingerprint is not that of these tokens is dropped and counted.
  PrefixMatch Match(const PrefixKey& key, int32_t limit);

  // Starts a lease: a live slot and the resumed pages. The snapshot is pinned until LetGoOfRestores. The caller
  // has checked live_free() and zeroes or restores the slot in this step.
  void Acquire(const PrefixMatch& match, CacheLease* lease);
  // Adds private pages, evicting cached ones as needed, until the lease covers `tokens`. Returns the tokens covered,
  // which are fewer when no page is left.
  int64_t Extend(CacheLease* lease, int64_t tokens);
  // A slot for a snapshot at `position`, kept with the lease; invalid when none can be had.
  StateSlot ReserveSnapshot(CacheLease* lease, int32_t position, bool at_divergence);
  // A second lease over the same `tokens`: shared full pages, a copy of the partly filled last one, a copy of the
  // state. False, and nothing done, when slot or page is missing.
  bool Fork(const CacheLease& source, int32_t tokens, CacheLease* copy, RankPlan* plan);

  // Links pages [published, pages) into the cache, with the snapshots that lie there. A page that is already cached is
  // taken over and the own copy freed. `publisher` is the request.
  void Publish(const PrefixKey& key, int32_t pages, uint64_t publisher, CacheLease* lease);
  // The step that restores from what is pinned is planned, or has run: from now on its snapshots can only be
  // overwritten by steps that run after it.
  void LetGoOfRestores();
  // Those at positions up to `computed`.
  void SnapshotsTaken(CacheLease* lease, int32_t computed = std::numeric_limits<int32_t>::max());

  void Release(CacheLease* lease);
  // Releases a lease whose contents are not to be trusted: everything that `publisher` put into the cache on its path
  // leaves it, as does the snapshot it came from. Appends what is free from now on and must be overwritten.
  void Condemn(uint64_t publisher, CacheLease* lease, std::vector<PageId>* scrub_pages,
               std::vector<StateSlot>* scrub_slots);
  // Drops every cached page that no live sequence uses.
  void Flush();

  int64_t available_pages() const { return pages_.free_count() + cache_.unused_nodes(); }
  int32_t live_free() const { return states_.live_free(); }
  // Grows whenever something was released: a reservation that failed before may fit now.
  uint64_t releases() const { return releases_; }
  uint64_t fingerprint_mismatches() const { return fingerprint_mismatches_; }
  CacheUsage Usage() const;
  int32_t page_size() const { return page_size_; }

  const PagePool& pages() const { return pages_; }
  const StatePool& states() const { return states_; }
  const PrefixCache& cache() const { return cache_; }
  PrefixCache& cache_for_test() { return cache_; }

  // `leases`: of all live sequences of this rank.
  void CheckInvariants(std::span<const CacheLease* const> leases) const;

 private:
  PageId AllocatePage();
  void TakeRef(PageId page);
  // Returns whether the page is free now.
  bool DropRef(PageId page);
  void FreeEvicted(const PrefixCache::Evicted& evicted);
  bool DropOwnSnapshot(CacheLease* lease);
  void NotePeak();

  int32_t page_size_;
  uint64_t layout_tag_;
  PagePool pages_;
  StatePool states_;
  PrefixCache cache_;
  std::vector<StateSlot> pinned_;
  uint64_t releases_ = 0;
  uint64_t fingerprint_mismatches_ = 0;
  int64_t pages_peak_ = 0;
  int32_t state_slots_peak_ = 0;
};

}  // namespace k3
