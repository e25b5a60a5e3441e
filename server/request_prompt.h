#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/generation_request.h"
#include "server/served_model.h"

namespace k3 {

// What a request's input becomes: ids, and how its reply is to be read.
struct RequestPrompt {
  std::vector<int32_t> ids;
  bool is_chat = false;
  OpenChannel open_channel = OpenChannel::kNone;
  int32_t opening_ids = 0;
  int32_t history_calls = 0;
};

// What the server sets where a request is silent or too free.
struct PromptDefaults {
  std::string default_effort;  // low, high, max, none; empty: the model's own
  bool vendor_strict = false;
};

// Renders and encodes. Errors name paths as in GenerationSpec.
absl::StatusOr<RequestPrompt> PromptOf(const ServedModel& model, const GenerationRequest& request,
                                       const PromptDefaults& defaults);

// Roughly the text that PromptOf has to read.
size_t TextBytes(const GenerationRequest& request);

// Errors of a constraint's schema name the client's own field, those of tools and messages one below the chat.
absl::Status WithClientPath(const absl::Status& status);

}  // namespace k3
