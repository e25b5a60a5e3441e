#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace k3 {

// All of a file. NOT_FOUND only where there is nothing of that name; INVALID_ARGUMENT for a folder in its place (what a
// container's mount of a missing file leaves) and for what may not be read. Messages begin with the path. Pipes are
// read to their end; one that nobody writes to reads as empty.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

// Writes a new file, which only this user may read, in the folder for temporary files (TMPDIR): `prefix`, six letters,
// `suffix`. Its path; INTERNAL where that fails.
absl::StatusOr<std::string> WriteTemporaryText(const std::string& prefix, const std::string& suffix,
                                               const std::string& text);

}  // namespace k3
