#include "tests/testing/openai_server.h"

#include <chrono>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "server/text/utf8.h"
#include "tests/testing/paths.h"

namespace k3::testing {
namespace {

constexpr int32_t kEndOfMessage = 3842;

std::string TextOr(const Json& value) { return value.is_string() ? value.get<std::string>() : ""; }

Json ParseOrNull(const std::string& text) { return Json::parse(text, nullptr, /*allow_exceptions=*/false); }

// Takes every grammar and restricts nothing.
class LenientGrammars final : public GrammarEngine {
 public:
  absl::StatusOr<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarNode&,
                                                                 std::chrono::milliseconds) const override {
    return std::make_shared<Grammar>();
  }

 private:
  class Constraint final : public TokenConstraint {
   public:
    bool FillMask(std::span<uint32_t>) override { return false; }
    bool Accept(int32_t) override { return true; }
    std::unique_ptr<TokenConstraint> Fork() const override { return std::make_unique<Constraint>(); }
  };
  class Grammar final : public CompiledGrammar {
   public:
    std::unique_ptr<TokenConstraint> NewConstraint(const std::string&) const override {
      return std::make_unique<Constraint>();
    }
    size_t bytes() const override { return 0; }
  };
};

}  // namespace

std::string OpenAiReply::Param() const { return body.contains("error") ? TextOr(body["error"]["param"]) : "?"; }
std::string OpenAiReply::Code() const { return body.contains("error") ? TextOr(body["error"]["code"]) : "?"; }

std::string OpenAiStream::Text(int choice) const {
  std::string text;
  for (const Json& chunk : chunks) {
    for (const Json& item : chunk["choices"]) {
      if (item["index"] != choice) continue;
      if (item.contains("text")) {
        text += item["text"].get<std::string>();
      } else if (item["delta"].contains("content")) {
        text += item["delta"]["content"].get<std::string>();
      }
    }
  }
  return text;
}

std::string OpenAiStream::Reasoning(int choice) const {
  std::string text;
  for (const Json& chunk : chunks) {
    for (const Json& item : chunk["choices"]) {
      if (item["index"] == choice && item["delta"].contains("reasoning_content")) {
        text += item["delta"]["reasoning_content"].get<std::string>();
      }
    }
  }
  return text;
}

std::string OpenAiStream::FinishReason(int choice) const {
  std::string reason;
  for (const Json& chunk : chunks) {
    for (const Json& item : chunk["choices"]) {
      if (item["index"] == choice && item["finish_reason"].is_string()) reason += item["finish_reason"];
    }
  }
  return reason;
}

std::vector<Json> OpenAiStream::ToolCalls(int choice) const {
  std::vector<Json> calls;
  for (const Json& chunk : chunks) {
    for (const Json& item : chunk["choices"]) {
      if (item["index"] != choice || !item["delta"].contains("tool_calls")) continue;
      for (const Json& call : item["delta"]["tool_calls"]) {
        const size_t index = call["index"];
        if (index == calls.size()) {
          calls.push_back({{"id", call["id"]}, {"name", call["function"]["name"]}, {"arguments", ""}});
        }
        calls.at(index)["arguments"] =
            calls[index]["arguments"].get<std::string>() + call["function"]["arguments"].get<std::string>();
      }
    }
  }
  return calls;
}

OpenAiServer::OpenAiServer(Options options)
    : options_(std::move(options)),
      tokenizer_(Tokenizer::Load(TinyK3()).value()),
      metrics_({.version = "test", .commit = "test", .model_name = "tiny-k3"}) {
  options_.engine.eos_token_ids = {kEndOfMessage};
  if (!options_.engine.script) {
    options_.engine.script = [script = script_](const Request&, int32_t, int32_t position) {
      std::lock_guard lock(script->mutex);
      const auto index = static_cast<size_t>(position);
      if (script->endless) return script->tokens[index % script->tokens.size()];
      return index < script->tokens.size() ? script->tokens[index] : kEndOfMessage;
    };
  }
  if (!options_.api_key_file.empty()) keys_ = ApiKeys::Load(options_.api_key_file).value();
  engine_ = std::make_unique<MockEngine>(options_.engine);
  GenerationService::Options service;
  service.default_effort = options_.default_effort;
  service.request_timeout = options_.request_timeout;
  service.queue_timeout = options_.queue_timeout;
  service.vendor_strict = options_.vendor_strict;
  service_ = std::make_unique<GenerationService>(service, &health_, &metrics_);
  gateway_ = std::make_unique<OpenAiGateway>(OpenAiOptions{.vendor_strict = options_.vendor_strict}, service_.get(),
                                             &health_, &metrics_, &keys_);
  workers_ = std::make_unique<WorkerPool>(2);
  options_.http.port = 0;
  http_ = HttpServer::Start(options_.http, *gateway_, [this](std::function<void()> task) {
            workers_->Post(std::move(task));
          }).value();
  if (options_.serving) Install();
}

OpenAiServer::~OpenAiServer() {
  http_->Stop(Clock::duration::zero());
  metrics_.WatchEngine(nullptr, {});
  http_.reset();
  workers_.reset();
  engine_.reset();  // before the service: its last events still reach streams that belong there
  service_.reset();
}

void OpenAiServer::Install() {
  auto model = std::make_shared<ServedModel>();
  model->names = options_.names;
  model->root = "tiny-k3";
  model->created = 1700000000;
  model->weights_version = "abc123";
  model->device = "cpu";
  model->tokenizer = tokenizer_;
  model->renderer = std::make_shared<const ChatRenderer>(tokenizer_);
  model->eos_token_ids = {kEndOfMessage};
  model->engine = engine_.get();
  if (options_.grammars) {
    model->grammars = std::make_shared<GrammarPool>(GrammarPool::Options(), std::make_unique<LenientGrammars>());
  }
  service_->Install(model);
  metrics_.WatchEngine([engine = engine_.get()] { return engine->Load(); }, engine_->Limits());
  health_.SetServing();
}

void OpenAiServer::Force(std::vector<int32_t> tokens) {
  std::lock_guard lock(script_->mutex);
  script_->tokens = std::move(tokens);
  script_->endless = false;
}

void OpenAiServer::ForceEndless(int32_t token) {
  std::lock_guard lock(script_->mutex);
  script_->tokens = {token};
  script_->endless = true;
}

std::vector<int32_t> OpenAiServer::Tokens(const std::string& text, size_t bytes) const {
  static const std::pair<std::string, std::string> kMarkers[] = {
      {"⟨/", "<|close|>"}, {"⟨", "<|open|>"}, {"⟩", "<|sep|>"}};
  std::vector<int32_t> ids;
  std::string plain;
  const auto flush = [&] {
    const size_t step = bytes == 0 ? std::max<size_t>(plain.size(), 1) : bytes;
    for (size_t at = 0; at < plain.size(); at += step) tokenizer_->EncodeBytes(plain.substr(at, step), &ids);
    plain.clear();
  };
  for (size_t at = 0; at < text.size();) {
    bool marker = false;
    for (const auto& [spelling, name] : kMarkers) {
      if (marker || text.compare(at, spelling.size(), spelling) != 0) continue;
      flush();
      ids.push_back(tokenizer_->SpecialId(name).value());
      at += spelling.size();
      marker = true;
    }
    if (!marker) plain.push_back(text[at++]);
  }
  flush();
  return ids;
}

int32_t OpenAiServer::ByteToken(uint8_t byte) const {
  for (int32_t id = 0; id < tokenizer_->num_ranks(); ++id) {
    const std::string_view bytes = tokenizer_->TokenBytes(id);
    if (bytes.size() == 1 && static_cast<uint8_t>(bytes[0]) == byte) return id;
  }
  throw std::logic_error("no token is this byte alone");
}

OpenAiReply OpenAiServer::Post(std::string_view path, const Json& body, std::string_view headers) {
  return PostText(path, body.dump(), headers);
}

OpenAiReply OpenAiServer::PostText(std::string_view path, std::string_view body, std::string_view headers) {
  HttpClient client(port());
  OpenAiReply reply;
  auto raw = client.Call("POST", path, body, headers);
  if (!raw) return reply;
  reply.raw = *std::move(raw);
  reply.status = reply.raw.status;
  reply.body = ParseOrNull(reply.raw.body);
  return reply;
}

OpenAiReply OpenAiServer::Get(std::string_view path) {
  HttpClient client(port());
  OpenAiReply reply;
  auto raw = client.Call("GET", path);
  if (!raw) return reply;
  reply.raw = *std::move(raw);
  reply.status = reply.raw.status;
  reply.body = ParseOrNull(reply.raw.body);
  return reply;
}

OpenAiStream OpenAiServer::Stream(std::string_view path, Json body, std::string_view headers) {
  body["stream"] = true;
  OpenAiStream stream;
  const auto problem = [&](const std::string& what) {
    if (stream.problem.empty()) stream.problem = what;
  };
  HttpClient client(port());
  client.SendRequest("POST", path, body.dump(), headers);
  const auto head = client.ReadHead();
  if (!head) {
    problem("no reply");
    return stream;
  }
  stream.head = *head;
  stream.status = head->status;
  if (head->status != 200) {
    if (head->Header("content-type") != "application/json") problem("an error that is not JSON");
    stream.error = ParseOrNull(client.ReadBody(*head).value_or(""));
    return stream;
  }
  if (head->Header("content-type") != "text/event-stream") problem("content type " + head->Header("content-type"));
  while (const auto event = client.ReadEvent()) {
    if (stream.done) problem("an event after [DONE]");
    if (event->find('\n') != std::string::npos) problem("an event of several lines");
    if (event->starts_with(":")) continue;
    if (*event == "[DONE]") {
      stream.done = true;
      continue;
    }
    if (!IsValidUtf8(*event)) problem("invalid UTF-8");
    Json chunk = ParseOrNull(*event);
    if (chunk.is_discarded()) {
      problem("not JSON: " + *event);
      continue;
    }
    stream.chunks.push_back(std::move(chunk));
  }
  if (!client.ended()) problem("the stream was cut off");
  if (client.event_was_split()) problem("an event was split over chunks");
  std::set<std::string> ids;
  for (const Json& chunk : stream.chunks) {
    if (chunk.contains("error")) continue;
    ids.insert(chunk["id"].get<std::string>() + chunk["model"].get<std::string>() + chunk["created"].dump());
    if (!chunk["choices"].is_array()) problem("no choices");
  }
  if (ids.size() > 1) problem("id, model or created change");
  return stream;
}

bool OpenAiServer::NothingLeaked() {
  for (int i = 0; i < 200; ++i) {
    const EngineLoad load = engine_->Load();
    if (load.running == 0 && load.waiting == 0 && load.pages_used == 0 && service_->active() == 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

Json ChatBody(Json members) {
  Json body = {{"messages", Json::array({{{"role", "user"}, {"content", "Hi"}}})}};
  body.update(members);
  return body;
}

}  // namespace k3::testing
