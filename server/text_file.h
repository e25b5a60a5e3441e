#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace k3 {

// All of a file. NOT_FOUND only where there is nothing of that name; INVALID_ARGUMENT for a folder in its place (what a
// container's mount of a missing file leaves) and for what may not be read. Messages begin with the path. Pipes are
// read to their end; one that nobody writes to reads as empty.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

}  // namespace k3
