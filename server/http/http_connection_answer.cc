#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/error.hpp>
#include <boost/asio/post.hpp>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/http/http_connection.h"
#include "server/http/io_thread.h"
#include "spdlog/spdlog.h"

// The answering half of a connection: handing requests over, driving jobs, writing.
namespace k3 {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;

constexpr size_t kTlsRecord = 16 << 10;

}  // namespace

void RecycleHttpBuffer(std::string& buffer) {
  if (buffer.capacity() > kMaxKeptHttpBuffer) {
    buffer = std::string();
  } else {
    buffer.clear();
  }
}

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
  if (tls_) return SendTls();
  std::array<asio::const_buffer, 3> buffers{asio::buffer(head_), asio::buffer(payload_), asio::buffer(tail_)};
  size_t skip = written_;
  for (asio::const_buffer& buffer : buffers) {
    const size_t n = std::min(skip, buffer.size());
    buffer += n;
    skip -= n;
  }
  socket_.async_write_some(buffers, [self = shared_from_this()](ErrorCode ec, size_t n) { self->OnWritten(ec, n); });
}

// One record at a time: head, payload and tail of a small piece leave together. A retry after a full socket offers the
// same bytes, since nothing is put behind them until they are written.
void HttpConnection::SendTls() {
  if (phase_ == Phase::kClosed) return;
  static thread_local std::string record;
  record.clear();
  size_t skip = written_;
  for (const std::string* part : {&head_, &payload_, &tail_}) {
    const size_t from = std::min(skip, part->size());
    skip -= from;
    record.append(*part, from, kTlsRecord - record.size());
  }
  size_t bytes = 0;
  const TlsSession::Outcome outcome =
      record.empty() ? TlsSession::Outcome::kDone : tls_->Write(record.data(), record.size(), &bytes);
  switch (outcome) {
    case TlsSession::Outcome::kDone:
      asio::post(socket_.get_executor(), [self = shared_from_this(), bytes] { self->OnWritten({}, bytes); });
      return;
    case TlsSession::Outcome::kWaitWrite:
      return socket_.async_wait(tcp::socket::wait_write, [self = shared_from_this()](ErrorCode ec) {
        ec ? self->OnWritten(ec, 0) : self->SendTls();
      });
    default:
      asio::post(socket_.get_executor(), [self = shared_from_this()] { self->OnWritten(asio::error::broken_pipe, 0); });
  }
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
  RecycleHttpBuffer(head_);
  RecycleHttpBuffer(payload_);
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
    if (tls_) tls_->Close();
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    phase_ = Phase::kLinger;
    RecycleHttpBuffer(input_);
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

}  // namespace k3
