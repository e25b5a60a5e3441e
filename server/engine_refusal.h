#pragma once

#include "absl/status/status.h"
#include "engine/engine_interface.h"

namespace k3 {

// What the engine refused, with the details that clients act on: the queue's state and a time to come back, or the
// sizes of the pools. `has_deadline` tells a full queue from a deadline out of reach.
absl::Status EngineRefusal(const absl::Status& status, const EngineInterface& engine, bool has_deadline);

}  // namespace k3
