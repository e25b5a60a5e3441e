#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/request.h"
#include "server/api_keys.h"

// What every RPC does with its context.
namespace k3 {

// `caller`: see ApiKeys::Check.
absl::Status Authorize(const ApiKeys& keys, const grpc::CallbackServerContext& context, uint64_t* caller = nullptr);

// The value of a metadata key, empty when absent.
std::string_view MetadataOf(const grpc::CallbackServerContext& context, const char* key);

// The caller's x-request-id where it is usable (printable ASCII, at most 128 characters), else a new one.
std::string RequestIdOf(const grpc::CallbackServerContext& context);

// The caller's deadline on the engine's clock; nullopt when it set none.
std::optional<Clock::time_point> DeadlineOf(const grpc::CallbackServerContext& context);

// Finishes a unary call with a translated status and, where a retry makes sense, the push-back trailer.
void FinishUnary(grpc::CallbackServerContext* context, grpc::ServerUnaryReactor* reactor, const absl::Status& status);

}  // namespace k3
