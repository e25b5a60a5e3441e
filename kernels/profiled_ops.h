#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace k3 {

// An Ops that measures how long each model op of another one takes: between events on the stream, or by the clock on
// the CPU. While it is active every step ends with a synchronization and must be launched op by op (captured work shows
// as one piece). Inactive it hands everything through.
class ProfiledOps final : public Ops {
 public:
  // One kind of op over all profiled steps. Products are told apart by their shape.
  struct Line {
    std::string name;
    uint64_t calls = 0;
    double milliseconds = 0;
  };
  struct Table {
    int64_t steps = 0;
    double milliseconds = 0;  // of the steps, from their first op to their last
    std::vector<Line> lines;  // slowest first
    std::string Text() const;
  };

  explicit ProfiledOps(std::unique_ptr<Ops> inner);
  ~ProfiledOps() override;

  // Active from now on for `steps` steps.
  void Start(int64_t steps);

  bool active() const { return steps_left_ > 0; }
  // The device has finished a step: takes the measurements over. True when it was the last one to be profiled.
  bool EndStep();
  Table Result() const;

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
  Event MakeEvent() override { return inner_->MakeEvent(); }
  void FreeEvent(Event event) noexcept override { inner_->FreeEvent(event); }
  void RecordEvent(Event event, Stream stream) override { inner_->RecordEvent(event, stream); }
  void WaitEvent(Event event) override { inner_->WaitEvent(event); }
  double Milliseconds(Event from, Event to) override { return inner_->Milliseconds(from, to); }
  void BeginRange(const char* name) override { inner_->BeginRange(name); }
  void EndRange() override { inner_->EndRange(); }
  bool can_capture() const override { return inner_->can_capture(); }
  std::unique_ptr<CapturedWork> Capture(const std::function<void()>& record, Stream stream) override;
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

  void BeginStep(const BeginStepParams& params, Stream stream) override;
  void Embed(const EmbedParams& params, Stream stream) override;
  void Linear(const LinearParams& params, Stream stream) override;
  void GatherRows(const GatherRowsParams& params, Stream stream) override;
  void CopyMatrix(const CopyMatrixParams& params, Stream stream) override;
  void TreeSum(const TreeSumParams& params, Stream stream) override;
  void RmsNorm(const RmsNormParams& params, Stream stream) override;
  void AddRmsNorm(const AddRmsNormParams& params, Stream stream) override;
  void AttnResMix(const AttnResMixParams& params, Stream stream) override;
  void Kda(const KdaParams& params, Stream stream) override;
  void MlaAppend(const MlaAppendParams& params, Stream stream) override;
  void MlaAttention(const MlaAttentionParams& params, Stream stream) override;
  void GatedActivation(const GatedActivationParams& params, Stream stream) override;
  void RouterTopK(const RouterTopKParams& params, Stream stream) override;
  void MoeExperts(const MoeExpertsParams& params, Stream stream) override;
  void Sample(const SampleParams& params, Stream stream) override;

 private:
  struct Measured {
    size_t line;
    Event from;
    Event to;
  };
  template <typename Call>
  void Measure(const std::string& name, Stream stream, Call&& call);
  Event TakeEvent();

  std::unique_ptr<Ops> inner_;
  int64_t steps_left_ = 0;
  bool recording_ = false;  // a capture: nothing runs, so nothing is measured
  Table table_;
  std::map<std::string, size_t> line_of_;
  std::vector<Measured> open_;  // of the step that runs
  std::vector<Event> events_;   // all that were made; the first used_ are in use
  size_t used_ = 0;
};

}  // namespace k3
