#include "server/tcp_connections.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace k3 {
namespace {

// The local port of a TCP socket, 0 for anything else.
int LocalPort(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  return 0;
}

bool Listens(int fd) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0;
}

bool Connected(int fd) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  return getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0;
}

// Of the sockets on `port` for which `which` holds; returns their number.
int StopReading(int port, bool (*which)(int fd)) {
  int found = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    if (LocalPort(fd) != port || !which(fd)) continue;
    shutdown(fd, SHUT_RD);
    ++found;
  }
  return found;
}

}  // namespace

void RefuseConnections(int port) { StopReading(port, &Listens); }
int EndConnections(int port) { return StopReading(port, &Connected); }

}  // namespace k3
