#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace k3 {

// `k3serve bench`: loads a running server and writes a table to `out`; progress and errors go to `err`. Returns the
// exit code: 0, 1 when a run had no successful request or a file could not be written, 2 usage or no server.
int RunBench(const std::vector<std::string>& args, std::ostream& out, std::ostream& err);

}  // namespace k3
