#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/attn_res_form.h"
#include "kernels/core/dtype.h"
#include "kernels/core/error.h"
#include "kernels/core/tensor.h"
#include "kernels/op_params.h"

namespace k3 {

// Weights in the form in which a backend multiplies by them (packed panels on the CPU, a plain or re-tiled matrix on
// the GPU). Immutable once made, safe to read from any thread, owned by whoever holds the pointer.
class LinearWeight {
 public:
  virtual ~LinearWeight() = default;
  int64_t out = 0;
  int64_t in = 0;
  size_t bytes = 0;
};

// The experts of one layer that live on this rank: ids [first, first + count).
class ExpertWeights {
 public:
  virtual ~ExpertWeights() = default;
  int32_t first = 0;
  int32_t count = 0;
  int64_t in = 0;     // width of the expert input and output
  int64_t inner = 0;  // width between w1/w3 and w2
  size_t bytes = 0;
};

// kv_b_proj split per head: keys Wuk [nope, latent] and values Wuv [value, latent].
class LatentProjection {
 public:
  virtual ~LatentProjection() = default;
  int32_t heads = 0;
  int32_t nope_dim = 0;
  int32_t value_dim = 0;
  int32_t latent_dim = 0;
  size_t bytes = 0;
};

// One expert as it lies in the checkpoint. Either plain (`scale` empty: w [rows, cols] BF16/F16/F32) or MXFP4
// (w [rows, cols/2] U8 packed, scale [rows, cols/32] U8; spec 2.3).
struct HostExpert {
  HostTensor w1, w1_scale;  // gate, [inner, in]
  HostTensor w3, w3_scale;  // up,   [inner, in]
  HostTensor w2, w2_scale;  // down, [in, inner]
};

// An ordered queue of device work. The CPU backend runs everything at once and ignores it.
using Stream = void*;

// A point in a stream. Null on the CPU, where everything has happened when a call returns.
using Event = void*;

// Device work that was recorded once and can be launched again and again, on the memory it was recorded with.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
  size_t nodes = 0;  // kernels and copies
};

// The only door between the model and the devices: one object per rank. Memory, weights, and the model's ops at the
// grain that a fast kernel would fuse. Model code is written once above it.
//
// Ops run in stream order and do not synchronize. Shapes are checked on the host before anything is launched; a
// violation, like any failed device call, throws DeviceError. The op methods are called from one thread; the Make
// methods may be called from several threads at once.
class Ops {
 public:
  virtual ~Ops() = default;

  virtual std::string device_name() const = 0;
  virtual bool is_cpu() const = 0;
  virtual DType activation_dtype() const = 0;  // F32 on the CPU; BF16 or F32 (--compute-dtype) on CUDA
  virtual Stream stream() const = 0;           // the rank's compute stream
  // To be called once by every thread, other than the one that made the object, before it calls ops.
  virtual void BindThread() {}

  // --- memory ---
  virtual void* Allocate(size_t bytes) = 0;  // at least 256-byte aligned, contents undefined; throws when exhausted
  virtual void Free(void* data) noexcept = 0;
  virtual void* AllocateHost(size_t bytes) = 0;  // page-locked where that matters
  virtual void FreeHost(void* data) noexcept = 0;
  virtual void CopyToDevice(void* device, const void* host, size_t bytes, Stream stream) = 0;
  virtual void CopyToHost(void* host, const void* device, size_t bytes, Stream stream) = 0;
  virtual void CopyOnDevice(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual void Fill(void* device, uint8_t byte, size_t bytes, Stream stream) = 0;
  virtual void Synchronize(Stream stream) = 0;
  virtual size_t TotalMemory() const = 0;  // bytes of the device (CPU: of the machine or its cgroup)
  virtual size_t FreeMemory() const = 0;

  // --- a second stream ---
  // A stream for work that may run beside what `stream` gets next; it begins where `stream` is now. One at a time: Join
  // makes `stream` wait for all that was put on it. Where nothing can run beside, `stream` itself.
  virtual Stream Fork(Stream stream) { return stream; }
  virtual void Join(Stream side, Stream stream) { static_cast<void>(side), static_cast<void>(stream); }

  // --- points in a stream; owned by the caller ---
  virtual Event MakeEvent() { return nullptr; }
  virtual void FreeEvent(Event event) noexcept { static_cast<void>(event); }
  virtual void RecordEvent(Event event, Stream stream) { static_cast<void>(event), static_cast<void>(stream); }
  virtual void WaitEvent(Event event) { static_cast<void>(event); }  // the host waits; failed device work throws here
  // Device time between two points that were waited for; 0 on the CPU.
  virtual double Milliseconds(Event from, Event to) { return static_cast<void>(from), static_cast<void>(to), 0.0; }

  // Names what is put on streams in between, for timeline tools. Nested; costs nothing without a tool.
  virtual void BeginRange(const char* name) { static_cast<void>(name); }
  virtual void EndRange() {}
  // Runs `work`, which puts something on the stream that is no op of this object, such as a collective. A backend that
  // measures its ops measures that too, under `name`.
  virtual void Measure(const char* name, Stream stream, const std::function<void()>& work) {
    static_cast<void>(name), static_cast<void>(stream);
    work();
  }

  // --- captured work ---
  virtual bool can_capture() const { return false; }
  // Records what `record` puts on the stream, without running it. It must not synchronize, allocate, or copy from or to
  // host memory.
  virtual std::unique_ptr<CapturedWork> Capture(const std::function<void()>& record, Stream stream);
  virtual void Launch(const CapturedWork& work, Stream stream);

  // --- weights ---
  // Rows of all parts stacked: W = [parts[0]; parts[1]; ...], each [rows_i, in] BF16, F16 or F32.
  virtual std::unique_ptr<LinearWeight> MakeLinear(std::span<const HostTensor> parts) = 0;
  virtual std::unique_ptr<ExpertWeights> MakeExperts(int32_t first, std::span<const HostExpert> experts) = 0;
  // kv_b [heads * (nope + value), latent], per head nope rows then value rows.
  virtual std::unique_ptr<LatentProjection> MakeLatentProjection(const HostTensor& kv_b, int32_t heads,
                                                                 int32_t nope_dim, int32_t value_dim) = 0;
  // An embedding table for Embed. The CPU backend keeps pointing into the (mapped) host tensor.
  virtual MatrixView MakeTable(const HostTensor& table) = 0;
  // A small vector as fp32 in device memory, owned by the Ops object.
  virtual const float* MakeVector(std::span<const float> values) = 0;

  // --- scratch sizes, for steps of at most `tokens` tokens and `sequences` sequences ---
  virtual size_t KdaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t head_dim,
                                 int32_t conv_width) const = 0;
  virtual size_t MlaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t latent_dim, int32_t rope_dim,
                                 int32_t nope_dim, int32_t value_dim, int64_t max_context) const = 0;
  virtual size_t MoeScratchBytes(int64_t tokens, int32_t top_k, int32_t experts, int64_t in, int64_t inner) const = 0;
  virtual size_t SampleScratchBytes(int64_t rows, int64_t vocab) const = 0;

  // --- the model's ops; see op_params.h ---
  virtual void BeginStep(const BeginStepParams& params, Stream stream) = 0;
  virtual void Embed(const EmbedParams& params, Stream stream) = 0;
  virtual void Linear(const LinearParams& params, Stream stream) = 0;
  // Two products that do not depend on each other.
  virtual void LinearPair(const LinearParams& first, const LinearParams& second, Stream stream) {
    Linear(first, stream);
    Linear(second, stream);
  }
  virtual void GatherRows(const GatherRowsParams& params, Stream stream) = 0;
  virtual void CopyMatrix(const CopyMatrixParams& params, Stream stream) = 0;
  virtual void TreeSum(const TreeSumParams& params, Stream stream) = 0;
  virtual void PackSlots(const PackSlotsParams& params, Stream stream) = 0;
  virtual void SumSlots(const SumSlotsParams& params, Stream stream) = 0;
  virtual void RmsNorm(const RmsNormParams& params, Stream stream) = 0;
  virtual void AddRmsNorm(const AddRmsNormParams& params, Stream stream) = 0;
  // How `sites` sites with the same `closed` >= 1 closed blocks are to be mixed: as measured (attn_res_form.h). Where a
  // row's bits may not depend on what else runs, on the CPU and in batch-invariant mode, one form for any number of
  // rows.
  virtual AttnResForm ChooseAttnResForm(int64_t rows, int64_t cols, int32_t closed, int32_t sites) const {
    static_cast<void>(rows), static_cast<void>(cols), static_cast<void>(closed), static_cast<void>(sites);
    return AttnResForm::kOnePass;
  }
  virtual void AttnResMix(const AttnResMixParams& params, Stream stream) = 0;
  virtual void AttnResClosed(const AttnResClosedParams& params, Stream stream) = 0;
  virtual void Kda(const KdaParams& params, Stream stream) = 0;
  virtual void MlaAppend(const MlaAppendParams& params, Stream stream) = 0;
  virtual void MlaAttention(const MlaAttentionParams& params, Stream stream) = 0;
  virtual void GatedActivation(const GatedActivationParams& params, Stream stream) = 0;
  virtual void RouterTopK(const RouterTopKParams& params, Stream stream) = 0;
  virtual void RouterSoftCap(const RouterSoftCapParams& params, Stream stream) = 0;
  virtual void MoeExperts(const MoeExpertsParams& params, Stream stream) = 0;
  virtual void Sample(const SampleParams& params, Stream stream) = 0;
};

struct CpuOptions {
  int threads = 0;            // 0: the CPUs that the cgroup and the affinity mask allow
  bool force_scalar = false;  // the reference loops instead of AVX2 / AVX-512
};
std::unique_ptr<Ops> MakeCpuOps(const CpuOptions& options = {});

struct CudaOptions {
  int device = 0;
  DType compute_dtype = DType::kBF16;  // kBF16 or kF32
  bool batch_invariant = false;
};
// Throws DeviceError when built without CUDA, without a usable device, or for an architecture other than sm_90; the
// message names what is needed and what was found.
std::unique_ptr<Ops> MakeCudaOps(const CudaOptions& options = {});
// Number of CUDA devices usable by this build; 0 without CUDA. Never throws.
int CudaDeviceCount() noexcept;

}  // namespace k3
