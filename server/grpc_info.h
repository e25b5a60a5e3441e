#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace grpc {
class Service;
}

namespace k3 {

class ApiKeys;
class GenerationService;
class ServerHealth;

// k3serve.inference.v1.TokenizerService.
std::unique_ptr<grpc::Service> MakeGrpcTokenizerService(GenerationService* generation, const ApiKeys* keys);

// k3serve.inference.v1.ModelService; WatchLoad also answers while the model loads.
struct GrpcModelInfo {
  int64_t max_message_mib = 64;
  std::string default_effort;
};
std::unique_ptr<grpc::Service> MakeGrpcModelService(GenerationService* generation, const ServerHealth* health,
                                                    const ApiKeys* keys, GrpcModelInfo info);

// k3serve.inference.v1.AdminService.
struct AdminActions {
  std::function<void()> drain;
  // May be null: UNIMPLEMENTED. `steps` 0: until stopped. The path is that of the profile's text.
  std::function<absl::Status(uint32_t steps)> start_profile;
  std::function<absl::Status(std::string* path)> stop_profile;
};
std::unique_ptr<grpc::Service> MakeGrpcAdminService(GenerationService* generation, const ApiKeys* keys,
                                                    AdminActions actions);

}  // namespace k3
