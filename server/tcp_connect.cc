#include "server/tcp_connect.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>

namespace k3 {

absl::StatusOr<int> ConnectToAny(const addrinfo* addresses, std::chrono::milliseconds timeout) {
  const timeval limit{timeout.count() / 1000, static_cast<suseconds_t>(timeout.count() % 1000 * 1000)};
  int error = EADDRNOTAVAIL;
  for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    const int fd = socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
      setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));  // holds for connect too
      setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
      if (connect(fd, address->ai_addr, address->ai_addrlen) == 0) return fd;
    }
    error = errno;
    if (fd >= 0) close(fd);
  }
  return absl::UnavailableError(std::generic_category().message(error));
}

absl::StatusOr<int> ConnectTcp(const std::string& host, const std::string& port, std::chrono::milliseconds timeout) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return absl::UnavailableError(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  return ConnectToAny(addresses.get(), timeout);
}

}  // namespace k3
