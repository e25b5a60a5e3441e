#pragma once

#include <chrono>
#include <string>

#include "absl/status/statusor.h"

struct addrinfo;

namespace k3 {

// A connected socket to the first of the host's addresses that answers: a name such as localhost stands for an IPv6 and
// an IPv4 address, and servers may listen on one of them only. `timeout` holds for each address, and on the socket for
// every send and receive. The caller closes it. UNAVAILABLE with the last address's reason, without the host's name.
absl::StatusOr<int> ConnectTcp(const std::string& host, const std::string& port, std::chrono::milliseconds timeout);

// The same for addresses that are known.
absl::StatusOr<int> ConnectToAny(const addrinfo* addresses, std::chrono::milliseconds timeout);

}  // namespace k3
