#include "server/grpc_acceptor.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/tcp_listen.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

constexpr int kAcceptsAtOnce = 256;              // then Stop is looked for, however many more wait
constexpr std::chrono::milliseconds kPause{50};  // without descriptors, or between two counts of a full server
constexpr std::chrono::seconds kWarningInterval{10};

std::string ErrorText(int error) { return std::generic_category().message(error); }

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcAcceptor>> GrpcAcceptor::Listen(const std::string& host, int port,
                                                                   int max_connections) {
  std::unique_ptr<GrpcAcceptor> acceptor(new GrpcAcceptor(max_connections));
  absl::Status status = acceptor->Bind(host, port);
  if (!status.ok()) return status;
  return acceptor;
}

GrpcAcceptor::~GrpcAcceptor() {
  Stop();
  if (stop_ >= 0) close(stop_);
}

absl::Status GrpcAcceptor::Bind(const std::string& host, int port) {
  const auto failed = [&](const std::string& why) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", host, ":", port, " for gRPC: ", why));
  };
  absl::StatusOr<TcpListeners> listeners = ListenTcp(host, port);
  if (!listeners.ok()) return failed(std::string(listeners.status().message()));
  listening_ = std::move(listeners->sockets);
  port_ = listeners->port;
  stop_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return stop_ >= 0 ? absl::OkStatus() : failed(ErrorText(errno));
}

void GrpcAcceptor::Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> target) {
  target_ = std::move(target);
  thread_ = std::thread([this] { Run(); });
}

void GrpcAcceptor::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    if (write(stop_, &one, sizeof(one)) != sizeof(one)) spdlog::error("grpc: eventfd: {}", ErrorText(errno));
    thread_.join();
  }
  for (const int fd : listening_) close(fd);
  listening_.clear();
}

bool GrpcAcceptor::Wait(std::chrono::milliseconds limit, bool paused) {
  std::vector<pollfd> polled = {{stop_, POLLIN, 0}};
  if (!paused) {
    for (const int fd : listening_) polled.push_back({fd, POLLIN, 0});
  }
  poll(polled.data(), polled.size(), static_cast<int>(limit.count()));
  return polled[0].revents == 0;
}

void GrpcAcceptor::Run() {
  constexpr std::chrono::milliseconds kForever{-1};
  bool paused = false;
  while (Wait(paused ? kPause : kForever, paused)) {
    paused = false;
    for (const int fd : listening_) paused = !AcceptFrom(fd) || paused;
  }
}

bool GrpcAcceptor::AcceptFrom(int listening) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    const int fd = accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      Warn(absl::StrCat("accept: ", ErrorText(errno)));
      return false;
    }
    struct stat status {};
    if (IsFull() || fstat(fd, &status) != 0) {
      Warn(absl::StrCat("more than ", max_connections_, " connections (--max-connections): new ones are turned away"));
      close(fd);
      continue;
    }
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    {
      const std::lock_guard lock(mutex_);
      accepted_.push_back({fd, status.st_ino});
    }
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listening;
    connection.fd = fd;
    target_->HandleNewConnection(&connection);
  }
  return true;
}

// Counting reads every descriptor, so a flood of connections gets one count a pause.
bool GrpcAcceptor::IsFull() {
  const std::lock_guard lock(mutex_);
  const auto limit = static_cast<size_t>(max_connections_);
  if (accepted_.size() < limit) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_count_) return true;
  accepted_.erase(
      std::remove_if(accepted_.begin(), accepted_.end(), [](const Accepted& accepted) { return !IsOpen(accepted); }),
      accepted_.end());
  next_count_ = now + kPause;
  return accepted_.size() >= limit;
}

bool GrpcAcceptor::IsOpen(const Accepted& accepted) {
  struct stat status {};
  return fstat(accepted.fd, &status) == 0 && S_ISSOCK(status.st_mode) && status.st_ino == accepted.inode;
}

int GrpcAcceptor::EndConnections() {
  const std::lock_guard lock(mutex_);
  int open = 0;
  for (const Accepted& accepted : accepted_) {
    if (!IsOpen(accepted)) continue;
    shutdown(accepted.fd, SHUT_RD);
    ++open;
  }
  return open;
}

int GrpcAcceptor::connections() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(std::count_if(accepted_.begin(), accepted_.end(), &IsOpen));
}

void GrpcAcceptor::Warn(const std::string& what) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_warning_) return;
  next_warning_ = now + kWarningInterval;
  spdlog::warn("grpc: {}", what);
}

}  // namespace k3
