#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/core/bfloat16.h"
#include "kernels/ops.h"

namespace k3::testing {

// The values of a host tensor, row strides honoured; packed MXFP4 and other bytes as numbers 0..255.
inline std::vector<float> HostValues(const HostTensor& tensor) {
  std::vector<float> values;
  const int64_t cols = tensor.shape.back();
  const int64_t rows = cols == 0 ? 0 : tensor.elements() / cols;
  const int64_t stride = tensor.row_stride == 0 ? cols : tensor.row_stride;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const char* at =
          static_cast<const char*>(tensor.data) + (r * stride + c) * static_cast<int64_t>(SizeOf(tensor.dtype));
      uint16_t half = 0;
      float value = 0;
      switch (tensor.dtype) {
        case DType::kF32:
          std::memcpy(&value, at, 4);
          break;
        case DType::kU8:
          value = static_cast<uint8_t>(*at);
          break;
        default:
          std::memcpy(&half, at, 2);
          value = tensor.dtype == DType::kBF16 ? Bf16ToFloat(half) : F16ToFloat(half);
      }
      values.push_back(value);
    }
  }
  return values;
}

struct RecordedLinear : LinearWeight {
  std::vector<std::string> names;
  std::vector<float> values;  // [out, in]
};

struct RecordedExperts : ExpertWeights {
  struct Expert {
    std::vector<float> w1, w1_scale, w3, w3_scale, w2, w2_scale;
  };
  std::vector<Expert> experts;
};

struct RecordedProjection : LatentProjection {
  std::vector<float> values;
};

// A backend that keeps what the loader hands it and computes nothing.
class RecordingOps : public Ops {
 public:
  explicit RecordingOps(bool is_cpu = true) : is_cpu_(is_cpu) {}

  std::vector<HostTensor> tables;        // as given to MakeTable
  std::vector<HostTensor> without_data;  // random tensors that were left to the backend

  std::string device_name() const override { return "recording"; }
  bool is_cpu() const override { return is_cpu_; }
  DType activation_dtype() const override { return DType::kF32; }
  Stream stream() const override { return nullptr; }

  std::unique_ptr<LinearWeight> MakeLinear(std::span<const HostTensor> parts) override {
    auto linear = std::make_unique<RecordedLinear>();
    linear->in = parts[0].shape[1];
    for (const HostTensor& part : parts) {
      linear->names.push_back(part.name);
      linear->out += part.shape[0];
      if (Given(part)) Append(HostValues(part), linear->values);
    }
    linear->bytes = static_cast<size_t>(linear->out * linear->in) * 4;
    return linear;
  }
  std::unique_ptr<ExpertWeights> MakeExperts(int32_t first, std::span<const HostExpert> experts) override {
    auto out = std::make_unique<RecordedExperts>();
    out->first = first;
    out->count = static_cast<int32_t>(experts.size());
    for (const HostExpert& expert : experts) {
      RecordedExperts::Expert copy;
      const auto record = [&](const HostTensor& tensor, std::vector<float>& values) {
        if (!tensor.shape.empty() && Given(tensor)) values = HostValues(tensor);
      };
      record(expert.w1, copy.w1);
      record(expert.w1_scale, copy.w1_scale);
      record(expert.w3, copy.w3);
      record(expert.w3_scale, copy.w3_scale);
      record(expert.w2, copy.w2);
      record(expert.w2_scale, copy.w2_scale);
      out->experts.push_back(std::move(copy));
    }
    return out;
  }
  std::unique_ptr<LatentProjection> MakeLatentProjection(const HostTensor& kv_b, int32_t heads, int32_t nope_dim,
                                                         int32_t value_dim) override {
    auto out = std::make_unique<RecordedProjection>();
    out->heads = heads;
    out->nope_dim = nope_dim;
    out->value_dim = value_dim;
    out->latent_dim = static_cast<int32_t>(kv_b.shape[1]);
    if (Given(kv_b)) out->values = HostValues(kv_b);
    return out;
  }
  MatrixView MakeTable(const HostTensor& table) override {
    Given(table);
    std::lock_guard lock(mutex_);
    tables.push_back(table);
    return {const_cast<void*>(table.data), table.dtype, table.shape[0], table.shape[1], table.shape[1]};
  }
  const float* MakeVector(std::span<const float> values) override {
    std::lock_guard lock(mutex_);
    vectors_.push_back(std::make_unique<std::vector<float>>(values.begin(), values.end()));
    sizes_[vectors_.back()->data()] = values.size();
    return vectors_.back()->data();
  }
  // What MakeVector was given for this pointer.
  std::vector<float> Vector(const float* data) const {
    return data == nullptr ? std::vector<float>() : std::vector<float>(data, data + sizes_.at(data));
  }

  void* Allocate(size_t bytes) override { return std::malloc(bytes); }
  void Free(void* data) noexcept override { std::free(data); }
  void* AllocateHost(size_t bytes) override { return std::malloc(bytes); }
  void FreeHost(void* data) noexcept override { std::free(data); }
  void CopyToDevice(void*, const void*, size_t, Stream) override { Unused(); }
  void CopyToHost(void*, const void*, size_t, Stream) override { Unused(); }
  void CopyOnDevice(void*, const void*, size_t, Stream) override { Unused(); }
  void Fill(void*, uint8_t, size_t, Stream) override { Unused(); }
  void Synchronize(Stream) override {}
  size_t TotalMemory() const override { return 0; }
  size_t FreeMemory() const override { return 0; }
  size_t KdaScratchBytes(int64_t, int64_t, int32_t, int32_t, int32_t) const override { return 0; }
  size_t MlaScratchBytes(int64_t, int64_t, int32_t, int32_t, int32_t, int32_t, int32_t, int64_t) const override {
    return 0;
  }
  size_t MoeScratchBytes(int64_t, int32_t, int32_t, int64_t, int64_t) const override { return 0; }
  size_t SampleScratchBytes(int64_t, int64_t) const override { return 0; }
  void BeginStep(const BeginStepParams&, Stream) override { Unused(); }
  void Embed(const EmbedParams&, Stream) override { Unused(); }
  void Linear(const LinearParams&, Stream) override { Unused(); }
  void GatherRows(const GatherRowsParams&, Stream) override { Unused(); }
  void CopyMatrix(const CopyMatrixParams&, Stream) override { Unused(); }
  void TreeSum(const TreeSumParams&, Stream) override { Unused(); }
  void PackSlots(const PackSlotsParams&, Stream) override { Unused(); }
  void SumSlots(const SumSlotsParams&, Stream) override { Unused(); }
  void RmsNorm(const RmsNormParams&, Stream) override { Unused(); }
  void AddRmsNorm(const AddRmsNormParams&, Stream) override { Unused(); }
  void AttnResMix(const AttnResMixParams&, Stream) override { Unused(); }
  void AttnResClosed(const AttnResClosedParams&, Stream) override { Unused(); }
  void Kda(const KdaParams&, Stream) override { Unused(); }
  void MlaAppend(const MlaAppendParams&, Stream) override { Unused(); }
  void MlaAttention(const MlaAttentionParams&, Stream) override { Unused(); }
  void GatedActivation(const GatedActivationParams&, Stream) override { Unused(); }
  void RouterTopK(const RouterTopKParams&, Stream) override { Unused(); }
  void RouterSoftCap(const RouterSoftCapParams&, Stream) override { Unused(); }
  void MoeExperts(const MoeExpertsParams&, Stream) override { Unused(); }
  void Sample(const SampleParams&, Stream) override { Unused(); }

 private:
  static void Unused() { throw DeviceError("RecordingOps computes nothing"); }
  static void Append(const std::vector<float>& more, std::vector<float>& to) {
    to.insert(to.end(), more.begin(), more.end());
  }
  bool Given(const HostTensor& tensor) {
    if (tensor.data != nullptr) return true;
    std::lock_guard lock(mutex_);
    without_data.push_back(tensor);
    return false;
  }

  bool is_cpu_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<std::vector<float>>> vectors_;
  std::map<const float*, size_t> sizes_;
};

}  // namespace k3::testing
