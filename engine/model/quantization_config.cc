#include "engine/model/quantization_config.h"

#include "absl/strings/str_cat.h"
#include "engine/model/tensor_table.h"

namespace k3 {
namespace {

using Json = nlohmann::json;

constexpr char kFormat[] = "mxfp4-pack-quantized";

void ExpectText(ConfigFields& fields, const char* name, const char* expected) {
  if (fields.StringOr(name, expected) != expected) fields.Fail(name, absl::StrCat("\"", expected, "\""));
}

// A step of the scheme that would have to be undone or carried out, and is not.
void ExpectNone(ConfigFields& fields, const char* name) {
  if (fields.Has(name)) fields.Fail(name, "null");
}

void CheckWeights(ConfigFields weights) {
  if (weights.Int("num_bits", 1, 64) != 4) weights.Fail("num_bits", "4");
  if (weights.String("type") != "float") weights.Fail("type", "\"float\"");
  if (weights.Int("group_size", 1, 1 << 20) != kMxfp4BlockSize) {
    weights.Fail("group_size", absl::StrCat(kMxfp4BlockSize));
  }
  if (!weights.BoolOr("symmetric", true)) weights.Fail("symmetric", "true");
  if (weights.BoolOr("dynamic", false)) weights.Fail("dynamic", "false");
  ExpectText(weights, "strategy", "group");
  ExpectText(weights, "scale_dtype", "torch.uint8");
  ExpectNone(weights, "actorder");
  ExpectNone(weights, "block_structure");
}

void CheckGroup(ConfigFields group) {
  ExpectText(group, "format", kFormat);
  // --expert-activations mxfp8 rounds the experts' inputs for any checkpoint; other schemes are not implemented.
  ExpectNone(group, "input_activations");
  ExpectNone(group, "output_activations");
  CheckWeights(group.Inner("weights"));
}

void CheckWidths(ConfigFields& quant, const ModelConfig& config) {
  if (config.expert_width() % kMxfp4BlockSize != 0) {
    quant.Fail("format",
               absl::StrCat("an expert width that is a multiple of ", kMxfp4BlockSize, " (one scale for ",
                            kMxfp4BlockSize, " weights of a row)"),
               absl::StrCat(config.expert_width()));
  }
  if (config.moe_intermediate_size % kMxfp4BlockSize != 0) {
    quant.Fail("format", absl::StrCat("a moe_intermediate_size that is a multiple of ", kMxfp4BlockSize),
               absl::StrCat(config.moe_intermediate_size));
  }
}

}  // namespace

void ReadQuantization(ConfigFields& owner, ModelConfig& config) {
  ConfigFields quant = owner.Inner("quantization_config");
  if (quant.String("quant_method") != "compressed-tensors") quant.Fail("quant_method", "\"compressed-tensors\"");
  if (quant.String("format") != kFormat) quant.Fail("format", absl::StrCat("\"", kFormat, "\""));
  ExpectText(quant, "quantization_status", "compressed");
  ExpectNone(quant, "kv_cache_scheme");
  for (const char* name : {"sparsity_config", "transform_config"}) {
    if (quant.Has(name) && !quant.Object(name).empty()) quant.Fail(name, "null");
  }
  ConfigFields groups = quant.Inner("config_groups");
  const Json& group_objects = quant.Object("config_groups");
  if (group_objects.empty()) quant.Fail("config_groups", "at least one group");
  for (const auto& [name, group] : group_objects.items()) CheckGroup(groups.Inner(name.c_str()));
  if (!quant.ok()) return;
  config.mxfp4_experts = config.num_experts > 0;
  if (config.mxfp4_experts) CheckWidths(quant, config);
}

}  // namespace k3
