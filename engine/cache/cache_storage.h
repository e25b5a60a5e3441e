#pragma once

#include <cstdint>

#include "engine/cache/ids.h"
#include "engine/model/model_config.h"
#include "kernels/ops.h"

namespace k3 {

struct CacheGeometry {
  int32_t pages = 0;
  int32_t page_size = 64;  // tokens
  DType page_dtype = DType::kF32;
  int32_t slots = 0;                // live and snapshot slots together
  DType state_dtype = DType::kF32;  // recurrent part
  DType conv_dtype = DType::kF32;   // raw convolution inputs: the activation dtype
};

// The device memory that page and slot ids index: latent pages of all MLA layers and recurrent plus convolution states
// of all KDA layers of one rank.
//   page p:  [mla layer][page_size][latent + rope]
//   slot s:  [kda layer]{ state [H, d, d], conv [W-1, 3*H*d] }, each part 256-byte aligned
// so that copying, zeroing or scrubbing one id is one contiguous operation. Used from the engine thread only.
class CacheStorage {
 public:
  // Throws DeviceError when the memory is not there.
  CacheStorage(const ModelConfig& config, const CacheGeometry& geometry, Ops& ops);
  ~CacheStorage();
  CacheStorage(const CacheStorage&) = delete;
  CacheStorage& operator=(const CacheStorage&) = delete;

  // The same sizes without allocating, for plans.
  static int64_t PageBytes(const ModelConfig& config, const CacheGeometry& geometry);
  static int64_t SlotBytes(const ModelConfig& config, const CacheGeometry& geometry);

  const CacheGeometry& geometry() const { return geometry_; }
  MlaPages Pages(int32_t mla_layer) const;
  void* State(int32_t kda_layer) const;      // of slot 0
  void* ConvState(int32_t kda_layer) const;  // of slot 0
  int64_t slot_stride() const { return slot_bytes_; }

  void ZeroSlot(StateSlot slot);
  void CopySlot(StateSlot from, StateSlot to);
  void CopyPage(PageId from, PageId to);
  // Overwrites with `byte`: 0xFF reads as NaN. For scrubbing and for tests that poison what must not be read.
  void FillSlot(StateSlot slot, uint8_t byte);
  void FillPage(PageId page, uint8_t byte);

  void* SlotData(StateSlot slot) const;
  void* PageData(PageId page) const;
  int64_t page_bytes() const { return page_bytes_; }

 private:
  Ops& ops_;
  CacheGeometry geometry_;
  int64_t page_bytes_ = 0;
  int64_t page_layer_bytes_ = 0;
  int64_t slot_bytes_ = 0;
  int64_t state_bytes_ = 0;  // one layer's recurrent part, padded
  int64_t conv_bytes_ = 0;   // one layer's convolution part, padded
  char* pages_ = nullptr;
  char* slots_ = nullptr;
};

}  // namespace k3
