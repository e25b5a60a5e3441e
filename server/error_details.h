#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace k3 {

// What a client's program can act on, beside a status' code and sentence. It travels as a payload of absl::Status; the
// gRPC front turns it into google.rpc messages, the HTTP front into the OpenAI error body and headers.
struct ErrorDetails {
  struct Field {
    std::string path;  // as in GenerationSpec: "sampling.top_p", "chat.messages[3].tool_call_id"
    std::string description;
  };
  struct Precondition {
    std::string type;     // e.g. "latent_pages"
    std::string subject;  // e.g. the model
    std::string description;
  };
  struct Quota {
    std::string subject;
    std::string description;
  };
  struct Resource {
    std::string type;  // "model"
    std::string name;
  };

  std::string reason;  // one machine word: "context_length_exceeded", "capacity_exceeded", "queue_full", ...
  std::vector<std::pair<std::string, std::string>> numbers;  // e.g. {"max_model_len", "512"}
  std::vector<Field> fields;
  std::vector<Precondition> preconditions;
  std::vector<Quota> quotas;
  std::optional<Resource> resource;
  std::optional<absl::Duration> retry_after;
};

// The status with these details attached.
absl::Status WithDetails(absl::Status status, const ErrorDetails& details);
// Empty when the status carries none.
ErrorDetails DetailsOf(const absl::Status& status);

// INVALID_ARGUMENT "path: description" with the field named.
absl::Status InvalidField(const std::string& path, const std::string& description);
// UNIMPLEMENTED for a part of the contract that this build lacks.
absl::Status UnimplementedFeature(const std::string& path, const std::string& description);
// UNAVAILABLE; the client may try again, there or elsewhere.
absl::Status UnavailableFor(const std::string& reason, const std::string& message, absl::Duration retry_after);

// A client's own text for use in a message: valid UTF-8 without control characters, at most `limit` bytes.
std::string Excerpt(const std::string& text, size_t limit = 100);

}  // namespace k3
