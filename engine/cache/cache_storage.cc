#include "engine/cache/cache_storage.h"

#include <algorithm>

#include "kernels/core/check.h"

namespace k3 {
namespace {

int64_t Padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t PageLayerBytes(const ModelConfig& config, const CacheGeometry& geometry) {
  return geometry.page_size * config.latent_line_elements() * static_cast<int64_t>(SizeOf(geometry.page_dtype));
}

int64_t StateBytes(const ModelConfig& config, const CacheGeometry& geometry) {
  return Padded(config.kda_state_elements() * static_cast<int64_t>(SizeOf(geometry.state_dtype)));
}

int64_t ConvBytes(const ModelConfig& config, const CacheGeometry& geometry) {
  return Padded(config.conv_state_elements() * static_cast<int64_t>(SizeOf(geometry.conv_dtype)));
}

}  // namespace

int64_t CacheStorage::PageBytes(const ModelConfig& config, const CacheGeometry& geometry) {
  return Padded(PageLayerBytes(config, geometry) * config.num_mla_layers());
}

int64_t CacheStorage::SlotBytes(const ModelConfig& config, const CacheGeometry& geometry) {
  return (StateBytes(config, geometry) + ConvBytes(config, geometry)) * config.num_kda_layers();
}

CacheStorage::CacheStorage(const ModelConfig& config, const CacheGeometry& geometry, Ops& ops)
    : ops_(ops),
      geometry_(geometry),
      page_bytes_(PageBytes(config, geometry)),
      page_layer_bytes_(PageLayerBytes(config, geometry)),
      slot_bytes_(SlotBytes(config, geometry)),
      state_bytes_(StateBytes(config, geometry)),
      conv_bytes_(ConvBytes(config, geometry)) {
  pages_ = static_cast<char*>(ops_.Allocate(static_cast<size_t>(std::max<int64_t>(page_bytes_ * geometry.pages, 256))));
  try {
    slots_ =
        static_cast<char*>(ops_.Allocate(static_cast<size_t>(std::max<int64_t>(slot_bytes_ * geometry.slots, 256))));
  } catch (...) {
    ops_.Free(pages_);
    throw;
  }
}

CacheStorage::~CacheStorage() {
  ops_.Free(slots_);
  ops_.Free(pages_);
}

MlaPages CacheStorage::Pages(int32_t mla_layer) const {
  return {pages_ + mla_layer * page_layer_bytes_, geometry_.page_dtype, page_bytes_, geometry_.page_size};
}

void* CacheStorage::State(int32_t kda_layer) const { return slots_ + kda_layer * (state_bytes_ + conv_bytes_); }

void* CacheStorage::ConvState(int32_t kda_layer) const {
  return slots_ + kda_layer * (state_bytes_ + conv_bytes_) + state_bytes_;
}

void* CacheStorage::SlotData(StateSlot slot) const {
  K3_CHECK(slot.valid() && slot.value < geometry_.slots);
  return slots_ + slot.value * slot_bytes_;
}

void* CacheStorage::PageData(PageId page) const {
  K3_CHECK(page.valid() && page.value < geometry_.pages);
  return pages_ + page.value * page_bytes_;
}

void CacheStorage::ZeroSlot(StateSlot slot) { FillSlot(slot, 0); }

void CacheStorage::CopySlot(StateSlot from, StateSlot to) {
  ops_.CopyOnDevice(SlotData(to), SlotData(from), static_cast<size_t>(slot_bytes_), ops_.stream());
}

void CacheStorage::CopyPage(PageId from, PageId to) {
  ops_.CopyOnDevice(PageData(to), PageData(from), static_cast<size_t>(page_bytes_), ops_.stream());
}

void CacheStorage::FillSlot(StateSlot slot, uint8_t byte) {
  ops_.Fill(SlotData(slot), byte, static_cast<size_t>(slot_bytes_), ops_.stream());
}

void CacheStorage::FillPage(PageId page, uint8_t byte) {
  ops_.Fill(PageData(page), byte, static_cast<size_t>(page_bytes_), ops_.stream());
}

}  // namespace k3
