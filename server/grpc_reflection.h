#pragma once

#include <memory>
#include <string>
#include <vector>

namespace grpc {
class Service;
}

namespace k3 {

// grpc.reflection v1 and v1alpha over the compiled-in descriptors; `services` are the full names told to callers.
std::unique_ptr<grpc::Service> MakeReflectionV1(std::vector<std::string> services);
std::unique_ptr<grpc::Service> MakeReflectionV1Alpha(std::vector<std::string> services);

}  // namespace k3
