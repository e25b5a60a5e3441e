#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/cache/ids.h"

namespace k3 {

// Reference-counted ids of MLA latent pages. A page is free or has references: one per live sequence that reads or
// writes it, and one of the prefix cache while it is published. Who may write it is the holder's affair (CacheManager):
// a page is written only while its single reference is one sequence's. Engine thread only.
class PagePool {
 public:
  explicit PagePool(int32_t pages);

  int32_t total() const { return static_cast<int32_t>(refs_.size()); }
  int32_t free_count() const { return static_cast<int32_t>(free_.size()); }
  int32_t refs(PageId page) const { return refs_[static_cast<size_t>(page.value)]; }
  bool IsFree(PageId page) const { return refs(page) == 0; }

  // A free page with one reference; invalid when none is left.
  PageId Allocate();
  void AddRef(PageId page);
  // Returns the references left; at 0 the page is free.
  int32_t Release(PageId page);

  void CheckInvariants() const;

 private:
  std::vector<int32_t> refs_;
  std::vector<int32_t> free_;  // stack; the page freed last is reused first, its contents may still be in a cache
};

}  // namespace k3
