#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <vector>

namespace k3 {

// The gRPC library ends a call whose message does not parse with UNIMPLEMENTED and no text, before any of our code
// runs. These interceptors turn that into INVALID_ARGUMENT with a reason; our own UNIMPLEMENTED always carries a text.
std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> MakeMalformedMessageInterceptors();

}  // namespace k3
