#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace k3 {

// `k3serve generate TEXT`: asks a running server by gRPC. The answer goes to `out` as it comes; reasoning, where shown,
// statistics and errors go to `err`. `in` is read when there is no TEXT. Returns the exit code: 0, 1 when the request
// failed, 2 usage.
int RunGenerate(const std::vector<std::string>& args, std::istream& in, std::ostream& out, std::ostream& err);

}  // namespace k3
