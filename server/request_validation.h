#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine_interface.h"
#include "server/generation_request.h"
#include "server/served_model.h"
#include "server/stream_event.h"

// The checks of everything in a request but its input, and the defaults of what it leaves open.
namespace k3 {

struct ValidationOptions {
  bool vendor_strict = false;  // temperature, top_p, n and penalties are fixed; 5 stop strings of 32 bytes
};

// Limits that are part of the contract.
inline constexpr int kMaxStopStrings = 16;
inline constexpr size_t kMaxStopBytes = 256;
inline constexpr int kMaxStopTokenIds = 256;
inline constexpr int kMaxLogitBias = 1024;
inline constexpr size_t kMaxMessages = 16384;
inline constexpr int64_t kMaxPromptLogprobs = int64_t{1} << 25;  // in all copies, alternatives included
inline constexpr size_t kMaxIdBytes = 256;                       // session ids, salts

// Parts of the contract that this build lacks: UNIMPLEMENTED.
absl::Status CheckImplemented(const GenerationRequest& request);

// INVALID_ARGUMENT naming the field. max_new_tokens is left at 0; ResolveLength sets it.
absl::StatusOr<EffectiveSampling> ResolveSampling(const GenerationRequest& request, const ServedModel& model,
                                                  const EngineLimits& limits, const ValidationOptions& options);

// Room for the reply. INVALID_ARGUMENT (context_length_exceeded, both numbers) over the context limit,
// FAILED_PRECONDITION (capacity_exceeded, pool sizes) when the pools could never hold it.
absl::Status ResolveLength(const GenerationRequest& request, int64_t prompt_tokens, const EngineLimits& limits,
                           EffectiveSampling* effective);

// Every id of a token prompt lies inside the vocabulary. `path` names the field.
absl::Status CheckTokenIds(const std::vector<uint32_t>& ids, int32_t vocab_size, const std::string& path);

}  // namespace k3
