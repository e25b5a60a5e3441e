#include "server/http/http_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/error.hpp>
#include <boost/asio/post.hpp>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/http/io_thread.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;

// An early answer waits for a body up to this size, so that the connection can be kept.
constexpr uint64_t kMaxDiscardedBody = 256 << 10;
// Buffers larger than this are not kept for the next write.
constexpr size_t kMaxKeptBuffer = 64 << 10;

void Recycle(std::string& buffer) {
  if (buffer.capacity() > kMaxKeptBuffer) {
    buffer = std::string();
  } else {
    buffer.clear();
  }
}

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
  if (server_.connections.load() > server_.options.max_connections) {
    return Fail(503, "too many connections");
  }
  Touch(server_.options.idle_timeout);
  Read();
}

void HttpConnection::Touch(Clock::duration limit) { limit_ = Clock::now() + limit; }

// Reading. A connection that waits holds no buffer: readiness is awaited, then bytes go through one buffer per thread.

void HttpConnection::Read() {
  if (reading_ || phase_ == Phase::kClosed) return;
  if (phase_ == Phase::kAnswer && input_.size() - parsed_ >= server_.options.read_ahead_bytes) return;
  reading_ = true;
  socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this()](ErrorCode ec) { self->OnReadable(ec); });
}

void HttpConnection::OnReadable(ErrorCode ec) {
  reading_ = false;
  if (phase_ == Phase::kClosed) return;
  static thread_local std::array<char, 128 << 10> buffer;
  size_t size = 0;
  if (!ec) size = socket_.read_some(asio::buffer(buffer), ec);
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
    Recycle(input_);
    parsed_ = 0;
  } else if (parsed_ > kMaxKeptBuffer) {
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
    if (has_body && parser_->expects_continue()) {
      // The socket's buffer is empty here; if the line should not fit, the client's own time-out sends the body.
      ErrorCode ignored;
      socket_.write_some(asio::buffer("HTTP/1.1 100 Continue\r\n\r\n", 25), ignored);
    }
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

void HttpConnection::Fail(int status, std::string_view message) {
  keep_alive_ = false;
  SendWhole(server_.handler.Error(status, message));
}

// Answering.

void HttpConnection::Dispatch() {
  phase_ = Phase::kAnswer;
  limit_.reset();
  exchange_open_ = true;
  server_.exchanges.fetch_add(1);
  last_output_ = Clock::now();
  wake_slot_ = std::make_shared<HttpWakeSlot>(io_.wakes(), weak_from_this());
  std::shared_ptr<void> lease;
  HttpRequest request = parser_->TakeRequest(&lease);
  parser_.reset();
  auto handle = [this](HttpRequest taken) -> HttpReply {
    try {
      return server_.handler.Handle(std::move(taken), HttpWaker(wake_slot_));
    } catch (const std::exception& e) {
      spdlog::error("http: {}", e.what());
      return server_.handler.Error(500, "internal error");
    }
  };
  if (!server_.offload || request.body.size() <= server_.options.inline_body_bytes) {
    return Deliver(handle(std::move(request)));
  }
  server_.offloaded.fetch_add(1);
  auto shared_request = std::make_shared<HttpRequest>(std::move(request));
  server_.offload([self = shared_from_this(), handle, shared_request, lease]() mutable {
    auto reply = std::make_shared<HttpReply>(handle(std::move(*shared_request)));
    lease.reset();
    HttpServerState& server = self->server_;
    auto executor = self->socket_.get_executor();
    // The connection must not die here, on a thread that is not its own.
    asio::post(executor, [self = std::move(self), reply] { self->Deliver(std::move(*reply)); });
    server.offloaded.fetch_sub(1);
  });
}

void HttpConnection::Deliver(HttpReply reply) {
  if (auto* response = std::get_if<HttpResponse>(&reply)) {
    if (phase_ != Phase::kClosed) SendWhole(std::move(*response));
    return;
  }
  std::shared_ptr<HttpJob> job = std::get<std::shared_ptr<HttpJob>>(std::move(reply));
  if (phase_ == Phase::kClosed) return job->OnAbort(HttpAbort::kPeerGone);
  job_ = std::move(job);
  writer_ = HttpWriter();
  Pump();
}

void HttpConnection::OnWake(const HttpWakeSlot* slot) {
  if (slot != wake_slot_.get()) return;  // of an exchange that is over
  woken_ = true;
  if (!writing_) return Pump();
  if (!job_ || !job_->WantsBlockedWakes()) return;
  wake_slot_->Rearm();
  try {
    job_->OnBlocked();
  } catch (const std::exception& e) {
    spdlog::error("http: {}", e.what());
    Close(HttpAbort::kStopping);
  }
}

void HttpConnection::Pump() {
  if (writing_ || !job_ || phase_ != Phase::kAnswer) return;
  woken_ = false;
  wake_slot_->Rearm();
  CallJob(&HttpJob::OnReady);
}

void HttpConnection::CallJob(void (HttpJob::*call)(HttpWriter&)) {
  try {
    (job_.get()->*call)(writer_);
  } catch (const std::exception& e) {
    spdlog::error("http: {}", e.what());
    const std::shared_ptr<HttpJob> job = std::move(job_);
    job->OnAbort(HttpAbort::kStopping);
    if (writer_.started_ && !writer_.head_) return Close(HttpAbort::kStopping);
    return Fail(500, "internal error");
  }
  FlushWriter();
}

void HttpConnection::FlushWriter() {
  if (writer_.whole_) {
    job_.reset();
    return SendWhole(std::move(*writer_.head_));
  }
  if (writer_.head_) {
    chunked_ = !http_1_0_;
    if (!chunked_) keep_alive_ = false;
    StartHead(*writer_.head_);
    head_.append(chunked_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n");
    writer_.head_.reset();
  }
  if (!writer_.body_.empty()) {
    if (chunked_) {
      absl::StrAppend(&head_, absl::Hex(writer_.body_.size()), "\r\n");
      tail_ = "\r\n";
    }
    payload_.swap(writer_.body_);
    writer_.body_.clear();
  }
  if (writer_.finished_) {
    if (chunked_) tail_.append("0\r\n\r\n");
    job_.reset();
    last_write_ = true;
  }
  if (last_write_ || !head_.empty() || !payload_.empty()) Write();
}

void HttpConnection::StartHead(const HttpResponse& response) {
  if (server_.draining.load()) keep_alive_ = false;
  absl::StrAppend(&head_, "HTTP/1.1 ", response.status, " ", std::string(HttpReason(response.status)),
                  "\r\nDate: ", io_.date(), "\r\n");
  if (!response.content_type.empty() && response.status != 204) {
    absl::StrAppend(&head_, "Content-Type: ", response.content_type, "\r\n");
  }
  for (const auto& [name, value] : response.headers) absl::StrAppend(&head_, name, ": ", value, "\r\n");
  if (!keep_alive_) {
    head_.append("Connection: close\r\n");
  } else if (http_1_0_) {
    head_.append("Connection: keep-alive\r\n");
  }
}

void HttpConnection::SendWhole(HttpResponse response) {
  phase_ = Phase::kAnswer;
  StartHead(response);
  if (response.status != 204) absl::StrAppend(&head_, "Content-Length: ", response.body.size(), "\r\n");
  head_.append("\r\n");
  if (!head_only_ && response.status != 204) payload_ = std::move(response.body);
  last_write_ = true;
  Write();
}

// Writing.

void HttpConnection::Write() {
  writing_ = true;
  written_ = 0;
  WriteSome();
}

void HttpConnection::WriteSome() {
  Touch(server_.options.stall_limit);
  std::array<asio::const_buffer, 3> buffers{asio::buffer(head_), asio::buffer(payload_), asio::buffer(tail_)};
  size_t skip = written_;
  for (asio::const_buffer& buffer : buffers) {
    const size_t n = std::min(skip, buffer.size());
    buffer += n;
    skip -= n;
  }
  socket_.async_write_some(buffers, [self = shared_from_this()](ErrorCode ec, size_t n) { self->OnWritten(ec, n); });
}

void HttpConnection::OnWritten(ErrorCode ec, size_t bytes) {
  if (phase_ == Phase::kClosed) return;
  if (ec) {
    writing_ = false;
    return Close(HttpAbort::kPeerGone);
  }
  written_ += bytes;
  if (written_ < head_.size() + payload_.size() + tail_.size()) return WriteSome();
  writing_ = false;
  limit_.reset();
  last_output_ = Clock::now();
  Recycle(head_);
  Recycle(payload_);
  tail_.clear();
  if (last_write_) return AnswerDone();
  if (woken_) Pump();
}

void HttpConnection::AnswerDone() {
  last_write_ = false;
  wake_slot_.reset();
  parser_.reset();
  if (exchange_open_) server_.exchanges.fetch_sub(1);
  exchange_open_ = false;
  answered_ = true;
  if (!keep_alive_) {
    // Closing at once could reset the connection under bytes that the client has not read yet.
    ErrorCode ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    phase_ = Phase::kLinger;
    Recycle(input_);
    parsed_ = 0;
    Touch(server_.options.linger_timeout);
    return Read();
  }
  phase_ = Phase::kIdle;
  Touch(server_.options.idle_timeout);
  ParseInput();
  // An answer whose head was written before the drain began ends after the pass that closes what is idle.
  if (server_.draining.load()) CloseIfIdle();
  Read();
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
  // A client that has just connected is about to ask, a probe mostly: it gets its answer, which then ends the connection.
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
  socket_.close(ignored);
  parser_.reset();
  if (exchange_open_) server_.exchanges.fetch_sub(1);
  exchange_open_ = false;
  if (const std::shared_ptr<HttpJob> job = std::move(job_)) job->OnAbort(why);
  io_.Remove(shared_from_this());
}

}  // namespace k3
