#include "server/grpc_call.h"

#include <algorithm>

#include "server/generation_service.h"
#include "server/grpc_status.h"

namespace k3 {

absl::Status Authorize(const ApiKeys& keys, const grpc::CallbackServerContext& context, uint64_t* caller) {
  return keys.Check(MetadataOf(context, "authorization"), caller);
}

std::string_view MetadataOf(const grpc::CallbackServerContext& context, const char* key) {
  const auto& metadata = context.client_metadata();
  const auto it = metadata.find(key);
  return it == metadata.end() ? std::string_view() : std::string_view(it->second.data(), it->second.size());
}

std::string RequestIdOf(const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto it = metadata.find("x-request-id");
  if (it != metadata.end() && !it->second.empty() && it->second.size() <= 128) {
    const bool printable =
        std::all_of(it->second.begin(), it->second.end(), [](char c) { return c > 0x20 && c < 0x7F; });
    if (printable) return std::string(it->second.data(), it->second.size());
  }
  return MakeRequestId("req-");
}

std::optional<Clock::time_point> DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return std::nullopt;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(deadline - std::chrono::system_clock::now());
}

void FinishUnary(grpc::CallbackServerContext* context, grpc::ServerUnaryReactor* reactor, const absl::Status& status) {
  const std::string pushback = RetryPushback(status);
  if (!pushback.empty()) context->AddTrailingMetadata("grpc-retry-pushback-ms", pushback);
  reactor->Finish(ToGrpcStatus(status));
}

}  // namespace k3
