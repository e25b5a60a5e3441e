#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "server/text/json_parser.h"
#include "tests/testing/openai_server.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

using namespace std::chrono_literals;
using testing::ChatBody;
using testing::HttpClient;
using testing::Json;
using testing::kChat;
using testing::OpenAiReply;
using testing::OpenAiServer;

TEST(OpenAiRoutesTest, UnknownRoutesAndMethods) {
  OpenAiServer server;
  HttpClient client(server.port());
  for (const char* path :
       {"/", "/v1", "/v2/models", "/v1/chat/completions/", "/v1/embeddings", "/v1/modelsx", "/%00"}) {
    for (const char* method : {"GET", "POST", "DELETE"}) {
      const auto reply = client.Call(method, path, std::string(method) == "POST" ? "{}" : "");
      ASSERT_TRUE(reply) << path;
      EXPECT_EQ(reply->status, 404) << path;
      EXPECT_EQ(reply->Header("content-type"), "application/json");
      EXPECT_EQ(Json::parse(reply->body)["error"]["type"], "invalid_request_error");
    }
  }
  for (const char* path : {"/v1/responses", "/v1/messages"}) {
    const OpenAiReply reply = server.Post(path, Json::object());
    EXPECT_EQ(reply.status, 404);
    EXPECT_NE(reply.body["error"]["message"].get<std::string>().find("/v1/chat/completions"), std::string::npos);
  }
  const std::pair<const char*, const char*> wrong[] = {
      {"GET", kChat},       {"PUT", kChat},         {"HEAD", kChat},
      {"GET", "/tokenize"}, {"POST", "/v1/models"}, {"DELETE", "/v1/models/tiny-k3"},
      {"POST", "/health"},  {"POST", "/metrics"},   {"PATCH", "/v1/completions"}};
  for (const auto& [method, path] : wrong) {
    const auto reply = client.Call(method, path);
    ASSERT_TRUE(reply) << method << path;
    EXPECT_EQ(reply->status, 405) << method << path;
    EXPECT_NE(reply->Header("allow"), "");
    if (std::string(method) != "HEAD") {
      EXPECT_EQ(Json::parse(reply->body)["error"]["code"], "method_not_allowed");
    }
  }
  const auto options = client.Call("OPTIONS", kChat);
  ASSERT_TRUE(options);
  EXPECT_EQ(options->status, 204);
  EXPECT_EQ(options->Header("allow"), "POST, OPTIONS");
  EXPECT_EQ(options->Header("access-control-allow-origin"), "") << "no cross-origin access by default";
  const auto head = client.Call("HEAD", "/v1/models");
  ASSERT_TRUE(head);
  EXPECT_EQ(head->status, 200);
  EXPECT_EQ(client.Call("GET", "/v1/models")->body.size(), std::stoul(head->Header("content-length")));
}

TEST(OpenAiRoutesTest, EncodedBodiesAreRefused) {
  OpenAiServer server;
  server.Force({100});
  const Json body = {{"prompt", "a"}, {"max_tokens", 1}};
  const OpenAiReply reply = server.Post("/v1/completions", body, "Content-Encoding: gzip\r\n");
  EXPECT_EQ(reply.status, 415);
  EXPECT_EQ(reply.Code(), "unsupported_encoding");
  EXPECT_EQ(server.Post("/v1/completions", body, "Content-Encoding: identity\r\n").status, 200);
}

TEST(OpenAiRoutesTest, Models) {
  OpenAiServer server;
  const OpenAiReply list = server.Get("/v1/models");
  ASSERT_EQ(list.status, 200);
  EXPECT_EQ(list.body["object"], "list");
  ASSERT_EQ(list.body["data"].size(), 2u);
  const Json expected = Json::parse(R"({"id":"org/alias","object":"model","created":1700000000,"owned_by":"k3serve",
                                        "root":"tiny-k3","parent":null,"max_model_len":1048576})");
  EXPECT_EQ(list.body["data"][1], expected);
  EXPECT_EQ(server.Get("/v1/models/org/alias").body, expected);
  EXPECT_EQ(server.Get("/v1/models/org%2Falias").body, expected);
  EXPECT_EQ(server.Get("/v1/models/tiny-k3?x=1").body["id"], "tiny-k3");
  const OpenAiReply unknown = server.Get("/v1/models/org");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.Code(), "model_not_found");
}

// A client library repeats a 5xx unless it is told not to.
TEST(OpenAiRoutesTest, WhatHttpItselfDoesNotOfferIsNotRetried) {
  OpenAiServer server;
  for (const auto& [head, status] :
       {std::pair("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip", 501),
        std::pair("GET /v1/models HTTP/3.0\r\nHost: x", 505)}) {
    HttpClient client(server.port());
    client.Send(std::string(head) + "\r\n\r\n");
    const auto reply = client.ReadReply();
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->status, status);
    EXPECT_EQ(reply->Header("x-should-retry"), "false");
    EXPECT_EQ(Json::parse(reply->body)["error"]["type"], "invalid_request_error");
  }
}

TEST(OpenAiRoutesTest, TokenizeAndBack) {
  OpenAiServer server;
  const std::string text = "Hello, 世界 😀 <|open|>";
  const std::vector<int32_t> ids = server.tokenizer().Encode(text).value();
  const OpenAiReply reply =
      server.Post("/tokenize", {{"model", "tiny-k3"}, {"prompt", text}, {"add_special_tokens", false}});
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  EXPECT_EQ(reply.body["token_ids"], Json(ids));
  EXPECT_EQ(reply.body["tokens"], Json(ids));
  EXPECT_EQ(reply.body["count"], ids.size());
  EXPECT_EQ(server.Post("/detokenize", {{"token_ids", ids}}).body["text"], text);
  EXPECT_EQ(server.Post("/detokenize", {{"tokens", ids}}).body["prompt"], text);
  const OpenAiReply control = server.Post("/tokenize", {{"prompt", "<|open|>"}, {"control_tokens", true}});
  EXPECT_EQ(control.body["token_ids"], Json({3843}));
  EXPECT_EQ(server.Post("/detokenize", {{"token_ids", {3843, 72}}, {"skip_control_tokens", true}}).body["text"], "H");
  EXPECT_EQ(server.Post("/tokenize", {{"prompt", ""}}).body["count"], 0);
  EXPECT_EQ(server.Post("/tokenize", ChatBody()).body["token_ids"],
            server.Post("/render", ChatBody()).body["token_ids"]);
  EXPECT_EQ(server.Post("/tokenize", Json::object()).Param(), "prompt");
  EXPECT_EQ(server.Post("/tokenize", {{"prompt", 5}}).Param(), "prompt");
  EXPECT_EQ(server.Post("/tokenize", {{"prompt", "a"}, {"model", "no"}}).status, 404);
  EXPECT_EQ(server.Post("/detokenize", Json::object()).status, 400);
  EXPECT_EQ(server.Post("/detokenize", {{"tokens", {1, "a"}}}).Param(), "tokens[1]");
  EXPECT_EQ(server.Post("/detokenize", {{"tokens", {4096}}}).status, 400);
  // A large text is encoded on another thread.
  std::string large;
  for (int i = 0; i < 50000; ++i) large += "word ";
  EXPECT_EQ(server.Post("/tokenize", {{"prompt", large}}).body["count"],
            server.tokenizer().Encode(large).value().size());
  const OpenAiReply info = server.Get("/tokenizer_info");
  EXPECT_EQ(info.body["vocab_size"], 4096);
  EXPECT_EQ(info.body["eos_token"], "<|end_of_msg|>");
  EXPECT_EQ(info.body["bos_token"], "[BOS]");
}

TEST(OpenAiRoutesTest, RenderGivesTheGoldenIds) {
  OpenAiServer server(OpenAiServer::Options{.engine = {},
                                            .vendor_strict = false,
                                            .serving = true,
                                            .http = {},
                                            .names = {"m"},
                                            .default_effort = "none",
                                            .request_timeout = {},
                                            .queue_timeout = {},
                                            .api_key_file = ""});
  std::ifstream file(testing::DataFile("chat.json"));
  const Json golden = Json::parse(file);
  int cases = 0;
  for (const Json& item : golden["cases"]) {
    Json body = {{"messages", item["messages"]}};
    const Json& options = item["options"];
    Json arguments = Json::object();
    for (const auto& [key, value] : options.items()) {
      if (key == "thinking" || key == "thinking_effort") {
        arguments[key] = value;
      } else {
        body[key] = value;
      }
    }
    body["chat_template_kwargs"] = arguments;
    const OpenAiReply reply = server.Post("/render", body);
    ASSERT_EQ(reply.status, 200) << item["name"] << reply.raw.body;
    EXPECT_EQ(reply.body["token_ids"], item["ids_tiny"]) << item["name"];
    EXPECT_EQ(reply.body["count"], item["ids_tiny"].size());
    EXPECT_EQ(reply.body.size(), 2u);
    ++cases;
  }
  EXPECT_GE(cases, 30);
}

TEST(OpenAiRoutesTest, ARunUsesTheRenderedIds) {
  OpenAiServer server;
  server.ForceText("x");
  Json body = ChatBody(
      {{"reasoning_effort", "low"}, {"tools", Json::parse(R"([{"type":"function","function":{"name":"f"}}])")}});
  ASSERT_EQ(server.Post(kChat, body).status, 200);
  EXPECT_EQ(server.Post("/render", body).body["token_ids"], Json(server.engine().LastRequest().prompt_tokens));
}

TEST(OpenAiRoutesTest, ApiKeys) {
  const std::string path = ::testing::TempDir() + "/k3_http_keys";
  std::ofstream(path) << "secret-1\n";
  OpenAiServer::Options options;
  options.api_key_file = path;
  OpenAiServer server(options);
  server.ForceText("x");
  std::remove(path.c_str());
  for (const char* open : {"/health", "/health/live", "/health/ready", "/version", "/metrics", "/openapi.json"}) {
    EXPECT_EQ(server.Get(open).status, 200) << open;
  }
  EXPECT_EQ(server.Get("/v1/models").status, 401);
  const OpenAiReply refused = server.Post(kChat, ChatBody(), "Authorization: Bearer wrong\r\n");
  EXPECT_EQ(refused.status, 401);
  EXPECT_EQ(refused.body["error"]["type"], "authentication_error");
  EXPECT_EQ(server.Post(kChat, ChatBody(), "Authorization: Bearer secret-1\r\n").status, 200);
}

TEST(OpenAiRoutesTest, RequestIds) {
  OpenAiServer server;
  server.ForceText("x");
  EXPECT_EQ(server.Post(kChat, ChatBody(), "X-Request-Id: abc-123\r\n").raw.Header("x-request-id"), "abc-123");
  const std::string made = server.Post(kChat, ChatBody()).raw.Header("x-request-id");
  EXPECT_EQ(made.size(), 4u + 24u);
  EXPECT_EQ(server.Post(kChat, ChatBody(), "X-Request-Id: " + std::string(200, 'x') + "\r\n")
                .raw.Header("x-request-id")
                .size(),
            made.size());
  EXPECT_EQ(server.Post(kChat, ChatBody({{"n", 0}}), "X-Request-Id: bad-one\r\n").raw.Header("x-request-id"),
            "bad-one");
}

TEST(OpenAiRoutesTest, HealthVersionMetricsAndDescription) {
  OpenAiServer server;
  server.ForceText("x");
  EXPECT_EQ(server.Get("/health").status, 200);
  EXPECT_EQ(server.Get("/health/live").status, 200);
  EXPECT_EQ(server.Get("/health/ready").status, 200);
  EXPECT_TRUE(server.Get("/version").body.contains("version"));
  ASSERT_EQ(server.Post(kChat, ChatBody()).status, 200);
  const OpenAiReply metrics = server.Get("/metrics");
  EXPECT_EQ(metrics.status, 200);
  EXPECT_TRUE(metrics.raw.Header("content-type").starts_with("text/plain; version=0.0.4"));
  EXPECT_NE(metrics.raw.body.find("k3serve_requests_finished_total"), std::string::npos);
  const OpenAiReply description = server.Get("/openapi.json");
  EXPECT_EQ(description.body["openapi"], "3.1.0");
  for (const char* path : {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{id}", "/tokenize",
                           "/detokenize", "/tokenizer_info", "/render", "/health/live", "/health/ready", "/health",
                           "/metrics", "/version", "/openapi.json"}) {
    EXPECT_TRUE(description.body["paths"].contains(path)) << path;
  }
}

// B48
TEST(OpenAiRoutesTest, WhileTheModelLoads) {
  OpenAiServer::Options options;
  options.serving = false;
  OpenAiServer server(options);
  EXPECT_EQ(server.Get("/health/live").status, 200);
  EXPECT_EQ(server.Get("/health").status, 503);
  const OpenAiReply ready = server.Get("/health/ready");
  EXPECT_EQ(ready.status, 503);
  EXPECT_NE(ready.raw.Header("retry-after"), "");
  EXPECT_EQ(server.Get("/v1/models").status, 503);
  for (const char* path : {kChat, "/tokenize", "/render"}) {
    Json body = ChatBody({{"prompt", "a"}});
    const OpenAiReply reply = server.Post(path, body);
    EXPECT_EQ(reply.status, 503) << path << reply.raw.body;
    EXPECT_NE(reply.raw.Header("retry-after"), "") << path;
    EXPECT_EQ(reply.body["error"]["type"], "server_error");
  }
  EXPECT_EQ(server.Post(kChat, {{"messages", Json::array()}}).status, 400) << "shape first";
  server.Install();
  EXPECT_EQ(server.Get("/health").status, 200);
  server.ForceText("x");
  EXPECT_EQ(server.Post(kChat, ChatBody()).status, 200);
}

// The HTTP side of B45.
TEST(OpenAiRoutesTest, DrainRefusesNewWorkAndFinishesTheRest) {
  OpenAiServer server;
  server.ForceEndless(server.Tokens("x")[0]);
  HttpClient running(server.port());
  running.SendRequest("POST", kChat, ChatBody({{"stream", true}, {"max_tokens", 100000}}).dump());
  ASSERT_TRUE(running.ReadHead());
  server.health().StartDrain(0s);
  EXPECT_EQ(server.Get("/health/live").status, 200);
  EXPECT_EQ(server.Get("/health/ready").status, 503);
  const OpenAiReply refused = server.Post(kChat, ChatBody());
  EXPECT_EQ(refused.status, 503);
  EXPECT_NE(refused.raw.Header("retry-after"), "");
  server.service().AbortAll(absl::UnavailableError("the server is shutting down"));
  std::string last;
  std::string before;
  while (const auto event = running.ReadEvent()) {
    before = last;
    last = *event;
  }
  EXPECT_EQ(last, "[DONE]");
  EXPECT_EQ(Json::parse(before)["error"]["type"], "server_error");
}

TEST(OpenAiRoutesTest, AFullQueueIs429WithRetryAfter) {
  OpenAiServer::Options options;
  options.engine.limits.max_queue = 2;
  options.engine.limits.max_num_seqs = 1;
  options.engine.step_time = 1ms;
  OpenAiServer server(options);
  server.ForceEndless(server.Tokens("x")[0]);
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<HttpClient>(server.port()));
    clients.back()->SendRequest("POST", kChat, ChatBody({{"stream", true}}).dump());
    if (i == 0) {
      ASSERT_TRUE(clients[0]->ReadHead());
    }
  }
  for (int i = 0; i < 200 && server.engine().Load().waiting < 2; ++i) std::this_thread::sleep_for(5ms);
  const OpenAiReply reply = server.Post(kChat, ChatBody());
  EXPECT_EQ(reply.status, 429);
  EXPECT_EQ(reply.body["error"]["type"], "rate_limit_error");
  const int retry_after = std::stoi(reply.raw.Header("retry-after"));
  EXPECT_GE(retry_after, 1);
  EXPECT_LE(retry_after, 120);
  clients.clear();
  EXPECT_TRUE(server.NothingLeaked());
}

TEST(OpenAiRoutesTest, ARequestTimeOutIs504OrAnErrorEvent) {
  OpenAiServer::Options options;
  options.request_timeout = 200ms;
  options.engine.step_time = 5ms;
  OpenAiServer server(options);
  server.ForceEndless(server.Tokens("x")[0]);
  const OpenAiReply reply = server.Post(kChat, ChatBody());
  EXPECT_EQ(reply.status, 504);
  EXPECT_EQ(reply.body["error"]["type"], "timeout");
  const testing::OpenAiStream stream = server.Stream(kChat, ChatBody());
  EXPECT_EQ(stream.status, 200);
  EXPECT_EQ(stream.problem, "");
  EXPECT_EQ(stream.chunks.back()["error"]["type"], "timeout");
}

TEST(OpenAiRoutesTest, LargeBodies) {
  OpenAiServer::Options options;
  options.http.max_body_bytes = 1 << 20;
  OpenAiServer server(options);
  server.ForceText("x");
  const OpenAiReply large = server.PostText(kChat, std::string(2 << 20, ' '));
  EXPECT_EQ(large.status, 413);
  EXPECT_EQ(large.body["error"]["type"], "invalid_request_error");
  std::string text;
  for (int i = 0; i < 100000; ++i) text += "word ";
  const OpenAiReply reply = server.Post(kChat, {{"messages", Json::array({{{"role", "user"}, {"content", text}}})}});
  EXPECT_EQ(reply.status, 200) << reply.raw.body.substr(0, 200);
  EXPECT_GT(reply.body["usage"]["prompt_tokens"], 90000);
}

}  // namespace
}  // namespace k3
