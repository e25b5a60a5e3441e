#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace k3 {

struct TcpListeners {
  std::vector<int> sockets;  // listening, non-blocking, closed on exec; the owner closes them
  int port = 0;              // of all of them
};

// Listens on every address that the host's name stands for (an IPv6 address may stand in brackets), on port 0 on one
// that is free at all of them. Addresses that this machine does not have are left out as long as there is another; one
// whose port is taken fails, so that nobody reaches another server by the same name. UNAVAILABLE with the reason.
absl::StatusOr<TcpListeners> ListenTcp(const std::string& host, int port);

}  // namespace k3
