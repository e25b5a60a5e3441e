#include "server/http/http_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/error.hpp>
#include <boost/asio/post.hpp>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/http/io_thread.h"
#include "server/tls_store.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;

// An early answer waits for a body up to this size, so that the connection can be kept.
constexpr uint64_t kMaxDiscardedBody = 256 << 10;

bool PeerHasLeft(int fd) {
  pollfd poll_fd{fd, POLLRDHUP, 0};
  return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace

HttpConnection::HttpConnection(HttpIoThread& io, tcp::socket socket, HttpServerState& server)
    : io_(io), server_(server), socket_(std::move(socket)) {
  server_.connections.fetch_add(1);
}

HttpConnection::~HttpConnection() { server_.connections.fetch_sub(1); }

void HttpConnection::Start() {
  ErrorCode ec;
  socket_.set_option(tcp::no_delay(true), ec);
  socket_.non_blocking(true, ec);
  const tcp::endpoint peer = socket_.remote_endpoint(ec);
  if (ec) return Close(HttpAbort::kPeerGone);
  peer_ = absl::StrCat(peer.address().to_string(), ":", peer.port());
  const bool too_many = server_.connections.load() > server_.options.max_connections;
  if (server_.options.tls != nullptr) {
    if (too_many) return Close(HttpAbort::kStopping);  // before the handshake nothing can be said
    tls_.emplace(server_.options.tls->Current()->context, socket_.native_handle());
    phase_ = Phase::kHandshake;
    Touch(server_.options.handshake_timeout);
    return Handshake();
  }
  if (too_many) return Fail(503, "too many connections");
  Touch(server_.options.idle_timeout);
  Read();
}

// Until it is done the connection holds a socket and a time limit, nothing else.
void HttpConnection::Handshake() {
  if (phase_ == Phase::kClosed) return;
  switch (tls_->Handshake()) {
    case TlsSession::Outcome::kDone:
      phase_ = Phase::kIdle;
      Touch(server_.options.idle_timeout);
      return Read();
    case TlsSession::Outcome::kWaitRead:
      return socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this()](ErrorCode) { self->Handshake(); });
    case TlsSession::Outcome::kWaitWrite:
      return socket_.async_wait(tcp::socket::wait_write, [self = shared_from_this()](ErrorCode) { self->Handshake(); });
    case TlsSession::Outcome::kClosed:
    case TlsSession::Outcome::kFailed:
      spdlog::debug("http: {}: TLS handshake: {}", peer_, tls_->error().empty() ? "closed" : tls_->error());
      Close(HttpAbort::kPeerGone);
  }
}

void HttpConnection::Touch(Clock::duration limit) { limit_ = Clock::now() + limit; }

// Reading. A connection that waits holds no buffer: readiness is awaited, then bytes go through one buffer per thread.

void HttpConnection::Read() {
  if (reading_ || phase_ == Phase::kClosed) return;
  if (phase_ == Phase::kAnswer && input_.size() - parsed_ >= server_.options.read_ahead_bytes) return;
  reading_ = true;
  auto on_readable = [self = shared_from_this()](ErrorCode ec) { self->OnReadable(ec); };
  if (tls_ && tls_->HasPending()) {
    asio::post(socket_.get_executor(), [on_readable] { on_readable({}); });
    return;
  }
  const auto event = tls_read_waits_for_write_ ? tcp::socket::wait_write : tcp::socket::wait_read;
  socket_.async_wait(event, std::move(on_readable));
}

size_t HttpConnection::ReadSome(char* data, size_t size, ErrorCode& ec) {
  if (!tls_) return socket_.read_some(asio::buffer(data, size), ec);
  size_t bytes = 0;
  const TlsSession::Outcome outcome = tls_->Read(data, size, &bytes);
  tls_read_waits_for_write_ = outcome == TlsSession::Outcome::kWaitWrite;
  switch (outcome) {
    case TlsSession::Outcome::kDone:
      break;
    case TlsSession::Outcome::kWaitRead:
    case TlsSession::Outcome::kWaitWrite:
      ec = asio::error::would_block;
      break;
    case TlsSession::Outcome::kClosed:
      ec = asio::error::eof;
      break;
    case TlsSession::Outcome::kFailed:
      ec = asio::error::connection_reset;
      break;
  }
  return bytes;
}

void HttpConnection::OnReadable(ErrorCode ec) {
  reading_ = false;
  if (phase_ == Phase::kClosed) return;
  // On the heap: an array would lie in the thread-local storage of every thread of the process, which its stack pays
  // for.
  static thread_local std::vector<char> buffer(128 << 10);
  size_t size = 0;
  if (!ec) size = ReadSome(buffer.data(), buffer.size(), ec);
  if (ec == asio::error::would_block || ec == asio::error::interrupted) return Read();
  if (ec) return OnPeerGone(ec != asio::error::eof);
  switch (phase_) {
    case Phase::kLinger:
      break;
    case Phase::kAnswer:
      input_.append(buffer.data(), size);
      break;
    default:
      input_.append(buffer.data(), size);
      ParseInput();
  }
  Read();
}

void HttpConnection::OnPeerGone(bool reset) {
  if (phase_ == Phase::kAnswer && last_write_ && !reset) {
    // All is said: only the rest of the write is missing, and the client may still read it.
    keep_alive_ = false;
    return;
  }
  Close(HttpAbort::kPeerGone);
}

void HttpConnection::BeginRequest() {
  parser_.emplace(server_.options.max_header_bytes, server_.options.max_body_bytes, server_.budget);
  phase_ = Phase::kHead;
  Touch(server_.options.head_timeout);
  keep_alive_ = true;
  http_1_0_ = false;
  head_only_ = false;
}

void HttpConnection::ParseInput() {
  using State = HttpRequestParser::State;
  while (phase_ == Phase::kIdle || phase_ == Phase::kHead || phase_ == Phase::kBody || phase_ == Phase::kDiscard) {
    if (phase_ == Phase::kIdle) {
      // Some clients send an empty line after a body.
      while (parsed_ < input_.size() && (input_[parsed_] == '\r' || input_[parsed_] == '\n')) ++parsed_;
      if (parsed_ == input_.size()) break;
      BeginRequest();
    }
    const std::string_view fresh = std::string_view(input_).substr(parsed_);
    const size_t used = parser_->Consume(fresh);
    parsed_ += used;
    const State state = parser_->state();
    if (state == State::kFailed) {
      Fail(parser_->error_status(), parser_->error_message());
      break;
    }
    if (state == State::kHead) break;
    if (phase_ == Phase::kHead) {
      OnHead();
      continue;
    }
    if (state == State::kDone) {
      if (phase_ == Phase::kDiscard) {
        SendWhole(std::move(*early_answer_));
        early_answer_.reset();
      } else {
        Dispatch();
      }
    } else {
      Touch(server_.options.body_timeout);
      if (used == 0) break;
    }
  }
  if (parsed_ == input_.size()) {
    RecycleHttpBuffer(input_);
    parsed_ = 0;
  } else if (parsed_ > kMaxKeptHttpBuffer) {
    input_.erase(0, parsed_);
    parsed_ = 0;
  }
}

void HttpConnection::OnHead() {
  const bool has_body = parser_->state() == HttpRequestParser::State::kBody;
  HttpRequest& request = parser_->request();
  request.peer = peer_;
  keep_alive_ = parser_->keep_alive();
  http_1_0_ = parser_->http_1_0();
  head_only_ = request.method == "HEAD";
  phase_ = Phase::kBody;
  std::optional<HttpResponse> answer;
  try {
    answer = server_.handler.CheckHead(request);
  } catch (const std::exception& e) {
    spdlog::error("http: {} {}: {}", request.method, request.path, e.what());
    answer = server_.handler.Error(500, "internal error");
  }
  if (!answer) {
    if (has_body && parser_->expects_continue() && !SendContinue()) return Close(HttpAbort::kPeerGone);
    if (has_body) Touch(server_.options.body_timeout);
    return;
  }
  if (!has_body) return SendWhole(std::move(*answer));
  if (parser_->content_length() <= kMaxDiscardedBody && !parser_->expects_continue()) {
    parser_->DiscardBody();
    early_answer_ = std::move(answer);
    phase_ = Phase::kDiscard;
    Touch(server_.options.body_timeout);
    return;
  }
  keep_alive_ = false;
  SendWhole(std::move(*answer));
}

// The socket's buffer is empty here; if the line should not fit, the client's own time-out sends the body. False when
// the connection cannot go on: a TLS record that was begun must be ended with the same bytes.
bool HttpConnection::SendContinue() {
  constexpr std::string_view kLine = "HTTP/1.1 100 Continue\r\n\r\n";
  if (tls_) {
    size_t bytes = 0;
    return tls_->Write(kLine.data(), kLine.size(), &bytes) == TlsSession::Outcome::kDone;
  }
  ErrorCode ignored;
  socket_.write_some(asio::buffer(kLine.data(), kLine.size()), ignored);
  return true;
}

void HttpConnection::Fail(int status, std::string_view message) {
  keep_alive_ = false;
  SendWhole(server_.handler.Error(status, message));
}

void HttpConnection::Sweep(Clock::time_point now) {
  if (limit_ && now > *limit_) {
    switch (phase_) {
      case Phase::kHead:
      case Phase::kBody:
        return Fail(408, "the request did not arrive in time");
      case Phase::kAnswer:
        spdlog::info("http: {} takes nothing, cut off", peer_);
        return Close(HttpAbort::kStalled);
      default:
        return Close(HttpAbort::kPeerGone);
    }
  }
  if (phase_ != Phase::kAnswer) return;
  if (!reading_ && PeerHasLeft(socket_.native_handle())) return OnPeerGone(false);
  const Clock::duration silence = server_.options.silence_interval;
  if (job_ && !writing_ && silence.count() > 0 && now - last_output_ >= silence) {
    last_output_ = now;
    CallJob(&HttpJob::OnSilence);
  }
}

void HttpConnection::CloseIfIdle() {
  // A client that has just connected is about to ask, a probe mostly: it gets its answer, which then ends the
  // connection.
  if (phase_ == Phase::kIdle && answered_) Close(HttpAbort::kStopping);
}

void HttpConnection::Close(HttpAbort why) {
  if (phase_ == Phase::kClosed) return;
  phase_ = Phase::kClosed;
  limit_.reset();
  ErrorCode ignored;
  if (why == HttpAbort::kStalled) {
    // What the client did not take is not worth the kernel's memory.
    socket_.set_option(asio::socket_base::linger(true, 0), ignored);
  }
  tls_.reset();
  socket_.close(ignored);
  parser_.reset();
  if (exchange_open_) server_.exchanges.fetch_sub(1);
  exchange_open_ = false;
  if (const std::shared_ptr<HttpJob> job = std::move(job_)) job->OnAbort(why);
  io_.Remove(shared_from_this());
}

}  // namespace k3
