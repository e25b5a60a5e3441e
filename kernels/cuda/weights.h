#pragma once

#include "kernels/cuda/memory.h"
#include "kernels/ops.h"

// The weight forms of the CUDA backend. "act" is Device::act.
namespace k3::cuda {

// [out, in] act, row-major and contiguous.
struct CudaLinear final : LinearWeight {
  DeviceMemory memory;
  const void* data() const { return memory.data(); }
};

// kv_b [heads][nope + value][latent] act as in the checkpoint: used whole to expand latents into keys and values, and
// per head (rows of Wuk, then of Wuv) in the absorbed form.
struct CudaLatentProjection final : LatentProjection {
  DeviceMemory memory;
  const void* data() const { return memory.data(); }
};

// The element form of a rank's experts: all of them alike.
enum class ExpertForm : uint8_t { kPlain, kTiled, kMxfp4 };

// Per expert the rows of w1 and w3 interleaved in groups (group j of w1, then group j of w3), so that a tile of the
// first product holds both inputs of its activation; then w2 as it is. kPlain: act elements. kTiled: bf16 in the order
// of weight_tiles.h, where both widths are multiples of 32. kMxfp4: codes and scales in the order of mxfp4_layout.h,
// rows padded to a multiple of 64 inputs.
struct CudaExperts final : ExpertWeights {
  ExpertForm form = ExpertForm::kPlain;
  int32_t interleave = 8;                          // rows of a group; 1 where inner is no multiple of 8
  DeviceMemory w13;                                // [count][2 * inner][in]
  DeviceMemory w13_scale;                          // kMxfp4
  DeviceMemory w2;                                 // [count][in][inner]
  DeviceMemory w2_scale;                           // kMxfp4
  bool rare_scales = false, large_scales = false;  // kMxfp4: see Mxfp4ScalesFound
};

}  // namespace k3::cuda
