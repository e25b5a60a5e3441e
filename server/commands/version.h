#pragma once

#include <string>

namespace k3 {

// What `k3serve version` prints: release, commit, compiler, libraries, and the processors compiled in and found.
std::string VersionText();

}  // namespace k3
