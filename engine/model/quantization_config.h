#pragma once

#include "engine/model/config_fields.h"
#include "engine/model/model_config.h"

namespace k3 {

// Reads `quantization_config` of `owner`, which has it, into `config`, whose sizes are known by then. Only the scheme
// of the released K3 (spec 1.4) is one that the weights can be read by; whatever departs from it ends up in the owner's
// status by name. Which tensors are packed is decided by their names when the weights are read.
void ReadQuantization(ConfigFields& owner, ModelConfig& config);

}  // namespace k3
