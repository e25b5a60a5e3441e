#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "server/http/http_handler.h"
#include "server/http/http_options.h"
#include "server/http/request_parser.h"
#include "server/http/tls_session.h"

namespace k3 {

class HttpIoThread;
class HttpWakeSlot;

// Buffers larger than this are not kept for the next read or write.
inline constexpr size_t kMaxKeptHttpBuffer = 64 << 10;
void RecycleHttpBuffer(std::string& buffer);

// What all connections of a server share.
struct HttpServerState {
  HttpServerState(HttpServerOptions server_options, HttpHandler& server_handler)
      : options(std::move(server_options)), handler(server_handler), budget(options.max_buffered_bytes) {}

  const HttpServerOptions options;
  HttpHandler& handler;
  BodyBudget budget;
  std::function<void(std::function<void()>)> offload;  // runs a task on a worker
  std::atomic<int> connections{0};
  std::atomic<int> exchanges{0};  // requests that were read and whose answer is not yet written
  std::atomic<int> offloaded{0};  // of these, those on a worker
  std::atomic<bool> draining{false};
};

// One client connection: requests one after the other, each answered before the next is looked at. Lives on one event
// loop; every method is called there. At most one read and one write are in flight. While an answer is being made a
// read stays posted, so a client that goes away is seen at once; an end of the client's sending side counts as going
// away.
class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(HttpIoThread& io, boost::asio::ip::tcp::socket socket, HttpServerState& server);
  ~HttpConnection();

  void Start();
  void OnWake(const HttpWakeSlot* slot);
  // Time limits, and clients that left while the read-ahead is full.
  void Sweep(Clock::time_point now);
  // Between requests; not before the first one.
  void CloseIfIdle();
  void Close(HttpAbort why);

 private:
  using ErrorCode = boost::system::error_code;
  enum class Phase {
    kHandshake,  // of TLS
    kIdle,       // between requests
    kHead,       // part of a head is there
    kBody,       // head accepted
    kDiscard,    // answered early: the body is thrown away, then the answer sent
    kAnswer,     // a worker, a job or a write is busy with the answer
    kLinger,     // answered and half-closed: reading until the client closes, so that it can read the answer
    kClosed,
  };

  // TLS.
  void Handshake();
  void SendTls();

  // Reading.
  void Read();
  void OnReadable(ErrorCode ec);
  size_t ReadSome(char* data, size_t size, ErrorCode& ec);
  bool SendContinue();
  void OnPeerGone(bool reset);
  void ParseInput();
  void BeginRequest();
  void OnHead();
  void Fail(int status, std::string_view message);

  // Answering.
  void Dispatch();
  void Deliver(HttpReply reply);
  void Pump();
  void FlushWriter();
  void SendWhole(HttpResponse response);
  void StartHead(const HttpResponse& response);
  void CallJob(void (HttpJob::*call)(HttpWriter&));

  // Writing: head_, payload_, tail_, in this order.
  void Write();
  void WriteSome();
  void OnWritten(ErrorCode ec, size_t bytes);
  void AnswerDone();
  void Touch(Clock::duration limit);

  HttpIoThread& io_;
  HttpServerState& server_;
  boost::asio::ip::tcp::socket socket_;
  std::optional<TlsSession> tls_;
  std::string peer_;

  Phase phase_ = Phase::kIdle;
  std::optional<HttpRequestParser> parser_;
  std::string input_;  // received, not yet parsed; parsed_ bytes at its start are done with
  size_t parsed_ = 0;
  bool reading_ = false;
  bool tls_read_waits_for_write_ = false;
  std::optional<Clock::time_point> limit_;  // closes the connection when passed
  Clock::time_point linger_end_;

  bool answered_ = false;  // at least one request

  // The current exchange.
  bool exchange_open_ = false;  // counted in HttpServerState::exchanges
  bool keep_alive_ = true;
  bool http_1_0_ = false;
  bool head_only_ = false;  // HEAD
  bool chunked_ = false;
  std::optional<HttpResponse> early_answer_;  // sent after kDiscard
  std::shared_ptr<HttpJob> job_;
  std::shared_ptr<HttpWakeSlot> wake_slot_;
  HttpWriter writer_;
  bool woken_ = false;
  bool last_write_ = false;  // the write in flight ends the answer
  Clock::time_point last_output_;

  bool writing_ = false;
  std::string head_;
  std::string payload_;
  std::string tail_;
  size_t written_ = 0;
};

}  // namespace k3
