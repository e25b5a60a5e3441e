#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kernels/ops.h"

namespace k3 {

// An Ops that hands everything to another one, for those that look at some of the calls.
class ForwardingOps : public Ops {
 public:
  std::string device_name() const override { return inner_->device_name(); }
  bool is_cpu() const override { return inner_->is_cpu(); }
  DType activation_dtype() const override { return inner_->activation_dtype(); }
  Stream stream() const override { return inner_->stream(); }
  void BindThread() override { inner_->BindThread(); }
  void* Allocate(size_t bytes) override { return inner_->Allocate(bytes); }
  void Free(void* data) noexcept override { inner_->Free(data); }
  void* AllocateHost(size_t bytes) override { return inner_->AllocateHost(bytes); }
  void FreeHost(void* data) noexcept override { inner_->FreeHost(data); }
  void CopyToDevice(void* device, const void* host, size_t bytes, Stream stream) override {
    inner_->CopyToDevice(device, host, bytes, stream);
  }
  void CopyToHost(void* host, const void* device, size_t bytes, Stream stream) override {
    inner_->CopyToHost(host, device, bytes, stream);
  }
  void CopyOnDevice(void* to, const void* from, size_t bytes, Stream stream) override {
    inner_->CopyOnDevice(to, from, bytes, stream);
  }
  void Fill(void* device, uint8_t byte, size_t bytes, Stream stream) override {
    inner_->Fill(device, byte, bytes, stream);
  }
  void Synchronize(Stream stream) override { inner_->Synchronize(stream); }
  size_t TotalMemory() const override { return inner_->TotalMemory(); }
  size_t FreeMemory() const override { return inner_->FreeMemory(); }
  Stream Fork(Stream stream) override { return inner_->Fork(stream); }
  void Join(Stream side, Stream stream) override { inner_->Join(side, stream); }
  Event MakeEvent() override { return inner_->MakeEvent(); }
  void FreeEvent(Event event) noexcept override { inner_->FreeEvent(event); }
  void RecordEvent(Event event, Stream stream) override { inner_->RecordEvent(event, stream); }
  void WaitEvent(Event event) override { inner_->WaitEvent(event); }
  double Milliseconds(Event from, Event to) override { return inner_->Milliseconds(from, to); }
  void BeginRange(const char* name) override { inner_->BeginRange(name); }
  void EndRange() override { inner_->EndRange(); }
  void Measure(const char* name, Stream stream, const std::function<void()>& work) override {
    inner_->Measure(name, stream, work);
  }
  bool can_capture() const override { return inner_->can_capture(); }
  std::unique_ptr<CapturedWork> Capture(const std::function<void()>& record, Stream stream) override {
    return inner_->Capture(record, stream);
  }
  void Launch(const CapturedWork& work, Stream stream) override { inner_->Launch(work, stream); }
  std::unique_ptr<LinearWeight> MakeLinear(std::span<const HostTensor> parts) override {
    return inner_->MakeLinear(parts);
  }
  std::unique_ptr<ExpertWeights> MakeExperts(int32_t first, std::span<const HostExpert> experts) override {
    return inner_->MakeExperts(first, experts);
  }
  std::unique_ptr<LatentProjection> MakeLatentProjection(const HostTensor& kv_b, int32_t heads, int32_t nope_dim,
                                                         int32_t value_dim) override {
    return inner_->MakeLatentProjection(kv_b, heads, nope_dim, value_dim);
  }
  MatrixView MakeTable(const HostTensor& table) override { return inner_->MakeTable(table); }
  const float* MakeVector(std::span<const float> values) override { return inner_->MakeVector(values); }
  size_t KdaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t head_dim,
                         int32_t conv_width) const override {
    return inner_->KdaScratchBytes(tokens, sequences, heads, head_dim, conv_width);
  }
  size_t MlaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t latent_dim, int32_t rope_dim,
                         int32_t nope_dim, int32_t value_dim, int64_t max_context) const override {
    return inner_->MlaScratchBytes(tokens, sequences, heads, latent_dim, rope_dim, nope_dim, value_dim, max_context);
  }
  size_t MoeScratchBytes(int64_t tokens, int32_t top_k, int32_t experts, int64_t in, int64_t inner) const override {
    return inner_->MoeScratchBytes(tokens, top_k, experts, in, inner);
  }
  size_t SampleScratchBytes(int64_t rows, int64_t vocab) const override {
    return inner_->SampleScratchBytes(rows, vocab);
  }

  void BeginStep(const BeginStepParams& params, Stream stream) override { inner_->BeginStep(params, stream); }
  void Embed(const EmbedParams& params, Stream stream) override { inner_->Embed(params, stream); }
  void Linear(const LinearParams& params, Stream stream) override { inner_->Linear(params, stream); }
  void LinearPair(const LinearParams& first, const LinearParams& second, Stream stream) override {
    inner_->LinearPair(first, second, stream);
  }
  void GatherRows(const GatherRowsParams& params, Stream stream) override { inner_->GatherRows(params, stream); }
  void CopyMatrix(const CopyMatrixParams& params, Stream stream) override { inner_->CopyMatrix(params, stream); }
  void TreeSum(const TreeSumParams& params, Stream stream) override { inner_->TreeSum(params, stream); }
  void PackSlots(const PackSlotsParams& params, Stream stream) override { inner_->PackSlots(params, stream); }
  void SumSlots(const SumSlotsParams& params, Stream stream) override { inner_->SumSlots(params, stream); }
  void RmsNorm(const RmsNormParams& params, Stream stream) override { inner_->RmsNorm(params, stream); }
  void AddRmsNorm(const AddRmsNormParams& params, Stream stream) override { inner_->AddRmsNorm(params, stream); }
  AttnResForm ChooseAttnResForm(int64_t rows, int64_t cols, int32_t closed, int32_t sites) const override {
    return inner_->ChooseAttnResForm(rows, cols, closed, sites);
  }
  void AttnResMix(const AttnResMixParams& params, Stream stream) override { inner_->AttnResMix(params, stream); }
  void AttnResClosed(const AttnResClosedParams& params, Stream stream) override {
    inner_->AttnResClosed(params, stream);
  }
  void Kda(const KdaParams& params, Stream stream) override { inner_->Kda(params, stream); }
  void MlaAppend(const MlaAppendParams& params, Stream stream) override { inner_->MlaAppend(params, stream); }
  void MlaAttention(const MlaAttentionParams& params, Stream stream) override { inner_->MlaAttention(params, stream); }
  void GatedActivation(const GatedActivationParams& params, Stream stream) override {
    inner_->GatedActivation(params, stream);
  }
  void RouterTopK(const RouterTopKParams& params, Stream stream) override { inner_->RouterTopK(params, stream); }
  void RouterSoftCap(const RouterSoftCapParams& params, Stream stream) override {
    inner_->RouterSoftCap(params, stream);
  }
  void MoeExperts(const MoeExpertsParams& params, Stream stream) override { inner_->MoeExperts(params, stream); }
  void Sample(const SampleParams& params, Stream stream) override { inner_->Sample(params, stream); }

 protected:
  explicit ForwardingOps(std::unique_ptr<Ops> inner) : inner_(std::move(inner)) {}
  std::unique_ptr<Ops> inner_;
};

}  // namespace k3
