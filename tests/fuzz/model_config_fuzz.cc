// Any text as config.json: an error that is InvalidArgument, or a configuration whose sizes can be computed with.

#include <cstdint>
#include <cstdlib>
#include <string>

#include "engine/model/model_config.h"
#include "engine/model/tensor_table.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto config = k3::ParseModelConfig(text, "config.json");
  if (!config.ok()) {
    Require(config.status().code() == absl::StatusCode::kInvalidArgument && !config.status().message().empty());
    return 0;
  }
  Require(static_cast<int32_t>(config->layers.size()) == config->num_hidden_layers);
  Require(config->num_kda_layers() + config->num_mla_layers() == config->num_hidden_layers);
  Require(config->num_residual_blocks() >= 1);
  Require(config->num_experts == 0 || config->num_experts_per_token <= config->num_experts);
  for (const k3::TensorSpec& spec : k3::ModelTensors(*config)) Require(spec.elements() > 0);
  for (int32_t layer = 0; layer < config->num_hidden_layers; ++layer) {
    for (const k3::TensorSpec& spec : k3::LayerTensors(*config, layer)) Require(spec.elements() > 0);
    if (!config->IsMoe(layer)) continue;
    for (const k3::TensorSpec& spec : k3::ExpertTensors(*config, layer, 0)) Require(spec.elements() > 0);
  }
  return 0;
}
