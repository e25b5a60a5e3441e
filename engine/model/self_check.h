#pragma once

#include "absl/status/status.h"
#include "engine/model/model.h"

namespace k3 {

// Runs a short fixed prompt before the first request. DataLoss when the logits are not finite, are all equal, or do not
// depend on the prompt: signs of weights that were never filled. A DeviceError passes through. It makes
// kSelfCheckPasses forward passes of kSelfCheckTokens tokens.
inline constexpr int64_t kSelfCheckTokens = 5;  // longer than the convolution's reach
inline constexpr int32_t kSelfCheckPasses = 2;
absl::Status SelfCheck(const Model& model, Ops& ops);

}  // namespace k3
