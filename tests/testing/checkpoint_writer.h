#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "kernels/core/dtype.h"

namespace k3::testing {

// config.json of a configuration, in the nested K3 or the flat Kimi-Linear form.
std::string ConfigJson(const ModelConfig& config);

// A small valid configuration of each family, to be changed by tests: 5 layers (MLA at layers 3 and 4 or 3), 2 heads,
// 8 experts, top 2, vocabulary 256. K3: attention residuals of block size 2, latent MoE of width 32, MXFP4 experts.
ModelConfig SmallK3Config();
ModelConfig SmallKimiLinearConfig();

struct CheckpointTensor {
  std::string name;
  std::string dtype;  // as in the file
  std::vector<int64_t> shape;
  std::vector<uint8_t> data;
};

// How a written checkpoint stores what may be stored in several ways.
struct CheckpointForm {
  enum class ALog { kPadded, kFourD, kPlain };
  uint64_t seed = 1;
  ALog a_log = ALog::kPadded;
  bool conv_3d = true;
  DType conv_dtype = DType::kF32;
  DType plain_dtype = DType::kBF16;  // everything else that is not packed
};

// A random checkpoint of any shape in memory, in released naming; packed experts when the configuration says so. Tests
// change `tensors` before they write it.
class TestCheckpoint {
 public:
  TestCheckpoint(const ModelConfig& config, const CheckpointForm& form = {});

  ModelConfig config;
  std::vector<CheckpointTensor> tensors;

  CheckpointTensor* Find(const std::string& name);  // full name; null when absent
  void Remove(const std::string& name);
  // What the model computes with: name without the model's prefix, experts dequantised, A_log without padding. Empty
  // when absent. Fits ReferenceModel::TensorGetter.
  std::vector<double> Doubles(const std::string& name) const;

  // config.json and model.safetensors, or `shards` files with an index.
  void Write(const std::string& dir, int shards = 1) const;
};

// One safetensors file with these tensors in this order.
void WriteSafetensors(const std::string& path, const std::vector<CheckpointTensor>& tensors);
// The same from a header text and data bytes, right or wrong.
void WriteRawSafetensors(const std::string& path, const std::string& header, const std::vector<uint8_t>& data);
std::string ShardName(int shard, int shards);

void WriteFile(const std::string& path, const std::string& bytes);
std::string ReadFile(const std::string& path);

}  // namespace k3::testing
