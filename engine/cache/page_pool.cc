#include "engine/cache/page_pool.h"

#include "kernels/core/check.h"

namespace k3 {

PagePool::PagePool(int32_t pages) : refs_(static_cast<size_t>(pages), 0) {
  free_.reserve(static_cast<size_t>(pages));
  for (int32_t id = pages - 1; id >= 0; --id) free_.push_back(id);
}

PageId PagePool::Allocate() {
  if (free_.empty()) return {};
  const int32_t id = free_.back();
  free_.pop_back();
  K3_CHECK(refs_[static_cast<size_t>(id)] == 0);
  refs_[static_cast<size_t>(id)] = 1;
  return {id};
}

void PagePool::AddRef(PageId page) {
  K3_CHECK(page.valid() && page.value < total() && refs(page) > 0);
  ++refs_[static_cast<size_t>(page.value)];
}

int32_t PagePool::Release(PageId page) {
  K3_CHECK(page.valid() && page.value < total() && refs(page) > 0);
  const int32_t left = --refs_[static_cast<size_t>(page.value)];
  if (left == 0) free_.push_back(page.value);
  return left;
}

void PagePool::CheckInvariants() const {
  std::vector<bool> seen(refs_.size(), false);
  for (int32_t id : free_) {
    K3_CHECK(id >= 0 && id < total());
    K3_CHECK(!seen[static_cast<size_t>(id)]);
    seen[static_cast<size_t>(id)] = true;
    K3_CHECK(refs_[static_cast<size_t>(id)] == 0);
  }
  for (size_t id = 0; id < refs_.size(); ++id) K3_CHECK(refs_[id] > 0 || seen[id]);
}

}  // namespace k3
