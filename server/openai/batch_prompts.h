#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "server/generation_request.h"
#include "server/served_model.h"

namespace k3 {

// Checks all prompts of one request before any of them runs: else a bad one behind many would be found when the others
// have been computed, and in a stream after the 200. Their text becomes ids on the way, which is work that starting
// them would do. `common` is what they share; on an error `bad` says whose it is.
absl::Status PrepareBatch(const ServedModel& model, const GenerationRequest& common, bool vendor_strict,
                          std::vector<GenerationRequest::Input>* prompts, size_t* bad);

}  // namespace k3
