#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <future>
#include <set>
#include <thread>

#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "server/grpc_server.h"
#include "tests/testing/grpc_harness.h"
#include "tests/testing/process_memory.h"
#include "tests/testing/prometheus_text.h"

namespace k3 {
namespace {

namespace pb = k3serve::inference::v1;
using testing::DetailOf;
using testing::GrpcHarness;
using ::testing::HasSubstr;
using testing::MockService;
using testing::Reply;
using testing::Stream;
using testing::TokenSpec;
using namespace std::chrono_literals;

TEST(GrpcLoadTest, AFullQueuePushesBack) {
  MockService::Options options;
  options.engine.manual = true;
  options.engine.limits.max_queue = 1;
  GrpcHarness harness(options);
  grpc::ClientContext waiting;
  pb::StreamGenerateRequest request;
  *request.mutable_spec() = TokenSpec(3, 5);
  const auto held = harness.generation->StreamGenerate(&waiting, request);
  while (harness.engine().Load().waiting == 0) std::this_thread::sleep_for(1ms);
  const Reply reply = Stream(*harness.generation, TokenSpec(3, 5));
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(DetailOf<google::rpc::RetryInfo>(reply.status).has_value());
  EXPECT_TRUE(DetailOf<google::rpc::QuotaFailure>(reply.status).has_value());
  EXPECT_TRUE(reply.initial.empty());
  ASSERT_EQ(reply.trailing.count("grpc-retry-pushback-ms"), 1u);
  EXPECT_GT(std::stoi(reply.trailing.find("grpc-retry-pushback-ms")->second), 0);
  waiting.TryCancel();
  held->Finish();
}

// Cancelled while it waits, during the prompt, and while it generates: gone after one step.
TEST(GrpcLoadTest, CancelFreesEverythingWithinOneStep) {
  for (const int steps : {0, 2, 10}) {
    MockService::Options options;
    options.engine.manual = true;
    options.engine.prefill_chunk = 100;
    GrpcHarness harness(options);
    grpc::ClientContext context;
    pb::StreamGenerateRequest request;
    *request.mutable_spec() = TokenSpec(500, 1000);
    const auto reader = harness.generation->StreamGenerate(&context, request);
    while (harness.engine().Load().waiting == 0) std::this_thread::sleep_for(1ms);
    for (int i = 0; i < steps; ++i) harness.engine().Step();
    const uint64_t generated = harness.engine().Load().generated_tokens;
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
    // The server hears of it a moment later; then one step is enough.
    const auto until = Clock::now() + 5s;
    while (harness.engine().cancels() == 0 && Clock::now() < until) std::this_thread::sleep_for(1ms);
    harness.engine().Step();
    const EngineLoad load = harness.engine().Load();
    EXPECT_EQ(load.running + load.waiting, 0);
    EXPECT_EQ(load.pages_used, 0);
    EXPECT_EQ(load.state_slots_used, 0);
    EXPECT_EQ(load.generated_tokens, generated);
    // The engine has let go; the call itself ends when gRPC has taken its status.
    while (harness.service().generation.active() > 0 && Clock::now() < until) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(harness.service().generation.active(), 0u);
  }
}

// B26, short: clients that leave after the first event, and before it.
TEST(GrpcLoadTest, ClosedStreamsLeaveNothingBehind) {
  MockService::Options options;
  options.engine.step_time = 1ms;
  options.engine.prefill_chunk = 10;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  GrpcHarness harness(options);
  for (int i = 0; i < 100; ++i) {
    grpc::ClientContext context;
    pb::StreamGenerateRequest request;
    *request.mutable_spec() = TokenSpec(i % 2 == 0 ? 3 : 200, 200);
    const auto reader = harness.generation->StreamGenerate(&context, request);
    pb::StreamGenerateResponse response;
    if (i % 2 == 0) reader->Read(&response);
    context.TryCancel();
    reader->Finish();
  }
  EXPECT_TRUE(harness.Idle());
  EXPECT_LT(harness.engine().Load().generated_tokens, 100u * 20u);
  EXPECT_TRUE(Stream(*harness.generation, TokenSpec(3, 5)).status.ok());
}

// B44: what a deadline ends makes no further token, and its place is free within five steps.
TEST(GrpcLoadTest, ADeadlineStopsTheTokensWithinFiveSteps) {
  MockService::Options options;
  options.engine.manual = true;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  GrpcHarness harness(options);
  for (const int steps : {0, 3}) {  // in the queue, and while it generates
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 1s);
    pb::StreamGenerateRequest request;
    *request.mutable_spec() = TokenSpec(3, 100000);
    const auto reader = harness.generation->StreamGenerate(&context, request);
    const auto until = Clock::now() + 900ms;
    while (harness.engine().Load().waiting == 0 && Clock::now() < until) std::this_thread::sleep_for(1ms);
    for (int i = 0; i < steps; ++i) harness.engine().Step();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    std::this_thread::sleep_for(20ms);  // the server's clock, too, has passed it
    const uint64_t made = harness.engine().Load().generated_tokens;
    for (int i = 0; i < 5; ++i) harness.engine().Step();
    const EngineLoad load = harness.engine().Load();
    EXPECT_LE(load.generated_tokens, made + 5);
    EXPECT_EQ(load.running + load.waiting, 0);
    EXPECT_EQ(load.pages_used + load.state_slots_used, 0);
  }
  EXPECT_TRUE(harness.Idle());
}

// B44, short.
TEST(GrpcLoadTest, DeadlinesEndTheWork) {
  MockService::Options options;
  options.engine.step_time = 2ms;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  options.engine.limits.max_num_seqs = 4;
  GrpcHarness harness(options);
  std::vector<std::thread> clients;
  std::atomic<int> wrong{0};
  for (const auto deadline : {0ms, 1ms, 5ms, 50ms, 200ms}) {
    for (int i = 0; i < 8; ++i) {
      clients.emplace_back([&, deadline] {
        const Reply reply = Stream(*harness.generation, TokenSpec(3, 1000), [&](grpc::ClientContext& context) {
          context.set_deadline(std::chrono::system_clock::now() + deadline);
        });
        const auto code = reply.status.error_code();
        if (code != grpc::StatusCode::DEADLINE_EXCEEDED && code != grpc::StatusCode::RESOURCE_EXHAUSTED) ++wrong;
      });
    }
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(harness.Idle());
  const uint64_t generated = harness.engine().Load().generated_tokens;
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(harness.engine().Load().generated_tokens, generated);
  // Each accepted request ended as aborted: none finished by itself, and those refused were never counted.
  const auto page = testing::PrometheusText::Parse(harness.service().metrics.Render());
  ASSERT_TRUE(page.ok()) << page.status();
  double ended = 0;
  for (const char* reason : {"abort", "deadline"}) {
    const double value = page->Value("k3serve_requests_finished_total", {{"reason", reason}});
    if (!std::isnan(value)) ended += value;
  }
  EXPECT_GT(ended, 0);
  EXPECT_EQ(ended, page->Sum("k3serve_requests_finished_total"));
}

// B43, short: readers that stop. They are ended after the limit, others go on, and what they read later is in order.
TEST(GrpcLoadTest, SlowReadersAreBoundedAndEnded) {
  MockService::Options options;
  options.engine.script = [](const Request&, int32_t, int32_t position) { return 100 + position % 1000; };
  options.engine.step_time = 100us;
  GrpcServerOptions server;
  server.write_stall_limit = 500ms;
  GrpcHarness harness(options, server);
  struct Slow {
    std::shared_ptr<grpc::Channel> channel;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<pb::StreamGenerateResponse>> reader;
    std::vector<uint32_t> ids;
  };
  std::vector<std::unique_ptr<Slow>> slow;
  for (int i = 0; i < 5; ++i) {
    auto client = std::make_unique<Slow>();
    client->channel = harness.Connect(harness.server().port());
    pb::StreamGenerateRequest request;
    *request.mutable_spec() = TokenSpec(3, 200000);
    request.mutable_spec()->mutable_output()->set_token_ids(true);
    request.mutable_spec()->mutable_output()->set_top_logprobs(20);  // large messages fill the windows soon
    client->reader = pb::GenerationService::NewStub(client->channel)->StreamGenerate(&client->context, request);
    pb::StreamGenerateResponse response;
    EXPECT_TRUE(client->reader->Read(&response));
    slow.push_back(std::move(client));
  }
  for (int i = 0; i < 3; ++i) {
    const Reply reply = Stream(*harness.generation, TokenSpec(3, 300));
    ASSERT_TRUE(reply.status.ok());
    EXPECT_EQ(reply.events.back().usage().completion_tokens(), 300u);
  }
  ASSERT_TRUE(harness.Idle(20s));  // all of them cut off
  for (const auto& client : slow) {
    pb::StreamGenerateResponse response;
    while (client->reader->Read(&response)) {
      for (const uint32_t id : response.delta().token_ids()) client->ids.push_back(id);
    }
    const grpc::Status status = client->reader->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    EXPECT_EQ(DetailOf<google::rpc::ErrorInfo>(status)->reason(), "slow_reader");
    EXPECT_FALSE(client->ids.empty());
    for (size_t i = 0; i < client->ids.size(); ++i) ASSERT_EQ(client->ids[i], 100 + i % 1000);
  }
}

// B43: fifty readers that stop after one message of 10,000 tokens. They cost little memory and slow nobody, and when
// they go on they get everything in order.
TEST(GrpcLoadTest, FiftyStoppedReadersKeepTheirTextAndSlowNobody) {
  constexpr int kReaders = 50;
  constexpr uint32_t kTokens = 10'000;
  MockService::Options options;
  options.engine.script = [](const Request&, int32_t, int32_t position) { return 100 + position % 1000; };
  options.engine.step_time = 1ms;
  GrpcHarness harness(options);
  pb::GenerationSpec spec = TokenSpec(3, kTokens);
  spec.mutable_output()->set_token_ids(true);
  const auto normal_rate = [&] {
    const auto begin = Clock::now();
    const Reply reply = Stream(*harness.generation, TokenSpec(3, 1000));
    EXPECT_TRUE(reply.status.ok());
    return 1000 / std::chrono::duration<double>(Clock::now() - begin).count();
  };
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < kReaders; ++i) channels.push_back(harness.Connect(harness.server().port()));

  // Beside as many that read.
  const auto fast_rate = [&] {
    std::vector<std::future<void>> readers;
    for (const auto& channel : channels) {
      readers.push_back(std::async(std::launch::async, [&] {
        const auto stub = pb::GenerationService::NewStub(channel);
        grpc::ClientContext context;
        context.set_wait_for_ready(true);  // a busy machine may refuse the first attempt to connect
        pb::StreamGenerateRequest request;
        *request.mutable_spec() = spec;
        const auto reader = stub->StreamGenerate(&context, request);
        pb::StreamGenerateResponse response;
        while (reader->Read(&response)) {
        }
        const grpc::Status status = reader->Finish();
        EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
      }));
    }
    const double rate = normal_rate();
    for (auto& reader : readers) reader.get();
    return rate;
  };
  double fast = fast_rate();
  ASSERT_TRUE(harness.Idle());
  const double before = testing::ResidentMegabytes();

  struct Stopped {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<pb::StreamGenerateResponse>> reader;
    std::vector<uint32_t> ids;
    void Take(const pb::StreamGenerateResponse& response) {
      for (const uint32_t id : response.delta().token_ids()) ids.push_back(id);
    }
  };
  std::vector<std::unique_ptr<Stopped>> stopped;
  for (const auto& channel : channels) {
    auto client = std::make_unique<Stopped>();
    client->context.set_wait_for_ready(true);
    pb::StreamGenerateRequest request;
    *request.mutable_spec() = spec;
    client->reader = pb::GenerationService::NewStub(channel)->StreamGenerate(&client->context, request);
    pb::StreamGenerateResponse response;
    ASSERT_TRUE(client->reader->Read(&response));
    client->Take(response);
    stopped.push_back(std::move(client));
  }
  // Other work of the machine may slow one run, not the best of several.
  double slow = 0;
  for (int i = 0; i < 10 && slow < 0.8 * fast; ++i) slow = std::max(slow, normal_rate());
  const auto until = Clock::now() + 120s * testing::kSlowdown;
  while (harness.engine().Load().running > 0 && Clock::now() < until) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(harness.engine().Load().running, 0);  // the engine waits for no reader
  EXPECT_LT(testing::ResidentMegabytes() - before, 64);
  for (const auto& client : stopped) {
    pb::StreamGenerateResponse response;
    while (client->reader->Read(&response)) client->Take(response);
    EXPECT_TRUE(client->reader->Finish().ok());
    ASSERT_EQ(client->ids.size(), kTokens);
    for (size_t i = 0; i < client->ids.size(); ++i) ASSERT_EQ(client->ids[i], 100 + i % 1000);
  }
  EXPECT_TRUE(harness.Idle());
  // The machine may have been busier than before: then the reading ones would be slower now, too.
  for (int i = 0; i < 5 && slow < 0.8 * fast; ++i) fast = std::min(fast, fast_rate());
  EXPECT_GE(slow, 0.8 * fast);
}

TEST(GrpcLoadTest, ManyStreamsAtOnce) {
  MockService::Options options;
  options.engine.script = [](const Request&, int32_t, int32_t position) { return 100 + position % 1000; };
  GrpcHarness harness(options);
  std::vector<std::future<Reply>> replies;
  for (int i = 0; i < 64; ++i) {
    replies.push_back(std::async(std::launch::async, [&] {
      pb::GenerationSpec spec = TokenSpec(3, 200);
      spec.mutable_output()->set_token_ids(true);
      return Stream(*harness.generation, spec);
    }));
  }
  for (auto& future : replies) {
    const Reply reply = future.get();
    ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
    std::vector<uint32_t> ids;
    for (const auto& event : reply.events) {
      ids.insert(ids.end(), event.delta().token_ids().begin(), event.delta().token_ids().end());
    }
    ASSERT_EQ(ids.size(), 200u);
    for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(ids[i], 100 + i);
  }
  EXPECT_TRUE(harness.Idle());
}

// B45: streams end with their own status when the server gives them up.
TEST(GrpcLoadTest, GivenUpStreamsEndUnavailable) {
  MockService::Options options;
  options.engine.step_time = 1ms;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  GrpcHarness harness(options);
  std::vector<std::future<Reply>> replies;
  for (int i = 0; i < 4; ++i) {
    replies.push_back(
        std::async(std::launch::async, [&] { return Stream(*harness.generation, TokenSpec(3, 100000)); }));
  }
  while (harness.engine().Load().running < 4) std::this_thread::sleep_for(1ms);
  harness.service().generation.AbortAll(absl::UnavailableError("the server is shutting down"));
  for (auto& future : replies) {
    const Reply reply = future.get();
    EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_THAT(reply.status.error_message(), HasSubstr("shutting down"));
  }
  EXPECT_TRUE(harness.Idle());
}

}  // namespace
}  // namespace k3
