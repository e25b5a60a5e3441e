#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/cache/ids.h"
#include "engine/cache/indexed_heap.h"

namespace k3 {

// Hash of a chain of full pages: of the tokens of one page and of everything before it. Used to find nodes, never to
// identify them.
uint64_t ChainHash(uint64_t parent, std::span<const int32_t> page_tokens);
uint64_t ChainRoot(std::string_view salt);
// The hash of the same chain computed under a bias epoch of the routers. Epoch 0 changes nothing; the same function
// takes it back.
uint64_t EpochHash(uint64_t hash, uint64_t epoch);

// What a stored state claims to be; written when it is published and compared at every restore.
struct SnapshotFingerprint {
  uint64_t chain = 0;    // ChainHash of all tokens it contains, salt included
  int32_t position = 0;  // number of those tokens
  uint64_t layout = 0;   // EngineConfig::layout_tag
  bool operator==(const SnapshotFingerprint&) const = default;
};

// The index of published pages: a forest of nodes. One node is one full page, named by the page's id and identified by
// (parent, exact tokens), at the top by (salt, bias epoch of the routers, exact tokens); a node may carry one state
// snapshot, for exactly the end of its page. Nodes are never split and never change; only leaves that no sequence uses
// are evicted, so that every node's ancestors are there.
//
// Eviction is by value, in the manner of greedy-dual with frequencies: key = clock at the last use + uses * tokens
// saved per byte, where the clock is the key of what was evicted last. Pages and snapshots are weighed separately.
// Losing a snapshot at p costs the tokens back to the snapshot before it; losing a leaf page costs those of its own
// snapshot, spread over the pages that nothing else needs; a leaf without a snapshot cannot be resumed from and goes
// first.
//
// Knows nothing of references or free lists: CacheManager tells it which pages are in use and owns what it evicts.
class PrefixCache {
 public:
  struct Sizes {
    int32_t pages = 0;
    int32_t page_size = 0;
    int32_t first_snapshot_slot = 0;
    int32_t snapshot_slots = 0;
    double page_bytes = 1;
    double state_bytes = 1;
  };
  struct Evicted {
    PageId page;         // invalid: nothing could be evicted
    StateSlot snapshot;  // of the evicted page, if it had one
  };

  explicit PrefixCache(const Sizes& sizes);

  // The child of `parent` (of the root of `salt` and `epoch` when invalid) that holds exactly `tokens`; invalid when
  // there is none.
  PageId Find(PageId parent, std::string_view salt, uint64_t hash, std::span<const int32_t> tokens,
              uint64_t epoch = 0) const;
  // A new node; the caller has made sure by Find that there is none like it. `page` is in use. `publisher` is the
  // request that computed it.
  void Insert(PageId parent, std::string_view salt, uint64_t hash, std::span<const int32_t> tokens, PageId page,
              uint64_t publisher, uint64_t epoch = 0);
  bool Contains(PageId page) const { return node(page).present; }

  // The node must have no snapshot yet.
  void AttachSnapshot(PageId page, StateSlot slot, const SnapshotFingerprint& fingerprint);
  StateSlot SnapshotOf(PageId page) const { return node(page).snapshot; }
  const SnapshotFingerprint& FingerprintOf(StateSlot slot) const { return snapshot(slot).fingerprint; }
  // Takes the snapshot off its node; the slot is the caller's again.
  void DetachSnapshot(StateSlot slot);
  PageId NodeOf(StateSlot slot) const { return snapshot(slot).node; }
  // A pinned snapshot is being read by the planned step and is not evicted.
  void Pin(StateSlot slot);
  void Unpin(StateSlot slot);

  // Whether a live sequence references the page besides the cache.
  void SetInUse(PageId page, bool in_use);
  // A sequence resumed through these pages, the last of which carries the snapshot.
  void RecordHit(std::span<const PageId> pages);

  // The least valuable unused leaf leaves the index.
  Evicted EvictPage();
  // The least valuable snapshot that is not pinned leaves its node; invalid when there is none.
  StateSlot EvictSnapshot();
  // Takes the node and everything below it out of the index, calling `removed` for each.
  void RemoveSubtree(PageId page, const std::function<void(const Evicted&)>& removed);

  uint64_t PublisherOf(PageId page) const { return node(page).publisher; }
  int32_t nodes() const { return nodes_present_; }
  int32_t unused_nodes() const { return nodes_unused_; }  // all of them can be evicted, one after the other
  int32_t snapshots() const { return snapshots_present_; }

  void CheckInvariants() const;
  // For tests of the restore check.
  void CorruptFingerprintForTest(StateSlot slot) { ++snapshots_[SlotIndex(slot)].fingerprint.position; }

 private:
  struct Node {
    bool present = false;
    bool in_use = false;
    PageId parent;
    PageId first_child, next_sibling, previous_sibling;
    PageId next_same_hash;
    int32_t position = 0;  // tokens up to the end of this page
    uint64_t hash = 0;
    uint64_t salt = 0;  // top nodes: id in salts_
    uint64_t epoch = 0;
    uint64_t publisher = 0;
    StateSlot snapshot;
    uint32_t uses = 0;
    double clock = 0;  // of the page heap, at the last use
  };
  struct Snapshot {
    PageId node;  // invalid: not attached
    SnapshotFingerprint fingerprint;
    int32_t pins = 0;
    uint32_t uses = 0;
    double clock = 0;  // of the snapshot heap, at the last use
  };
  struct Salt {
    uint64_t id = 0;
    int32_t nodes = 0;
  };

  Node& node(PageId page) { return nodes_[static_cast<size_t>(page.value)]; }
  const Node& node(PageId page) const { return nodes_[static_cast<size_t>(page.value)]; }
  size_t SlotIndex(StateSlot slot) const { return static_cast<size_t>(slot.value - sizes_.first_snapshot_slot); }
  Snapshot& snapshot(StateSlot slot) { return snapshots_[SlotIndex(slot)]; }
  const Snapshot& snapshot(StateSlot slot) const { return snapshots_[SlotIndex(slot)]; }
  int32_t* TokensOf(PageId page) const { return tokens_.get() + static_cast<int64_t>(page.value) * sizes_.page_size; }

  double PageKey(PageId page) const;
  double SnapshotKey(StateSlot slot) const;
  int32_t SnapshotBefore(PageId page) const;  // position of the nearest snapshot on a proper ancestor, or 0
  void UpdateHeap(PageId page);
  // Out of the index and of its parent's children; has no children itself.
  Evicted Unlink(PageId page);

  Sizes sizes_;
  std::vector<Node> nodes_;            // by page id
  std::unique_ptr<int32_t[]> tokens_;  // [pages, page_size], by page id
  std::vector<Snapshot> snapshots_;    // by slot - first_snapshot_slot
  absl::flat_hash_map<uint64_t, PageId> by_hash_;
  absl::flat_hash_map<std::string, Salt> salts_;  // of the top nodes
  absl::flat_hash_map<uint64_t, std::string> salt_names_;
  uint64_t next_salt_ = 1;
  IndexedHeap page_heap_;      // unused leaves
  IndexedHeap snapshot_heap_;  // attached and not pinned, by SlotIndex
  double page_clock_ = 0;
  double snapshot_clock_ = 0;
  int32_t nodes_present_ = 0;
  int32_t nodes_unused_ = 0;
  int32_t snapshots_present_ = 0;
};

}  // namespace k3
