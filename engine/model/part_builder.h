#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/tensor_match.h"
#include "engine/model/tensor_table.h"
#include "engine/model/weights_loader.h"
#include "kernels/ops.h"

namespace k3 {

// Builds one part of the weights, a layer or what lies outside the layers, and puts it into `model`. One object per
// part; parts may be built on different threads. `match` is null with random weights.
class PartBuilder {
 public:
  PartBuilder(const TensorMatch* match, Ops& ops, const LoadOptions& options, LoadedModel& model)
      : match_(match),
        config_(model.config),
        checkpoint_(model.checkpoint.get()),
        ops_(ops),
        options_(options),
        model_(model) {}

  // DataLoss for what only the data can show: a NaN scale.
  absl::Status Layer(int32_t layer);
  // Embedding, output head, final norm and mix.
  void Model();

  // Device memory of what was built.
  size_t bytes() const { return bytes_; }

 private:
  const HostTensor& Part(TensorRole role) const;
  bool Has(TensorRole role) const;
  const TensorSpec* Spec(TensorRole role) const;

  // Every matrix of the part, as a whole or as this rank's share, into parts_.
  void FetchMatrices();
  HostTensor RandomMatrix(const TensorSpec& spec) const;
  void Cut(TensorShard shard, HostTensor& tensor) const;
  uint8_t* NewBuffer(size_t bytes);
  void Materialise(HostTensor& tensor);
  // Old writers did not pad the header, so data may lie at odd addresses.
  HostTensor Aligned(HostTensor tensor);

  // The values of a small tensor, this rank's share of them; empty when the model or the checkpoint has none.
  std::vector<float> Values(TensorRole role) const;
  const float* Upload(const std::vector<float>& values);
  const float* Vector(TensorRole role);
  // Key-norm weight times pseudo-query (spec 3.2), folded in fp32 as the formula does.
  const float* MixQuery(TensorRole norm_role, TensorRole query_role);
  // The rows of those of these tensors that the part has, in this order; null when it has none.
  std::unique_ptr<LinearWeight> Linear(std::initializer_list<TensorRole> roles);

  std::unique_ptr<KdaWeights> Kda();
  std::unique_ptr<MlaWeights> Mla();
  MlpWeights Mlp(TensorRole gate, TensorRole up, TensorRole down);
  std::unique_ptr<MoeWeights> Moe();
  absl::Status Experts(int32_t layer, MoeWeights& out);
  // Appends experts [range.first, range.first + range.count) as one group.
  absl::Status ExpertGroup(int32_t layer, const ExpertRange& range, MoeWeights& out);
  HostTensor FetchPlainExpert(const TensorSpec& spec);
  absl::Status FetchPacked(const TensorSpec& spec, HostTensor& weight, HostTensor& scale);
  static absl::Status CheckScales(const HostTensor& scale, const std::string& file);
  void WarnIfHeadDiffers(const HostTensor& embedding, const HostTensor& head) const;

  const TensorMatch* match_;
  const ModelConfig& config_;
  const Checkpoint* checkpoint_;
  Ops& ops_;
  const LoadOptions& options_;
  LoadedModel& model_;
  std::vector<TensorSpec> specs_;
  std::array<HostTensor, static_cast<size_t>(TensorRole::kCount)> parts_;  // this rank's share, by role
  std::vector<std::unique_ptr<uint8_t[]>> buffers_;  // freed with this object, after the backend has copied
  size_t bytes_ = 0;
};

}  // namespace k3
