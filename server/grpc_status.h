#pragma once

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace k3 {

// The status as clients see it: same code, the message cut to what fits into header space, and the details of
// error_details.h as google.rpc messages in grpc-status-details-bin. Field paths get the prefix of the request message
// that carried them, e.g. "spec.". `request_id` is named for INTERNAL errors, which say nothing else about their cause.
grpc::Status ToGrpcStatus(const absl::Status& status, const std::string& request_id = "",
                          const std::string& field_prefix = "");

// Milliseconds for the grpc-retry-pushback-ms trailer; empty when a retry makes no sense.
std::string RetryPushback(const absl::Status& status);

}  // namespace k3
