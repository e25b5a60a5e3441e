#include "engine/process_link.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

// What every message begins with. A stray connection does not know it, a build with other messages neither.
constexpr uint32_t kMagic = 0x6b33'0001;
constexpr uint64_t kLargest = uint64_t{1} << 32;

struct Head {
  uint32_t magic;
  uint32_t kind;
  uint64_t size;
};

void SetUp(int socket) {
  const int on = 1, idle = 3, interval = 2, probes = 3;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

// True when `socket` can be read (or has ended) before `patience` is over.
bool Readable(int socket, std::chrono::milliseconds patience) {
  pollfd entry{socket, POLLIN, 0};
  return poll(&entry, 1, static_cast<int>(patience.count())) > 0;
}

}  // namespace

ProcessLink::ProcessLink(int socket) : socket_(socket) { SetUp(socket); }
ProcessLink::~ProcessLink() { close(socket_); }

absl::StatusOr<std::unique_ptr<ProcessLink>> ProcessLink::Connect(const std::string& host, int port,
                                                                  std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::string why;
  while (true) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int looked_up = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (looked_up != 0) why = gai_strerror(looked_up);
    for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
      const int socket = ::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (socket < 0) continue;
      if (connect(socket, address->ai_addr, address->ai_addrlen) == 0) {
        freeaddrinfo(found);
        return std::make_unique<ProcessLink>(socket);
      }
      why = std::strerror(errno);
      close(socket);
    }
    if (found != nullptr) freeaddrinfo(found);
    if (std::chrono::steady_clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return absl::UnavailableError(absl::StrCat("cannot reach the first process at ", host, ":", port, " (MASTER_ADDR, ",
                                             "MASTER_PORT) within ", patience.count() / 1000, " s: ", why));
}

absl::Status ProcessLink::Send(uint32_t kind, std::string_view bytes) {
  const Head head{kMagic, kind, bytes.size()};
  std::string_view parts[2] = {{reinterpret_cast<const char*>(&head), sizeof head}, bytes};
  for (std::string_view part : parts) {
    while (!part.empty()) {
      const ssize_t sent = send(socket_, part.data(), part.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) return absl::UnavailableError(absl::StrCat("the connection is lost: ", std::strerror(errno)));
      part.remove_prefix(static_cast<size_t>(sent));
    }
  }
  return absl::OkStatus();
}

absl::Status ProcessLink::ReadAll(void* data, size_t size) {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t got = recv(socket_, to, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) return absl::UnavailableError("the peer has ended");
    if (got < 0) return absl::UnavailableError(absl::StrCat("the connection is lost: ", std::strerror(errno)));
    to += got;
    size -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<ProcessLink::Message> ProcessLink::Receive() {
  Head head;
  if (absl::Status status = ReadAll(&head, sizeof head); !status.ok()) return status;
  if (head.magic != kMagic || head.size > kLargest) {
    return absl::DataLossError("what came is no message of this build: are all processes of one version?");
  }
  Message message;
  message.kind = head.kind;
  message.bytes.resize(head.size);
  if (absl::Status status = ReadAll(message.bytes.data(), head.size); !status.ok()) return status;
  return message;
}

absl::StatusOr<ProcessLink::Message> ProcessLink::Receive(std::chrono::milliseconds patience) {
  if (!Readable(socket_, patience)) {
    return absl::DeadlineExceededError(absl::StrCat("no message within ", patience.count(), " ms"));
  }
  return Receive();
}

void ProcessLink::Close() { shutdown(socket_, SHUT_RDWR); }

absl::StatusOr<std::unique_ptr<ProcessListener>> ProcessListener::Listen(int port) {
  const int socket = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1, off = 0;
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  address.sin6_port = htons(static_cast<uint16_t>(port));
  bool good = socket >= 0;
  if (good) {
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    good = bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 && listen(socket, 256) == 0;
  }
  if (!good) {
    const std::string why = std::strerror(errno);
    if (socket >= 0) close(socket);
    return absl::UnavailableError(absl::StrCat("cannot listen on port ", port, " (MASTER_PORT): ", why));
  }
  socklen_t length = sizeof address;
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  return std::unique_ptr<ProcessListener>(new ProcessListener(socket, ntohs(address.sin6_port)));
}

ProcessListener::~ProcessListener() { close(socket_); }

absl::StatusOr<std::unique_ptr<ProcessLink>> ProcessListener::Accept(std::chrono::milliseconds patience) {
  if (!Readable(socket_, patience)) return absl::DeadlineExceededError("nobody has connected");
  const int accepted = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
  if (accepted < 0) return absl::UnavailableError(absl::StrCat("accept: ", std::strerror(errno)));
  return std::make_unique<ProcessLink>(accepted);
}

}  // namespace k3
