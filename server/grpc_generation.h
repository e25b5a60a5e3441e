#pragma once

#include <atomic>
#include <chrono>
#include <memory>

namespace grpc {
class Service;
}

namespace k3 {

class ApiKeys;
class GenerationService;

struct GrpcGenerationOptions {
  // A stream whose reader takes nothing for this long is ended with RESOURCE_EXHAUSTED.
  std::chrono::milliseconds write_stall_limit{60000};
  int pump_threads = 1;               // turn tokens into messages
  std::atomic<int>* calls = nullptr;  // counts calls from their start until gRPC is done with them; may be null
};

// k3serve.inference.v1.GenerationService on the callback API. One write per stream is in flight; what comes meanwhile
// is merged into the next. Pointers must outlive the service.
std::unique_ptr<grpc::Service> MakeGrpcGenerationService(GenerationService* generation, const ApiKeys* keys,
                                                         const GrpcGenerationOptions& options);

}  // namespace k3
