#include "server/http_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/http/http_connection.h"
#include "server/http/io_thread.h"
#include "server/tcp_listen.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using ErrorCode = boost::system::error_code;

constexpr Clock::duration kAcceptWarningInterval = std::chrono::seconds(10);

bool IsIpv6(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  return getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0 && address.ss_family == AF_INET6;
}

}  // namespace

class HttpServer::Impl {
 public:
  Impl(HttpServerOptions options, HttpHandler& handler, Offload offload) : state_(std::move(options), handler) {
    state_.offload = std::move(offload);
    for (int i = 0; i < std::max(1, state_.options.io_threads); ++i) {
      threads_.push_back(std::make_unique<HttpIoThread>(state_.options.sweep_interval));
    }
  }
  ~Impl() { Stop(Clock::duration::zero()); }

  absl::Status Listen() {
    const HttpServerOptions& options = state_.options;
    asio::io_context& context = threads_[0]->context();
    const absl::StatusOr<TcpListeners> listeners = ListenTcp(options.host, options.port);
    if (!listeners.ok()) {
      return absl::UnavailableError(absl::StrCat("cannot listen on ", options.host, ":", options.port,
                                                 " for HTTP: ", listeners.status().message()));
    }
    port_ = static_cast<uint16_t>(listeners->port);
    for (const int socket : listeners->sockets) {
      listening_.push_back(std::make_unique<Listening>(context, socket));
      Accept(*listening_.back());
    }
    for (const auto& thread : threads_) thread->Start();
    return absl::OkStatus();
  }

  uint16_t port() const { return port_; }
  const HttpServerState& state() const { return state_; }

  void StartDrain() {
    if (state_.draining.exchange(true)) return;
    for (const auto& thread : threads_) {
      asio::post(thread->context(), [io = thread.get()] { io->CloseIdle(); });
    }
  }

  void Stop(Clock::duration grace) {
    if (stopped_) return;
    stopped_ = true;
    if (listening_.empty()) return;
    StartDrain();
    asio::post(threads_[0]->context(), [this] {
      for (const auto& from : listening_) {
        ErrorCode ignored;
        from->acceptor.close(ignored);
        from->retry.cancel();
      }
    });
    const Clock::time_point end = Clock::now() + grace;
    while (state_.exchanges.load() > 0 && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    // The first pass ends what would start new work for the workers; what they still hold is then waited for.
    for (const auto& thread : threads_) {
      asio::post(thread->context(), [io = thread.get()] { io->CloseAll(); });
    }
    while (state_.offloaded.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (const auto& thread : threads_) thread->Join();
  }

 private:
  // One of the host's addresses; on the first thread.
  struct Listening {
    Listening(asio::io_context& context, int socket)
        : acceptor(context, IsIpv6(socket) ? tcp::v6() : tcp::v4(), socket), retry(context) {}
    tcp::acceptor acceptor;
    asio::steady_timer retry;
  };

  // Connections are dealt out in turn.
  void Accept(Listening& from) {
    HttpIoThread* io = threads_[next_++ % threads_.size()].get();
    auto socket = std::make_shared<tcp::socket>(io->context());
    from.acceptor.async_accept(*socket, [this, io, socket, &from](ErrorCode ec) {
      if (!from.acceptor.is_open()) return;
      if (ec) return Retry(from, ec);
      asio::post(io->context(),
                 [this, io, socket] { io->Add(std::make_shared<HttpConnection>(*io, std::move(*socket), state_)); });
      Accept(from);
    });
  }

  // Out of descriptors, mostly: trying again at once would only burn time.
  void Retry(Listening& from, ErrorCode why) {
    if (why == asio::error::operation_aborted) return;
    if (why != asio::error::connection_aborted && Clock::now() >= next_accept_warning_) {
      next_accept_warning_ = Clock::now() + kAcceptWarningInterval;
      spdlog::warn("http: accept: {}", why.message());
    }
    from.retry.expires_after(std::chrono::milliseconds(50));
    from.retry.async_wait([this, &from](ErrorCode ec) {
      if (!ec && from.acceptor.is_open()) Accept(from);
    });
  }

  HttpServerState state_;
  std::vector<std::unique_ptr<HttpIoThread>> threads_;
  std::vector<std::unique_ptr<Listening>> listening_;  // ends before the threads' loops
  Clock::time_point next_accept_warning_;              // on the first thread, as the next
  size_t next_ = 0;
  uint16_t port_ = 0;
  bool stopped_ = false;
};

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpServerOptions options, HttpHandler& handler,
                                                              Offload offload) {
  auto impl = std::make_unique<Impl>(std::move(options), handler, std::move(offload));
  absl::Status status = impl->Listen();
  if (!status.ok()) return status;
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

uint16_t HttpServer::port() const { return impl_->port(); }
void HttpServer::StartDrain() { impl_->StartDrain(); }
void HttpServer::Stop(Clock::duration grace) { impl_->Stop(grace); }
int HttpServer::connections() const { return impl_->state().connections.load(); }
int HttpServer::exchanges() const { return impl_->state().exchanges.load(); }

}  // namespace k3
