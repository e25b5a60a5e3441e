#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/core/shape_check.h"
#include "kernels/core/tree_sum.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {

void CpuOps::PackSlots(const PackSlotsParams& p, Stream) {
  const int64_t tokens = p.x.rows;
  CheckMatrix("PackSlots", "out", p.out, p.peers * p.rows, p.x.cols, p.x.dtype);
  CheckTrue(p.peers > 0 && p.first_part >= 0 && p.first_part + p.peers <= p.parts, "PackSlots",
            "peers " + std::to_string(p.first_part) + " to " + std::to_string(p.first_part + p.peers - 1) +
                " must be among " + std::to_string(p.parts) + " parts");
  CheckTrue(p.top_k > 0, "PackSlots", "top_k must be positive, got " + std::to_string(p.top_k));
  CheckTrue(tokens <= p.rows, "PackSlots",
            std::to_string(tokens) + " rows do not fit " + std::to_string(p.rows) + " slots");
  if (tokens > 0) {
    CheckPointer("PackSlots", "ids", p.ids);
    CheckPointer("PackSlots", "weights", p.weights);
  }
  CheckPointer("PackSlots", "out_ids", p.out_ids);
  CheckPointer("PackSlots", "out_weights", p.out_weights);
  CheckPointer("PackSlots", "counts", p.counts);
  CheckPointer("PackSlots", "slots", p.slots);
  const size_t row_bytes = static_cast<size_t>(p.x.cols) * SizeOf(p.x.dtype);
  const size_t pick_bytes = static_cast<size_t>(p.top_k) * 4;
  ForTasks(p.peers, tokens * (p.top_k + p.x.cols / 8), [&](int64_t peer, int) {
    const int64_t part = p.first_part + peer;
    const int64_t first = p.experts * part / p.parts, end = p.experts * (part + 1) / p.parts;
    int32_t used = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t* ids = p.ids + t * p.top_k;
      const bool chosen = std::any_of(ids, ids + p.top_k, [&](int32_t id) { return id >= first && id < end; });
      p.slots[peer * p.rows + t] = chosen ? used : -1;
      if (!chosen) continue;
      const int64_t slot = peer * p.rows + used++;
      std::memcpy(p.out.as<char>() + static_cast<size_t>(slot * p.out.ld) * SizeOf(p.x.dtype),
                  p.x.as<char>() + static_cast<size_t>(t * p.x.ld) * SizeOf(p.x.dtype), row_bytes);
      std::memcpy(p.out_ids + slot * p.top_k, ids, pick_bytes);
      std::memcpy(p.out_weights + slot * p.top_k, p.weights + t * p.top_k, pick_bytes);
    }
    std::fill(p.out_ids + (peer * p.rows + used) * p.top_k, p.out_ids + (peer + 1) * p.rows * p.top_k, -1);
    p.counts[peer] = used;
  });
}

void CpuOps::SumSlots(const SumSlotsParams& p, Stream) {
  CheckMatrix("SumSlots", "out", p.out, p.out.rows, p.out.cols, DType::kF32);
  CheckTrue(p.peers > 0 && p.peers <= kMaxTreeParts, "SumSlots",
            "peers must be in [1, " + std::to_string(kMaxTreeParts) + "], got " + std::to_string(p.peers));
  CheckTrue(p.out.rows <= p.rows, "SumSlots",
            std::to_string(p.out.rows) + " rows do not fit " + std::to_string(p.rows) + " slots");
  if (p.out.rows == 0) return;
  CheckPointer("SumSlots", "data", p.data);
  CheckPointer("SumSlots", "slots", p.slots);
  const int64_t width = p.out.cols;
  if (zeros_.size() < static_cast<size_t>(width)) zeros_.resize(static_cast<size_t>(width));
  ForRows(p.out.rows, p.peers * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const auto part = [&](int peer) -> const float* {
        const int32_t slot = p.slots[peer * p.rows + t];
        return slot < 0 ? zeros_.data() : static_cast<const float*>(p.data) + (peer * p.rows + slot) * width;
      };
      k3::TreeSum(part, p.peers, 0, width, p.out.as<float>() + t * p.out.ld);
    }
  });
}

}  // namespace k3
