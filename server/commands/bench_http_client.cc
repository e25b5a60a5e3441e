#include "server/commands/bench_http_client.h"

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/error.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/commands/bench_http_stream.h"
#include "server/commands/bench_openai.h"

namespace k3 {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;

constexpr auto kConnectTimeout = std::chrono::seconds(10);
constexpr size_t kErrorBodyLimit = 64 << 10;

// One blocking request of Prepare, on a loop of its own.
absl::StatusOr<std::string> Get(const HttpUrl& url, const tcp::resolver::results_type& endpoints,
                                const std::string& path, const ClientAccess& access) {
  asio::io_context io;
  BenchHttpStream stream(io, url.https ? access.context() : nullptr, url.host);
  http::request<http::empty_body> request(http::verb::get, url.base + path, 11);
  request.set(http::field::host, url.authority());
  request.set(http::field::user_agent, "k3serve-bench");
  if (!access.key().empty()) request.set(http::field::authorization, "Bearer " + access.key());
  beast::flat_buffer buffer;
  http::response<http::string_body> response;
  ErrorCode failure;
  // A tcp_stream's time limit covers asynchronous operations only.
  stream.tcp().expires_after(kConnectTimeout);
  stream.tcp().async_connect(endpoints, [&](ErrorCode ec, const tcp::endpoint&) {
    if ((failure = ec)) return;
    stream.Handshake([&](ErrorCode ec) {
      if ((failure = ec)) return;
      http::async_write(stream, request, [&](ErrorCode ec, size_t) {
        if ((failure = ec)) return;
        http::async_read(stream, buffer, response, [&](ErrorCode ec, size_t) { failure = ec; });
      });
    });
  });
  io.run();
  if (failure)
    return absl::UnavailableError(absl::StrCat("GET ", path, " at ", url.authority(), ": ", failure.message()));
  if (response.result() != http::status::ok) {
    return absl::UnavailableError(absl::StrCat("GET ", path, " at ", url.authority(), ": ",
                                               OpenAiErrorKind(response.result_int(), response.body())));
  }
  return std::move(response.body());
}

}  // namespace

// The event loop and what its exchanges share. All but in_flight belongs to the loop's thread.
class BenchHttpClient::Loop {
 public:
  Loop(const BenchConfig& config, HttpUrl url)
      : config_(config), url_(std::move(url)), work_(asio::make_work_guard(io_)), thread_([this] { io_.run(); }) {}

  ~Loop() {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      idle_.wait(lock, [this] { return in_flight_ == 0; });
    }
    asio::post(io_, [this] { connections_.clear(); });
    work_.reset();
    thread_.join();
  }

  // Null when none is open.
  std::unique_ptr<BenchHttpStream> TakeConnection() {
    if (connections_.empty()) return nullptr;
    std::unique_ptr<BenchHttpStream> stream = std::move(connections_.back());
    connections_.pop_back();
    return stream;
  }
  void KeepConnection(std::unique_ptr<BenchHttpStream> stream) { connections_.push_back(std::move(stream)); }
  std::unique_ptr<BenchHttpStream> NewConnection() {
    return std::make_unique<BenchHttpStream>(io_, url_.https ? config_.access.context() : nullptr, url_.host);
  }

  void Begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++in_flight_;
  }
  void End() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--in_flight_ == 0) idle_.notify_all();
  }

  const BenchConfig& config_;
  const HttpUrl url_;
  tcp::resolver::results_type endpoints_;
  std::string model_;
  asio::io_context io_{1};

 private:
  std::vector<std::unique_ptr<BenchHttpStream>> connections_;  // open and unused
  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t in_flight_ = 0;  // guarded by mutex_
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::thread thread_;
};

// One request: connect or reuse, write, read the head, then the body as it comes. Lives in its own callbacks.
class BenchHttpClient::Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(Loop* loop, const BenchRequest& request, Done done)
      : loop_(loop),
        done_(std::move(done)),
        request_(http::verb::post, loop->url_.base + OpenAiRoute(loop->config_), 11),
        reader_(&record_) {
    record_.index = request.index;
    record_.kind = request.kind;
    request_.set(http::field::host, loop->url_.authority());
    request_.set(http::field::user_agent, "k3serve-bench");
    const std::string& api_key = loop->config_.access.key();
    if (!api_key.empty()) request_.set(http::field::authorization, "Bearer " + api_key);
    request_.set(http::field::content_type, "application/json");
    request_.set(http::field::accept, "text/event-stream");
    request_.body() = OpenAiBody(loop->config_, request, loop->model_);
    request_.prepare_payload();
  }

  void Start() {
    record_.sent = Clock::now();
    deadline_ = record_.sent + std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(loop_->config_.timeout_seconds));
    asio::post(loop_->io_, [self = shared_from_this()] { self->Connect(/*reuse=*/true); });
  }

 private:
  void Connect(bool reuse) {
    parser_.emplace();
    parser_->body_limit(std::numeric_limits<uint64_t>::max());
    buffer_.clear();
    if (reuse) stream_ = loop_->TakeConnection();
    reused_ = reuse && stream_ != nullptr;
    if (reused_) return Write();
    stream_ = loop_->NewConnection();
    stream_->tcp().expires_at(deadline_);
    stream_->tcp().async_connect(loop_->endpoints_, [self = shared_from_this()](ErrorCode ec, const tcp::endpoint&) {
      if (ec) return self->Fail(ec, "connect");
      self->stream_->tcp().socket().set_option(tcp::no_delay(true), ec);
      self->stream_->Handshake([self](ErrorCode ec) {
        if (ec) return self->Fail(ec, "handshake");
        self->Write();
      });
    });
  }

  void Write() {
    stream_->tcp().expires_at(deadline_);
    http::async_write(*stream_, request_, [self = shared_from_this()](ErrorCode ec, size_t) {
      if (ec) return self->Fail(ec, "write");
      self->ReadHead();
    });
  }

  void ReadHead() {
    http::async_read_header(*stream_, buffer_, *parser_, [self = shared_from_this()](ErrorCode ec, size_t) {
      if (ec) return self->Fail(ec, "read");
      self->status_ = self->parser_->get().result_int();
      self->ReadBody();
    });
  }

  void ReadBody() {
    if (parser_->is_done()) return Finish();
    parser_->get().body().data = chunk_.data();
    parser_->get().body().size = chunk_.size();
    parser_->get().body().more = true;
    http::async_read_some(*stream_, buffer_, *parser_, [self = shared_from_this()](ErrorCode ec, size_t) {
      if (ec == http::error::need_buffer) ec = {};
      if (ec) return self->reader_.done() ? self->Finish() : self->Fail(ec, "read");
      self->OnBody();
      self->ReadBody();
    });
  }

  void OnBody() {
    const std::string_view piece(chunk_.data(), chunk_.size() - parser_->get().body().size);
    if (status_ == 200) {
      reader_.Feed(piece, Clock::now());
    } else if (error_body_.size() < kErrorBodyLimit) {
      error_body_ += piece;
    }
  }

  void Fail(ErrorCode ec, const char* what) {
    // The server may close an idle connection at the very moment it is used again; nothing was answered then.
    if (reused_ && status_ == 0 && ec != beast::error::timeout) return Connect(/*reuse=*/false);
    if (ec == beast::error::timeout) {
      record_.error = "timeout";
    } else if (ec == asio::error::connection_refused) {
      record_.error = "connection refused";
    } else if (ec == http::error::end_of_stream || ec == http::error::partial_message || ec == asio::error::eof ||
               ec == asio::error::connection_reset || ec == asio::error::broken_pipe ||
               ec == asio::ssl::error::stream_truncated) {
      record_.error = "connection closed";
    } else {
      record_.error = absl::StrCat(what, ": ", ec.message());
    }
    End();
  }

  void Finish() {
    if (status_ == 200) {
      reader_.Finish();
    } else {
      record_.error = OpenAiErrorKind(status_, error_body_);
    }
    if (parser_->is_done() && parser_->keep_alive()) {
      stream_->tcp().expires_never();
      loop_->KeepConnection(std::move(stream_));
    }
    End();
  }

  void End() {
    record_.finished = Clock::now();
    stream_.reset();
    done_(std::move(record_));
    loop_->End();
  }

  Loop* const loop_;
  const Done done_;
  http::request<http::string_body> request_;
  RequestRecord record_;
  OpenAiStreamReader reader_;
  Clock::time_point deadline_;
  std::unique_ptr<BenchHttpStream> stream_;
  bool reused_ = false;
  beast::flat_buffer buffer_;
  std::optional<http::response_parser<http::buffer_body>> parser_;
  int status_ = 0;  // 0: nothing was answered yet
  std::array<char, 16384> chunk_;
  std::string error_body_;
};

BenchHttpClient::BenchHttpClient(const BenchConfig& config, HttpUrl url)
    : loop_(std::make_unique<Loop>(config, std::move(url))) {}

BenchHttpClient::~BenchHttpClient() = default;

absl::StatusOr<BenchServerInfo> BenchHttpClient::Prepare() {
  ErrorCode ec;
  asio::io_context io;
  tcp::resolver resolver(io);
  loop_->endpoints_ = resolver.resolve(loop_->url_.host, loop_->url_.port, ec);
  if (ec) return absl::UnavailableError(absl::StrCat("cannot resolve ", loop_->url_.host, ": ", ec.message()));

  const absl::StatusOr<std::string> models = Get(loop_->url_, loop_->endpoints_, "/v1/models", loop_->config_.access);
  if (!models.ok()) return models.status();
  loop_->model_ = loop_->config_.model;
  if (loop_->model_.empty()) {
    const nlohmann::json list = nlohmann::json::parse(*models, nullptr, /*allow_exceptions=*/false);
    const nlohmann::json::json_pointer first("/data/0/id");
    if (list.is_discarded() || !list.contains(first) || !list[first].is_string()) {
      return absl::NotFoundError("GET /v1/models: no data[0].id in the answer; give --model");
    }
    loop_->model_ = list[first].get<std::string>();
  }
  BenchServerInfo info;
  info.server = loop_->url_.authority();
  info.model = loop_->model_;
  // Not every server has this route; without it random ids stay below what any vocabulary has.
  if (const absl::StatusOr<std::string> text =
          Get(loop_->url_, loop_->endpoints_, "/tokenizer_info", loop_->config_.access);
      text.ok()) {
    const nlohmann::json tokenizer = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
    if (tokenizer.is_object() && tokenizer.contains("vocab_size") && tokenizer["vocab_size"].is_number_integer()) {
      info.vocab_size = tokenizer["vocab_size"].get<int32_t>();
    }
  }
  return info;
}

void BenchHttpClient::Send(const BenchRequest& request, Done done) {
  loop_->Begin();
  std::make_shared<Exchange>(loop_.get(), request, std::move(done))->Start();
}

}  // namespace k3
