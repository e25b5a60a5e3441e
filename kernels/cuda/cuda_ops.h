#pragma once

#include <mutex>
#include <vector>

#include "kernels/cuda/blas.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/memory.h"
#include "kernels/ops.h"

namespace k3::cuda {

// Ops on one sm_90 device: owns the compute stream and the one beside it, their cuBLASLt handles with fixed workspaces,
// and the small vectors and tables that it made. A null Stream means the compute stream.
class CudaOps final : public Ops {
 public:
  explicit CudaOps(const CudaOptions& options);
  ~CudaOps() override;
  CudaOps(const CudaOps&) = delete;
  CudaOps& operator=(const CudaOps&) = delete;

  std::string device_name() const override { return name_; }
  bool is_cpu() const override { return false; }
  DType activation_dtype() const override { return device_.act; }
  Stream stream() const override { return stream_; }
  void BindThread() override;

  void* Allocate(size_t bytes) override;
  void Free(void* data) noexcept override;
  void* AllocateHost(size_t bytes) override;
  void FreeHost(void* data) noexcept override;
  void CopyToDevice(void* device, const void* host, size_t bytes, Stream stream) override;
  void CopyToHost(void* host, const void* device, size_t bytes, Stream stream) override;
  void CopyOnDevice(void* to, const void* from, size_t bytes, Stream stream) override;
  void Fill(void* device, uint8_t byte, size_t bytes, Stream stream) override;
  void Synchronize(Stream stream) override;
  size_t TotalMemory() const override;
  size_t FreeMemory() const override;

  Stream Fork(Stream stream) override;
  void Join(Stream side, Stream stream) override;
  Event MakeEvent() override;
  void FreeEvent(Event event) noexcept override;
  void RecordEvent(Event event, Stream stream) override;
  void WaitEvent(Event event) override;
  double Milliseconds(Event from, Event to) override;
  void BeginRange(const char* name) override;
  void EndRange() override;
  bool can_capture() const override { return true; }
  std::unique_ptr<CapturedWork> Capture(const std::function<void()>& record, Stream stream) override;
  void Launch(const CapturedWork& work, Stream stream) override;

  std::unique_ptr<LinearWeight> MakeLinear(std::span<const HostTensor> parts) override;
  std::unique_ptr<ExpertWeights> MakeExperts(int32_t first, std::span<const HostExpert> experts) override;
  std::unique_ptr<LatentProjection> MakeLatentProjection(const HostTensor& kv_b, int32_t heads, int32_t nope_dim,
                                                         int32_t value_dim) override;
  MatrixView MakeTable(const HostTensor& table) override;
  const float* MakeVector(std::span<const float> values) override;

  size_t KdaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t head_dim,
                         int32_t conv_width) const override;
  size_t MlaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t latent_dim, int32_t rope_dim,
                         int32_t nope_dim, int32_t value_dim, int64_t max_context) const override;
  size_t MoeScratchBytes(int64_t tokens, int32_t top_k, int32_t experts, int64_t in, int64_t inner) const override;
  size_t SampleScratchBytes(int64_t rows, int64_t vocab) const override;

  void BeginStep(const BeginStepParams& params, Stream stream) override;
  void Embed(const EmbedParams& params, Stream stream) override;
  void Linear(const LinearParams& params, Stream stream) override;
  void LinearPair(const LinearParams& first, const LinearParams& second, Stream stream) override;
  void GatherRows(const GatherRowsParams& params, Stream stream) override;
  void CopyMatrix(const CopyMatrixParams& params, Stream stream) override;
  void TreeSum(const TreeSumParams& params, Stream stream) override;
  void PackSlots(const PackSlotsParams& params, Stream stream) override;
  void SumSlots(const SumSlotsParams& params, Stream stream) override;
  void RmsNorm(const RmsNormParams& params, Stream stream) override;
  void AddRmsNorm(const AddRmsNormParams& params, Stream stream) override;
  AttnResForm ChooseAttnResForm(int64_t rows, int64_t cols, int32_t closed, int32_t sites) const override;
  void AttnResMix(const AttnResMixParams& params, Stream stream) override;
  void AttnResClosed(const AttnResClosedParams& params, Stream stream) override;
  void Kda(const KdaParams& params, Stream stream) override;
  void MlaAppend(const MlaAppendParams& params, Stream stream) override;
  void MlaAttention(const MlaAttentionParams& params, Stream stream) override;
  void GatedActivation(const GatedActivationParams& params, Stream stream) override;
  void RouterTopK(const RouterTopKParams& params, Stream stream) override;
  void RouterSoftCap(const RouterSoftCapParams& params, Stream stream) override;
  void MoeExperts(const MoeExpertsParams& params, Stream stream) override;
  void Sample(const SampleParams& params, Stream stream) override;

 private:
  cudaStream_t Queue(Stream stream) const { return stream != nullptr ? static_cast<cudaStream_t>(stream) : stream_; }

  // Of work on `stream`: products on the side stream have a workspace of their own.
  const Device& DeviceFor(Stream stream) const { return Queue(stream) == side_stream_ ? side_device_ : device_; }

  Device device_;
  Device side_device_;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t side_stream_ = nullptr;
  cudaEvent_t forked_ = nullptr, joined_ = nullptr;
  std::unique_ptr<Blas> blas_, side_blas_;
  std::unique_ptr<Uploader> uploader_;
  std::unique_ptr<ExpertMaker> expert_maker_;
  std::mutex mutex_;
  std::vector<DeviceMemory> owned_;  // tables and vectors; guarded by mutex_
};

}  // namespace k3::cuda
