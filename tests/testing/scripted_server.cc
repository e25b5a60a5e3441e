#include "tests/testing/scripted_server.h"

#include <grpcpp/server_builder.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <list>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "k3serve/inference/v1/model_service.grpc.pb.h"

namespace k3::testing {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
namespace v1 = ::k3serve::inference::v1;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;
using SteadyClock = std::chrono::steady_clock;

bool IsEvery(int n, int every) { return every > 0 && n % every == 0; }

// Counts a request as running while it lives.
class Running {
 public:
  explicit Running(ServerCounts& counts) : counts_(counts) {
    const int now = ++counts.running;
    int most = counts.most_running;
    while (now > most && !counts.most_running.compare_exchange_weak(most, now)) {
    }
  }
  ~Running() { --counts_.running; }

 private:
  ServerCounts& counts_;
};

// The pace of one reply, without drift: message `i` is due at a fixed time after the start.
class Pace {
 public:
  explicit Pace(const ReplyScript& script) : script_(script) {}
  void WaitFor(int message) const {
    std::this_thread::sleep_until(
        start_ + std::chrono::duration_cast<SteadyClock::duration>(
                     std::chrono::duration<double, std::milli>(script_.first_ms + script_.gap_ms * message)));
  }

 private:
  const ReplyScript& script_;
  const SteadyClock::time_point start_ = SteadyClock::now();
};

class Generation final : public v1::GenerationService::Service {
 public:
  explicit Generation(const ReplyScript& script) : script_(script) {}

  grpc::Status StreamGenerate(grpc::ServerContext*, const v1::StreamGenerateRequest* request,
                              grpc::ServerWriter<v1::StreamGenerateResponse>* writer) override {
    const Running running(counts_);
    const int number = ++counts_.requests;
    if (IsEvery(number, script_.refuse_every)) return {grpc::StatusCode::RESOURCE_EXHAUSTED, "scripted"};
    const v1::GenerationSpec& spec = request->spec();
    const int prompt = spec.has_tokens() ? spec.tokens().ids_size() : 7;
    counts_.prompt_tokens += prompt;
    const Pace pace(script_);
    v1::StreamGenerateResponse response;
    response.mutable_accepted()->set_prompt_tokens(static_cast<uint32_t>(prompt));
    response.mutable_accepted()->set_cached_tokens(2);
    writer->Write(response);
    const int tokens = static_cast<int>(spec.stopping().max_new_tokens());
    for (int sent = 0, message = 0; sent < tokens; ++message) {
      pace.WaitFor(message);
      response.mutable_delta()->Clear();
      response.mutable_delta()->set_text("x");
      for (int i = 0; i < script_.tokens_per_message && sent < tokens; ++i, ++sent) {
        response.mutable_delta()->add_token_ids(1);
      }
      writer->Write(response);
      if (IsEvery(number, script_.break_every)) return {grpc::StatusCode::INTERNAL, "scripted"};
    }
    response.mutable_usage()->set_completion_tokens(static_cast<uint32_t>(tokens));
    writer->Write(response);
    return grpc::Status::OK;
  }

  const ReplyScript script_;
  ServerCounts counts_;
};

class Model final : public v1::ModelService::Service {
 public:
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    response->set_version("scripted");
    response->set_device("none");
    response->mutable_limits()->set_vocab_size(4096);
    return grpc::Status::OK;
  }
  grpc::Status ListModels(grpc::ServerContext*, const v1::ListModelsRequest*,
                          v1::ListModelsResponse* response) override {
    response->add_models()->set_name("scripted-model");
    return grpc::Status::OK;
  }
};

}  // namespace

struct ScriptedGrpcServer::Impl {
  explicit Impl(const ReplyScript& script) : generation(script) {}
  Generation generation;
  Model model;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
};

ScriptedGrpcServer::ScriptedGrpcServer(const ReplyScript& script) : impl_(std::make_unique<Impl>(script)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &impl_->port);
  builder.RegisterService(&impl_->generation);
  builder.RegisterService(&impl_->model);
  impl_->server = builder.BuildAndStart();
}

ScriptedGrpcServer::~ScriptedGrpcServer() { impl_->server->Shutdown(); }

std::string ScriptedGrpcServer::target() const { return absl::StrCat("127.0.0.1:", impl_->port); }

const ServerCounts& ScriptedGrpcServer::counts() const { return impl_->generation.counts_; }

// One blocking thread per connection.
struct ScriptedHttpServer::Impl {
  explicit Impl(const ReplyScript& reply_script)
      : script(reply_script), acceptor(io, tcp::endpoint(asio::ip::address_v4::loopback(), 0)) {
    accepting = std::thread([this] { Accept(); });
  }

  ~Impl() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
      for (const auto& socket : sockets) {
        ErrorCode ignored;
        socket->shutdown(tcp::socket::shutdown_both, ignored);
      }
    }
    ::shutdown(acceptor.native_handle(), SHUT_RDWR);  // ends the blocking accept
    accepting.join();
    for (std::thread& thread : threads) thread.join();
  }

  void Accept() {
    while (true) {
      auto socket = std::make_shared<tcp::socket>(io);
      ErrorCode ec;
      acceptor.accept(*socket, ec);
      const std::lock_guard<std::mutex> lock(mutex);
      if (ec || stopping) return;
      ++counts.connections;
      sockets.push_back(socket);
      threads.emplace_back([this, socket] { Serve(*socket); });
    }
  }

  void Serve(tcp::socket& socket) {
    ErrorCode ec;
    socket.set_option(tcp::no_delay(true), ec);
    boost::beast::flat_buffer buffer;
    bool keep = true;
    while (keep && !ec) {
      http::request<http::string_body> request;
      http::read(socket, buffer, request, ec);
      if (ec) break;
      if (request.target() == "/v1/models") {
        keep = Answer(socket, http::status::ok, R"({"object":"list","data":[{"id":"scripted-model"}]})");
      } else if (request.method() == http::verb::post) {
        keep = Generate(socket, request);
      } else {
        keep = Answer(socket, http::status::not_found, R"({"error":{"type":"invalid_request_error"}})");
      }
    }
    socket.shutdown(tcp::socket::shutdown_both, ec);
  }

  bool Answer(tcp::socket& socket, http::status status, const std::string& body) {
    http::response<http::string_body> response(status, 11);
    response.set(http::field::content_type, "application/json");
    response.body() = body;
    response.prepare_payload();
    ErrorCode ec;
    http::write(socket, response, ec);
    return !ec;
  }

  static bool Send(tcp::socket& socket, const std::string& bytes) {
    ErrorCode ec;
    asio::write(socket, asio::buffer(bytes), ec);
    return !ec;
  }

  static std::string Event(const std::string& data) {
    const std::string line = absl::StrCat("data: ", data, "\n\n");
    return absl::StrFormat("%x\r\n%s\r\n", line.size(), line);
  }

  bool Generate(tcp::socket& socket, const http::request<http::string_body>& request) {
    const Running running(counts);
    const int number = ++counts.requests;
    if (IsEvery(number, script.refuse_every)) {
      return Answer(socket, http::status::too_many_requests, R"({"error":{"type":"rate_limit_error","code":null}})");
    }
    const nlohmann::json body = nlohmann::json::parse(request.body());
    const bool chat = request.target() == "/v1/chat/completions";
    const int tokens = body.at(chat ? "max_completion_tokens" : "max_tokens").get<int>();
    const int prompt = !chat && body.at("prompt").is_array() ? static_cast<int>(body["prompt"].size()) : 7;
    counts.prompt_tokens += prompt;
    const Pace pace(script);
    const auto usage = [prompt](int completion) {
      return nlohmann::json{{"prompt_tokens", prompt},
                            {"completion_tokens", completion},
                            {"prompt_tokens_details", {{"cached_tokens", 2}}}};
    };
    if (!Send(socket, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")) {
      return false;
    }
    for (int sent = 0, message = 0; sent < tokens; ++message) {
      pace.WaitFor(message);
      sent = std::min(tokens, sent + script.tokens_per_message);
      nlohmann::json choice = {{"index", 0}, {"finish_reason", nullptr}};
      if (chat) {
        choice["delta"] = {{"content", "x"}};
      } else {
        choice["text"] = "x";
      }
      nlohmann::json chunk = {{"choices", nlohmann::json::array({choice})}};
      if (!script.hide_tokens) chunk["usage"] = usage(sent);
      if (!Send(socket, Event(chunk.dump()))) return false;
      if (IsEvery(number, script.break_every)) return false;
    }
    const nlohmann::json last = {{"choices", nlohmann::json::array()}, {"usage", usage(tokens)}};
    return Send(socket, Event(last.dump()) + Event("[DONE]") + "0\r\n\r\n") && !script.close_silently;
  }

  const ReplyScript script;
  ServerCounts counts;
  asio::io_context io;
  tcp::acceptor acceptor;
  std::mutex mutex;
  bool stopping = false;                            // guarded by mutex
  std::list<std::shared_ptr<tcp::socket>> sockets;  // guarded by mutex
  std::list<std::thread> threads;                   // guarded by mutex until accepting has ended
  std::thread accepting;
};

ScriptedHttpServer::ScriptedHttpServer(const ReplyScript& script) : impl_(std::make_unique<Impl>(script)) {}

ScriptedHttpServer::~ScriptedHttpServer() = default;

std::string ScriptedHttpServer::url() const {
  return absl::StrCat("http://127.0.0.1:", impl_->acceptor.local_endpoint().port());
}

const ServerCounts& ScriptedHttpServer::counts() const { return impl_->counts; }

}  // namespace k3::testing
