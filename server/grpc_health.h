#pragma once

#include <memory>
#include <string>
#include <vector>

namespace grpc {
class Service;
}

namespace k3 {

class ServerHealth;

// grpc.health.v1 for "" and each of `services`, all of which share the server's one state: SERVING while it serves,
// NOT_SERVING while it loads, drains or is stalled. Watch pushes every change. `health` must outlive the service.
std::unique_ptr<grpc::Service> MakeHealthService(ServerHealth* health, std::vector<std::string> services);

}  // namespace k3
