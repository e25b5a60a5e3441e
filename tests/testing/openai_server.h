#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/api_keys.h"
#include "server/generation_service.h"
#include "server/health.h"
#include "server/http_server.h"
#include "server/metrics.h"
#include "server/openai_gateway.h"
#include "server/worker_pool.h"
#include "tests/testing/http_client.h"
#include "tests/testing/mock_engine.h"

namespace k3::testing {

using Json = nlohmann::ordered_json;

inline constexpr char kChat[] = "/v1/chat/completions";
inline constexpr char kCompletions[] = "/v1/completions";

struct OpenAiReply {
  int status = 0;
  HttpReplyText raw;
  Json body;  // null when it is not JSON

  // error.param, "" for null.
  std::string Param() const;
  std::string Code() const;
};

// A stream as a client sees it. `problem` tells what breaks the framing rules, "" when nothing does.
struct OpenAiStream {
  int status = 0;
  HttpReplyText head;
  Json error;                // of a reply that is no stream
  std::vector<Json> chunks;  // without [DONE]
  bool done = false;         // [DONE] was the last event
  std::string problem;

  // The deltas of a choice, joined.
  std::string Text(int choice = 0) const;
  std::string Reasoning(int choice = 0) const;
  std::string FinishReason(int choice = 0) const;
  // index -> {"id","name","arguments"}
  std::vector<Json> ToolCalls(int choice = 0) const;
};

// The HTTP front end over a mock engine whose tokens the test chooses, with the shipped model's tokenizer, on a real
// socket.
class OpenAiServer {
 public:
  struct Options {
    MockEngine::Options engine;  // with a script of its own, Force has no effect
    bool vendor_strict = false;
    bool serving = true;  // false: the model is still loading
    HttpServerOptions http;
    std::vector<std::string> names = {"tiny-k3", "org/alias"};
    std::string default_effort;
    std::optional<Clock::duration> request_timeout;
    std::optional<Clock::duration> queue_timeout;
    std::string api_key_file;
    bool grammars =
        true;  // false: a build without structured output. Grammars compile, but the mock follows its script
  };

  explicit OpenAiServer(Options options);
  OpenAiServer() : OpenAiServer(Options()) {}
  ~OpenAiServer();

  // All choices of later requests generate these tokens, then the end of the message.
  void Force(std::vector<int32_t> tokens);
  // The same for text; see Tokens.
  void ForceText(const std::string& text, size_t bytes = 0) { Force(Tokens(text, bytes)); }
  // Later requests never end by themselves.
  void ForceEndless(int32_t token);

  // Ids of a reply. ⟨tag⟩ and ⟨/tag⟩ stand for markers of the K3 format; between them text is cut into tokens of
  // `bytes` bytes, or by the tokenizer when 0.
  std::vector<int32_t> Tokens(const std::string& text, size_t bytes = 0) const;
  // The token that is just this byte.
  int32_t ByteToken(uint8_t byte) const;

  OpenAiReply Post(std::string_view path, const Json& body, std::string_view headers = "");
  OpenAiReply PostText(std::string_view path, std::string_view body, std::string_view headers = "");
  OpenAiReply Get(std::string_view path);
  OpenAiStream Stream(std::string_view path, Json body, std::string_view headers = "");

  uint16_t port() const { return http_->port(); }
  MockEngine& engine() { return *engine_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  GenerationService& service() { return *service_; }
  ServerHealth& health() { return health_; }
  HttpServer& http() { return *http_; }
  Metrics& metrics() { return metrics_; }
  void Install();
  // The engine is idle and all requests have ended, within two seconds.
  bool NothingLeaked();

 private:
  struct Script {
    std::mutex mutex;
    std::vector<int32_t> tokens;
    bool endless = false;
  };

  Options options_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  ApiKeys keys_;
  std::unique_ptr<MockEngine> engine_;
  ServerHealth health_;
  Metrics metrics_;
  std::unique_ptr<GenerationService> service_;
  std::unique_ptr<OpenAiGateway> gateway_;
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<HttpServer> http_;
};

// One user message "Hi" and these members besides.
Json ChatBody(Json members = Json::object());

}  // namespace k3::testing
