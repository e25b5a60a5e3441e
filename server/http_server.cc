#include "server/http_server.h"

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
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using ErrorCode = boost::system::error_code;

constexpr Clock::duration kAcceptWarningInterval = std::chrono::seconds(10);

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
    ErrorCode ec;
    tcp::resolver resolver(context);
    const auto addresses = resolver.resolve(options.host, std::to_string(options.port), tcp::resolver::passive, ec);
    if (ec || addresses.empty()) {
      return absl::UnavailableError(absl::StrCat("cannot resolve host '", options.host, "': ", ec.message()));
    }
    const tcp::endpoint endpoint = addresses.begin()->endpoint();
    acceptor_.emplace(context);
    acceptor_->open(endpoint.protocol(), ec);
    if (!ec) acceptor_->set_option(tcp::acceptor::reuse_address(true), ec);
    if (!ec) acceptor_->bind(endpoint, ec);
    if (!ec) acceptor_->listen(4096, ec);
    if (ec) {
      return absl::UnavailableError(
          absl::StrCat("cannot listen on ", options.host, ":", options.port, ": ", ec.message()));
    }
    port_ = acceptor_->local_endpoint(ec).port();
    retry_.emplace(context);
    Accept();
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
    if (!acceptor_) return;
    StartDrain();
    asio::post(threads_[0]->context(), [this] {
      ErrorCode ignored;
      acceptor_->close(ignored);
      retry_->cancel();
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
  // Connections are dealt out in turn.
  void Accept() {
    HttpIoThread* io = threads_[next_++ % threads_.size()].get();
    auto socket = std::make_shared<tcp::socket>(io->context());
    acceptor_->async_accept(*socket, [this, io, socket](ErrorCode ec) {
      if (!acceptor_->is_open()) return;
      if (ec) return Retry(ec);
      asio::post(io->context(),
                 [this, io, socket] { io->Add(std::make_shared<HttpConnection>(*io, std::move(*socket), state_)); });
      Accept();
    });
  }

  // Out of descriptors, mostly: trying again at once would only burn time.
  void Retry(ErrorCode why) {
    if (why == asio::error::operation_aborted) return;
    if (why != asio::error::connection_aborted && Clock::now() >= next_accept_warning_) {
      next_accept_warning_ = Clock::now() + kAcceptWarningInterval;
      spdlog::warn("http: accept: {}", why.message());
    }
    retry_->expires_after(std::chrono::milliseconds(50));
    retry_->async_wait([this](ErrorCode ec) {
      if (!ec && acceptor_->is_open()) Accept();
    });
  }

  HttpServerState state_;
  std::vector<std::unique_ptr<HttpIoThread>> threads_;
  std::optional<tcp::acceptor> acceptor_;    // on the first thread
  std::optional<asio::steady_timer> retry_;  // on the first thread
  Clock::time_point next_accept_warning_;    // on the first thread
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
