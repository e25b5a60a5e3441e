#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/openai_server.h"
#include "tests/testing/process_memory.h"
#include "tests/testing/slowdown.h"

namespace k3 {
namespace {

using namespace std::chrono_literals;
using testing::ChatBody;
using testing::HttpClient;
using testing::Json;
using testing::kChat;
using testing::kSlowdown;
using testing::OpenAiServer;

// B26
TEST(OpenAiDisconnectTest, ClosedStreamsFreeEverything) {
  OpenAiServer::Options options;
  options.engine.step_time = 500us;
  OpenAiServer server(options);
  server.ForceEndless(server.Tokens("x")[0]);
  const uint64_t before = server.engine().Load().generated_tokens;
  for (int i = 0; i < 500; ++i) {
    HttpClient client(server.port());
    client.SendRequest("POST", kChat, ChatBody({{"stream", true}, {"max_tokens", 200}}).dump());
    ASSERT_TRUE(client.ReadHead());
    ASSERT_TRUE(client.ReadEvent());
    if (i % 2 == 0) client.Reset();
  }
  EXPECT_TRUE(server.NothingLeaked());
  EXPECT_LT(server.engine().Load().generated_tokens - before, 500u * 20u);
  server.ForceText("ok");
  EXPECT_EQ(server.Post(kChat, ChatBody()).status, 200);
}

TEST(OpenAiDisconnectTest, ClosedDuringPrefillOrInTheQueue) {
  OpenAiServer::Options options;
  options.engine.step_time = 2ms;
  options.engine.prefill_chunk = 1;
  options.engine.limits.max_num_seqs = 50;
  OpenAiServer server(options);
  server.ForceEndless(server.Tokens("x")[0]);
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "w ";
  const Json body = {{"messages", Json::array({{{"role", "user"}, {"content", text}}})}, {"max_tokens", 200}};
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(std::make_unique<HttpClient>(server.port()));
    Json sent = body;
    sent["stream"] = i % 2 == 0;
    clients.back()->SendRequest("POST", kChat, sent.dump());
  }
  for (int i = 0; i < 1000; ++i) {
    const EngineLoad load = server.engine().Load();
    if (load.running == 50 && load.waiting == 50) break;
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_EQ(server.engine().Load().running, 50);
  EXPECT_EQ(server.engine().Load().waiting, 50);
  const auto start = std::chrono::steady_clock::now();
  clients.clear();
  EXPECT_TRUE(server.NothingLeaked());
  EXPECT_LT(std::chrono::steady_clock::now() - start, 500ms);
  EXPECT_EQ(server.engine().Load().generated_tokens, 0u);
}

// Half-closing is leaving: the rule that the server documents.
TEST(OpenAiDisconnectTest, HalfClosedStreamsAreCancelled) {
  OpenAiServer::Options options;
  options.engine.step_time = 500us;
  OpenAiServer server(options);
  server.ForceEndless(server.Tokens("x")[0]);
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(std::make_unique<HttpClient>(server.port()));
    clients.back()->SendRequest("POST", kChat, ChatBody({{"stream", true}}).dump());
    ASSERT_TRUE(clients.back()->ReadHead());
    clients.back()->HalfClose();
  }
  EXPECT_TRUE(server.NothingLeaked());
}

// A stop string is found although nobody reads the stream.
TEST(OpenAiDisconnectTest, AStopStringEndsTheRunOfASlowReader) {
  constexpr uint64_t kChoices = 100;
  constexpr uint64_t kBefore = 1500;
  OpenAiServer server;
  std::vector<int32_t> tokens = server.Tokens("⟨/think⟩⟨response⟩");
  for (uint64_t i = 0; i < kBefore; ++i) tokens.push_back(static_cast<int32_t>(i % 200 + 1000));
  server.tokenizer().EncodeBytes("STOP", &tokens);
  for (uint64_t i = 0; i < 20 * kBefore; ++i) tokens.push_back(1000);
  server.Force(tokens);
  HttpClient slow(server.port(), 4096);
  slow.SendRequest("POST", kChat,
                   ChatBody({{"stream", true}, {"stop", "STOP"}, {"logprobs", true}, {"n", kChoices}}).dump());
  for (int i = 0; i < 12000 && (server.engine().Load().steps == 0 || server.engine().Load().running > 0); ++i) {
    std::this_thread::sleep_for(5ms);
  }
  const EngineLoad load = server.engine().Load();
  EXPECT_EQ(load.running, 0);
  EXPECT_GE(load.generated_tokens, kChoices * kBefore);
  EXPECT_LT(load.generated_tokens, kChoices * kBefore * 10) << "ended by the stop string, not by the script";
  ASSERT_TRUE(slow.ReadHead());
  std::string last;
  std::string finish;
  size_t bytes = 0;
  while (const auto event = slow.ReadEvent()) {
    finish = last;
    last = *event;
    bytes += last.size();
  }
  EXPECT_EQ(last, "[DONE]");
  EXPECT_EQ(Json::parse(finish)["choices"][0]["stop_reason"], "STOP");
  EXPECT_GT(bytes, 8u << 20) << "more than the kernel's buffers hold";
}

// The HTTP half of B43.
TEST(OpenAiDisconnectTest, StalledReadersAreCutOffAndNeverSlowOthers) {
  OpenAiServer::Options options;
  options.http.stall_limit = 1s;
  options.http.sweep_interval = 50ms;
  options.engine.step_time = 200us;
  OpenAiServer server(options);
  server.ForceEndless(server.Tokens("x")[0]);
  std::vector<std::unique_ptr<HttpClient>> stalled;
  for (int i = 0; i < 20; ++i) {
    stalled.push_back(std::make_unique<HttpClient>(server.port(), 4096));
    stalled.back()->SendRequest("POST", kChat,
                                ChatBody({{"stream", true}, {"logprobs", true}, {"max_tokens", 1000000}}).dump());
    ASSERT_TRUE(stalled.back()->ReadHead());
  }
  HttpClient normal(server.port());
  normal.SendRequest("POST", kChat, ChatBody({{"stream", true}, {"max_tokens", 2000}}).dump());
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(normal.ReadHead());
  while (normal.ReadEvent()) {
  }
  EXPECT_TRUE(normal.ended());
  EXPECT_LT(std::chrono::steady_clock::now() - start, 60s * kSlowdown);
  for (int i = 0; i < 12000 * kSlowdown && server.engine().Load().running > 0; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_TRUE(server.NothingLeaked());
}

// B43 by HTTP: fifty readers that stop after one event of 10,000 tokens.
TEST(OpenAiDisconnectTest, FiftyStoppedReadersKeepTheirTextAndSlowNobody) {
  constexpr int kReaders = 50;
  constexpr int kTokens = 10'000;
  OpenAiServer::Options options;
  options.engine.step_time = 1ms;
  OpenAiServer server(options);
  server.ForceEndless(server.Tokens("x")[0]);
  const Json body = {{"prompt", {100}}, {"max_tokens", kTokens}, {"stream", true}};  // each token is an x
  const auto start = [&](int buffer) {
    std::vector<std::unique_ptr<HttpClient>> clients;
    for (int i = 0; i < kReaders; ++i) {
      clients.push_back(std::make_unique<HttpClient>(server.port(), buffer));
      clients.back()->set_timeout(120s * kSlowdown);
      clients.back()->SendRequest("POST", "/v1/completions", body.dump());
      EXPECT_TRUE(clients.back()->ReadHead());
    }
    return clients;
  };
  // The rest of a stream: how many tokens came.
  const auto rest = [](HttpClient& client) {
    size_t tokens = 0;
    while (const auto event = client.ReadEvent()) {
      if (*event == "[DONE]") continue;
      tokens += Json::parse(*event)["choices"][0]["text"].get<std::string>().size();
    }
    EXPECT_TRUE(client.ended());
    return tokens;
  };
  const auto normal_rate = [&] {
    const auto begin = std::chrono::steady_clock::now();
    const auto reply = server.Post("/v1/completions", {{"prompt", {100}}, {"max_tokens", 1000}});
    EXPECT_EQ(reply.status, 200);
    return 1000 / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  // Beside as many that read.
  const auto fast_rate = [&] {
    const auto clients = start(0);
    std::vector<std::thread> readers;
    for (const auto& client : clients) {
      readers.emplace_back([&] { EXPECT_EQ(rest(*client), static_cast<size_t>(kTokens)); });
    }
    const double rate = normal_rate();
    for (std::thread& reader : readers) reader.join();
    return rate;
  };
  double fast = fast_rate();
  ASSERT_TRUE(server.NothingLeaked());
  const double before = testing::ResidentMegabytes();
  const auto stopped = start(4096);
  std::vector<size_t> first(stopped.size());
  for (size_t i = 0; i < stopped.size(); ++i) {
    const auto event = stopped[i]->ReadEvent();
    ASSERT_TRUE(event);
    first[i] = Json::parse(*event)["choices"][0]["text"].get<std::string>().size();
  }
  double slow = 0;  // the best of several: other work of the machine may slow one
  for (int i = 0; i < 10 && slow < 0.8 * fast; ++i) slow = std::max(slow, normal_rate());
  const auto until = std::chrono::steady_clock::now() + 120s * kSlowdown;
  while (server.engine().Load().running > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(server.engine().Load().running, 0);
  EXPECT_LT(testing::ResidentMegabytes() - before, 64);
  for (size_t i = 0; i < stopped.size(); ++i) EXPECT_EQ(first[i] + rest(*stopped[i]), static_cast<size_t>(kTokens));
  EXPECT_TRUE(server.NothingLeaked());
  // The machine may have been busier than before: then the reading ones would be slower now, too.
  for (int i = 0; i < 5 && slow < 0.8 * fast; ++i) fast = std::min(fast, fast_rate());
  EXPECT_GE(slow, 0.8 * fast);
}

TEST(OpenAiDisconnectTest, ManyRequestsLeaveNothing) {
  OpenAiServer server;
  server.ForceText("a⟨/think⟩⟨response⟩b⟨/response⟩⟨/message⟩");
  HttpClient client(server.port());
  for (int i = 0; i < 1000; ++i) {
    const bool stream = i % 2 == 0;
    client.SendRequest("POST", kChat, ChatBody({{"stream", stream}, {"max_tokens", 2}}).dump());
    auto reply = client.ReadReply();
    ASSERT_TRUE(reply) << i;
    ASSERT_EQ(reply->status, 200);
  }
  EXPECT_TRUE(server.NothingLeaked());
  EXPECT_EQ(server.http().connections(), 1);
}

}  // namespace
}  // namespace k3
