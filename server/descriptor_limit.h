#pragma once

#include <cstdint>

namespace k3 {

// Every connection needs a descriptor. Raises the process's limit of open files so that each of `listeners` can hold
// `wanted` connections, as far as the hard limit goes, and returns how many each can hold; a log line says when that is
// fewer. The soft limit is often 1,024 for no reason but history.
int FitDescriptorLimit(int wanted, int listeners);

// How many of `wanted` connections each of `listeners` can hold in a process that may have `descriptors` of them open
// and has `open` now. The rest is for probes, AdminService and files: with none left, nobody could even be told that
// the server is full.
int ConnectionsWithin(int wanted, int listeners, uint64_t descriptors, uint64_t open);

}  // namespace k3
