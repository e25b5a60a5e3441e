#pragma once

#include <cstdint>
#include <optional>

#include "engine/expert_balance.h"
#include "engine/memory_plan.h"
#include "server/server_config.h"

namespace k3 {

ExpertTransport TransportOf(const ServerConfig& config);

// What the flags of `serve` and `plan` say about memory, for a device of `memory_bytes`. The caller adds what it has
// measured: checkpoint, Ops, loaded weights.
MemoryRequest MakeMemoryRequest(const ServerConfig& config, bool is_cpu, uint64_t memory_bytes);

// What the flags say about the balance of experts; nothing where experts are chosen exactly and not counted. The caller
// adds the log and the recorded epoch.
std::optional<BalanceOptions> MakeBalanceOptions(const ServerConfig& config);

}  // namespace k3
