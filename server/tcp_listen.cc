#include "server/tcp_listen.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

namespace k3 {
namespace {

constexpr int kBacklog = 4096;
constexpr int kFreePortTries = 16;

// A listening socket, or -1 and errno.
int ListenOn(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));  // not while another process listens there
  if (bind(fd, address.ai_addr, address.ai_addrlen) != 0 || listen(fd, kBacklog) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

void SetPort(addrinfo& address, int port) {
  const auto value = htons(static_cast<uint16_t>(port));
  if (address.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address.ai_addr)->sin6_port = value;
  } else {
    reinterpret_cast<sockaddr_in*>(address.ai_addr)->sin_port = value;
  }
}

int PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

bool ListedBefore(const addrinfo* all, const addrinfo* address) {
  for (const addrinfo* other = all; other != address; other = other->ai_next) {
    if (other->ai_addrlen == address->ai_addrlen &&
        std::memcmp(other->ai_addr, address->ai_addr, address->ai_addrlen) == 0) {
      return true;
    }
  }
  return false;
}

// 0, or the error of the address that failed.
int ListenOnAll(addrinfo* addresses, int port, TcpListeners* listeners) {
  listeners->port = port;
  int error = EADDRNOTAVAIL;
  for (addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    SetPort(*address, listeners->port);
    if (ListedBefore(addresses, address)) continue;
    const int fd = ListenOn(*address);
    if (fd >= 0) {
      listeners->sockets.push_back(fd);
      listeners->port = PortOf(fd);  // the others get the same
      continue;
    }
    error = errno;
    // "localhost" also names ::1 where the machine has no IPv6.
    if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) continue;
    for (const int other : listeners->sockets) close(other);
    listeners->sockets.clear();
    return error;
  }
  return listeners->sockets.empty() ? error : 0;
}

}  // namespace

absl::StatusOr<TcpListeners> ListenTcp(const std::string& host, int port) {
  const bool brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  const std::string name = brackets ? host.substr(1, host.size() - 2) : host;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(name.c_str(), "0", &hints, &found); error != 0) {
    return absl::UnavailableError(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  TcpListeners listeners;
  int error = ListenOnAll(found, port, &listeners);
  // A port that the system found free at the first address may be taken at the next.
  for (int i = 0; i < kFreePortTries && port == 0 && error == EADDRINUSE; ++i) {
    error = ListenOnAll(found, port, &listeners);
  }
  if (error != 0) return absl::UnavailableError(std::generic_category().message(error));
  return listeners;
}

}  // namespace k3
