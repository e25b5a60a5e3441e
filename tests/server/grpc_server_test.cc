#include "server/grpc_server.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <set>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "k3serve/inference/v1/admin_service.grpc.pb.h"
#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "k3serve/inference/v1/model_service.grpc.pb.h"
#include "k3serve/inference/v1/tokenizer_service.grpc.pb.h"
#include "tests/testing/mock_server.h"

namespace k3 {
namespace {

namespace pb = k3serve::inference::v1;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using testing::MockEngine;
using testing::MockService;
using namespace std::chrono_literals;

constexpr int kBigMessages = 256 << 20;

// A real server on free ports, over a mock engine.
class Harness {
 public:
  explicit Harness(MockService::Options service = {}, GrpcServerOptions options = {}, ApiKeys keys = {})
      : keys_(std::move(keys)), service_(std::make_unique<MockService>(std::move(service))) {
    options.port = 0;
    options.admin_port = 0;
    AdminActions actions;
    actions.drain = [this] { service_->health.StartDrain(Clock::duration::zero()); };
    auto server = GrpcServer::Start(options, &service_->generation, &service_->health, &keys_, std::move(actions));
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel = Connect(server_->port());
    generation = pb::GenerationService::NewStub(channel);
  }
  ~Harness() { server_->Shutdown(0ms); }

  std::shared_ptr<grpc::Channel> Connect(int port) const {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kBigMessages);
    arguments.SetMaxSendMessageSize(kBigMessages);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    return grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  MockService& service() { return *service_; }
  MockEngine& engine() { return service_->engine; }
  GrpcServer& server() { return *server_; }

  // Waits until nothing runs or waits any more.
  bool Idle(std::chrono::milliseconds limit = 5s) {
    const auto until = Clock::now() + limit;
    while (Clock::now() < until) {
      const EngineLoad load = engine().Load();
      if (load.running + load.waiting == 0 && service_->generation.active() == 0) return true;
      std::this_thread::sleep_for(1ms);
    }
    return false;
  }

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<pb::GenerationService::Stub> generation;

 private:
  ApiKeys keys_;
  std::unique_ptr<MockService> service_;
  std::unique_ptr<GrpcServer> server_;
};

pb::GenerationSpec TokenSpec(size_t prompt, uint32_t max_new) {
  pb::GenerationSpec spec;
  for (size_t i = 0; i < prompt; ++i) spec.mutable_tokens()->add_ids(100);
  spec.mutable_stopping()->set_max_new_tokens(max_new);
  return spec;
}

pb::GenerationSpec ChatSpec(const std::string& text) {
  pb::GenerationSpec spec;
  pb::ChatMessage* message = spec.mutable_chat()->add_messages();
  message->set_role(pb::ROLE_USER);
  message->add_content()->set_text(text);
  return spec;
}

struct Reply {
  grpc::Status status;
  std::vector<pb::StreamGenerateResponse> events;
  std::multimap<std::string, std::string> initial;
  std::multimap<std::string, std::string> trailing;

  std::string Text(pb::Channel channel = pb::CHANNEL_CONTENT, uint32_t choice = 0) const {
    std::string text;
    for (const auto& event : events) {
      const pb::Delta& delta = event.delta();
      if (event.has_delta() && delta.channel() == channel && delta.choice() == choice) text += delta.text();
    }
    return text;
  }
};

std::multimap<std::string, std::string> Strings(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
  std::multimap<std::string, std::string> out;
  for (const auto& [key, value] : metadata) {
    out.emplace(std::string(key.data(), key.size()), std::string(value.data(), value.size()));
  }
  return out;
}

Reply Stream(pb::GenerationService::Stub& stub, const pb::GenerationSpec& spec,
             const std::function<void(grpc::ClientContext&)>& prepare = {}) {
  grpc::ClientContext context;
  if (prepare) prepare(context);
  pb::StreamGenerateRequest request;
  *request.mutable_spec() = spec;
  Reply reply;
  const auto reader = stub.StreamGenerate(&context, request);
  pb::StreamGenerateResponse response;
  while (reader->Read(&response)) reply.events.push_back(response);
  reply.status = reader->Finish();
  reply.initial = Strings(context.GetServerInitialMetadata());
  reply.trailing = Strings(context.GetServerTrailingMetadata());
  return reply;
}

template <class Detail>
std::optional<Detail> DetailOf(const grpc::Status& status) {
  google::rpc::Status rpc;
  if (!rpc.ParseFromString(status.error_details())) return std::nullopt;
  EXPECT_EQ(rpc.code(), static_cast<int>(status.error_code()));
  for (const auto& any : rpc.details()) {
    Detail detail;
    if (any.UnpackTo(&detail)) return detail;
  }
  return std::nullopt;
}

std::string FieldOf(const grpc::Status& status) {
  const auto detail = DetailOf<google::rpc::BadRequest>(status);
  return detail.has_value() && detail->field_violations_size() > 0 ? detail->field_violations(0).field() : "";
}

MockService::Options Scripted(std::vector<int32_t> tokens) {
  MockService::Options options;
  options.engine.script = MockService::Tokens(std::move(tokens));
  return options;
}

TEST(GrpcServerTest, StreamsAnAnswerWithMetadata) {
  std::vector<int32_t> tokens = MockService::Encode("hm");
  const std::vector<int32_t> markup =
      *MockService::tokenizer()->Encode("<|close|>think<|sep|><|open|>response<|sep|>", EncodeMode::kControl);
  tokens.insert(tokens.end(), markup.begin(), markup.end());
  for (const int32_t id : MockService::Encode("grep finds lines.")) tokens.push_back(id);
  Harness harness(Scripted(tokens));
  const Reply reply = Stream(*harness.generation, ChatSpec("What does grep do?"),
                             [](grpc::ClientContext& context) { context.AddMetadata("x-request-id", "my-id-1"); });
  ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
  ASSERT_GE(reply.events.size(), 4u);
  const pb::Accepted& accepted = reply.events.front().accepted();
  EXPECT_EQ(accepted.request_id(), "my-id-1");
  EXPECT_EQ(accepted.model(), "tiny-k3");
  EXPECT_EQ(accepted.weights_version(), "test-weights");
  EXPECT_FLOAT_EQ(accepted.effective().temperature(), 0.6f);
  EXPECT_GT(accepted.prompt_tokens(), 10u);
  EXPECT_EQ(reply.Text(pb::CHANNEL_REASONING), "hm");
  EXPECT_EQ(reply.Text(), "grep finds lines.");
  const pb::ChoiceFinished& finished = reply.events[reply.events.size() - 2].finished();
  EXPECT_EQ(finished.reason(), pb::FINISH_REASON_STOP);
  EXPECT_TRUE(finished.eos());
  const pb::Usage& usage = reply.events.back().usage();
  EXPECT_EQ(usage.completion_tokens(), tokens.size() + 1);
  EXPECT_EQ(usage.prompt_tokens(), accepted.prompt_tokens());
  EXPECT_GT(usage.reasoning_tokens(), 0u);
  EXPECT_EQ(reply.initial.find("x-request-id")->second, "my-id-1");
  EXPECT_EQ(reply.initial.count("k3serve-version"), 1u);
  EXPECT_EQ(reply.initial.find("k3serve-weights-version")->second, "test-weights");
  for (const char* key : {"k3serve-queue-ms", "k3serve-prefill-ms", "k3serve-decode-ms", "k3serve-cached-tokens"}) {
    EXPECT_EQ(reply.trailing.count(key), 1u) << key;
  }
}

TEST(GrpcServerTest, UnaryEqualsStream) {
  Harness harness(Scripted(MockService::Encode("some answer with \xE4\xB8\xAD\xE5\x9B\xBD in it")));
  pb::GenerationSpec spec = TokenSpec(5, 100);
  spec.mutable_output()->set_token_ids(true);
  spec.mutable_output()->set_top_logprobs(2);
  spec.mutable_output()->set_prompt_logprobs(true);
  spec.mutable_sampling()->set_n(2);
  const Reply stream = Stream(*harness.generation, spec);
  grpc::ClientContext context;
  pb::GenerateRequest request;
  *request.mutable_spec() = spec;
  pb::GenerateResponse response;
  ASSERT_TRUE(harness.generation->Generate(&context, request, &response).ok());
  ASSERT_EQ(response.choices_size(), 2);
  EXPECT_EQ(response.choices(0).content(), "some answer with \xE4\xB8\xAD\xE5\x9B\xBD in it");
  EXPECT_EQ(response.choices(1).content(), response.choices(0).content());
  EXPECT_EQ(stream.Text(pb::CHANNEL_CONTENT, 0), response.choices(0).content());
  EXPECT_EQ(stream.Text(pb::CHANNEL_CONTENT, 1), response.choices(1).content());
  EXPECT_EQ(response.choices(0).token_ids_size(), response.choices(0).logprobs().logprobs_size());
  EXPECT_EQ(response.choices(0).token_ids_size() * 2, response.choices(0).logprobs().top_token_ids_size());
  EXPECT_EQ(response.prompt_logprobs().logprobs_size(), 4);
  EXPECT_TRUE(response.choices(0).finished().eos());
  EXPECT_EQ(response.usage().completion_tokens(), stream.events.back().usage().completion_tokens());
  EXPECT_EQ(context.GetServerInitialMetadata().count("x-request-id"), 1u);
  EXPECT_EQ(context.GetServerTrailingMetadata().count("k3serve-decode-ms"), 1u);
}

TEST(GrpcServerTest, StopStringsEndTheStream) {
  Harness harness(Scripted(MockService::Encode("abc\nUser: never seen and much more text after it")));
  pb::GenerationSpec spec = TokenSpec(3, 1000);
  spec.mutable_stopping()->add_stop("\nUser:");
  const Reply reply = Stream(*harness.generation, spec);
  ASSERT_TRUE(reply.status.ok());
  EXPECT_EQ(reply.Text(), "abc");
  EXPECT_EQ(reply.events[reply.events.size() - 2].finished().stop_string(), "\nUser:");
}

TEST(GrpcServerTest, EveryRefusalHasItsCodeAndDetails) {
  MockService::Options options;
  options.engine.limits.max_model_len = 512;
  options.engine.limits.latent_pages = 6;
  Harness harness(options);
  auto& stub = *harness.generation;

  pb::GenerationSpec spec = TokenSpec(3, 5);
  spec.mutable_sampling()->set_top_p(2);
  Reply reply = Stream(stub, spec);
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(FieldOf(reply.status), "spec.sampling.top_p");
  EXPECT_TRUE(reply.initial.empty());
  EXPECT_EQ(reply.trailing.count("grpc-retry-pushback-ms"), 0u);

  reply = Stream(stub, TokenSpec(500, 100));
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  auto info = DetailOf<google::rpc::ErrorInfo>(reply.status);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason(), "context_length_exceeded");
  EXPECT_EQ(info->metadata().at("prompt_tokens"), "500");
  EXPECT_EQ(info->metadata().at("max_model_len"), "512");

  reply = Stream(stub, TokenSpec(380, 100));
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(DetailOf<google::rpc::PreconditionFailure>(reply.status).has_value());
  EXPECT_EQ(DetailOf<google::rpc::ErrorInfo>(reply.status)->reason(), "capacity_exceeded");

  spec = TokenSpec(3, 5);
  spec.set_model("other");
  reply = Stream(stub, spec);
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(DetailOf<google::rpc::ResourceInfo>(reply.status)->resource_name(), "other");

  spec = TokenSpec(3, 5);
  spec.mutable_constraint()->set_regex("a+");
  reply = Stream(stub, spec);
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(DetailOf<google::rpc::ErrorInfo>(reply.status)->reason(), "unsupported_parameter");

  spec = ChatSpec("x");
  spec.mutable_chat()->mutable_messages(0)->clear_role();
  EXPECT_EQ(FieldOf(Stream(stub, spec).status), "spec.chat.messages[0].role");
  spec = ChatSpec("x");
  pb::Tool* tool = spec.mutable_chat()->add_tools();
  tool->set_name("f");
  tool->set_parameters_json_schema("{\"type\": ");
  EXPECT_EQ(FieldOf(Stream(stub, spec).status), "spec.chat.tools[0].parameters_json_schema");
  spec = ChatSpec("x");
  spec.mutable_chat()->mutable_messages(0)->add_content()->mutable_media()->set_mime_type("image/png");
  EXPECT_EQ(Stream(stub, spec).status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(FieldOf(Stream(stub, pb::GenerationSpec()).status), "spec.input");
  spec = ChatSpec("x");
  spec.mutable_chat()->mutable_tool_choice()->set_mode(static_cast<pb::ToolChoiceMode>(99));
  EXPECT_EQ(FieldOf(Stream(stub, spec).status), "spec.chat.tool_choice.mode");
  spec = ChatSpec("x");
  spec.mutable_reasoning()->set_effort(static_cast<pb::Effort>(99));
  EXPECT_EQ(FieldOf(Stream(stub, spec).status), "spec.reasoning.effort");

  // A large bad value does not make a large error.
  spec = TokenSpec(3, 5);
  spec.set_model(std::string(100000, 'x'));
  reply = Stream(stub, spec);
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_LT(reply.status.error_message().size() + reply.status.error_details().size(), 2000u);
  EXPECT_TRUE(Stream(stub, TokenSpec(3, 5)).status.ok());
}

// B16 on the gRPC side.
TEST(GrpcServerTest, PromptLengthsAtTheLimit) {
  MockService::Options options;
  options.engine.limits.max_model_len = 512;
  Harness harness(options);
  const Reply last = Stream(*harness.generation, TokenSpec(511, 1));
  ASSERT_TRUE(last.status.ok());
  EXPECT_EQ(last.events.back().usage().completion_tokens(), 1u);
  EXPECT_EQ(last.events[last.events.size() - 2].finished().reason(), pb::FINISH_REASON_LENGTH);
  pb::GenerationSpec open = TokenSpec(511, 1);
  open.clear_stopping();
  EXPECT_EQ(Stream(*harness.generation, open).events.back().usage().completion_tokens(), 1u);
  for (const pb::GenerationSpec& spec : {TokenSpec(512, 1), TokenSpec(513, 1), TokenSpec(500, 100), TokenSpec(0, 1)}) {
    EXPECT_EQ(Stream(*harness.generation, spec).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_TRUE(Stream(*harness.generation, TokenSpec(3, 5)).status.ok());
}

TEST(GrpcServerTest, KeysAreAskedForWhereTheyAreSet) {
  const std::string path = ::testing::TempDir() + "/k3serve_grpc_keys";
  std::ofstream(path) << "sesame\n";
  Harness harness({}, {}, *ApiKeys::Load(path));
  Reply reply = Stream(*harness.generation, TokenSpec(3, 2));
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(DetailOf<google::rpc::ErrorInfo>(reply.status)->reason(), "missing_api_key");
  reply = Stream(*harness.generation, TokenSpec(3, 2),
                 [](grpc::ClientContext& context) { context.AddMetadata("authorization", "Bearer sesame"); });
  EXPECT_TRUE(reply.status.ok());
  const auto models = pb::ModelService::NewStub(harness.channel);
  grpc::ClientContext context;
  pb::ListModelsResponse response;
  EXPECT_EQ(models->ListModels(&context, {}, &response).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  const auto health = grpc::health::v1::Health::NewStub(harness.channel);
  grpc::ClientContext probe;
  grpc::health::v1::HealthCheckResponse state;
  EXPECT_TRUE(health->Check(&probe, {}, &state).ok());
}

TEST(GrpcServerTest, AFullQueuePushesBack) {
  MockService::Options options;
  options.engine.manual = true;
  options.engine.limits.max_queue = 1;
  Harness harness(options);
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

TEST(GrpcServerTest, InternalErrorsNameTheRequestAndNothingElse) {
  MockService::Options options;
  options.engine.manual = true;
  Harness harness(options);
  auto reply = std::async([&] {
    return Stream(*harness.generation, TokenSpec(3, 50),
                  [](grpc::ClientContext& context) { context.AddMetadata("x-request-id", "broken-1"); });
  });
  while (harness.engine().Load().waiting == 0) std::this_thread::sleep_for(1ms);
  harness.engine().Step();
  harness.engine().Fail();
  const grpc::Status status = reply.get().status;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), HasSubstr("broken-1"));
  EXPECT_THAT(status.error_message(), ::testing::Not(HasSubstr("device")));
  EXPECT_EQ(DetailOf<google::rpc::RequestInfo>(status)->request_id(), "broken-1");
}

TEST(GrpcServerTest, NothingReachesTheClientBeforeAdmission) {
  MockService::Options options;
  options.engine.manual = true;
  Harness harness(options);
  grpc::ClientContext context;
  pb::StreamGenerateRequest request;
  *request.mutable_spec() = TokenSpec(3, 2);
  const auto reader = harness.generation->StreamGenerate(&context, request);
  auto headers = std::async([&] { reader->WaitForInitialMetadata(); });
  while (harness.engine().Load().waiting == 0) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(headers.wait_for(50ms), std::future_status::timeout);
  harness.engine().Step();
  EXPECT_EQ(headers.wait_for(5s), std::future_status::ready);
  harness.engine().Step();
  pb::StreamGenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
}

// Cancelled while it waits, during the prompt, and while it generates: gone after one step.
TEST(GrpcServerTest, CancelFreesEverythingWithinOneStep) {
  for (const int steps : {0, 2, 10}) {
    MockService::Options options;
    options.engine.manual = true;
    options.engine.prefill_chunk = 100;
    Harness harness(options);
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
TEST(GrpcServerTest, ClosedStreamsLeaveNothingBehind) {
  MockService::Options options;
  options.engine.step_time = 1ms;
  options.engine.prefill_chunk = 10;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  Harness harness(options);
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

// B44, short.
TEST(GrpcServerTest, DeadlinesEndTheWork) {
  MockService::Options options;
  options.engine.step_time = 2ms;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  options.engine.limits.max_num_seqs = 4;
  Harness harness(options);
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
}

// B43, short: readers that stop. They are ended after the limit, others go on, and what they read later is in order.
TEST(GrpcServerTest, SlowReadersAreBoundedAndEnded) {
  MockService::Options options;
  options.engine.script = [](const Request&, int32_t, int32_t position) { return 100 + position % 1000; };
  options.engine.step_time = 100us;
  GrpcServerOptions server;
  server.write_stall_limit = 500ms;
  Harness harness(options, server);
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

// B46.
TEST(GrpcServerTest, LongPromptsReachValidation) {
  MockService::Options options;
  options.engine.limits.max_model_len = 4096;
  Harness harness(options);
  const Reply ids = Stream(*harness.generation, TokenSpec(2000000, 1));
  EXPECT_EQ(ids.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << ids.status.error_message();
  pb::GenerationSpec text;
  std::string words;
  while (words.size() < 8 << 20) words += "some words of text ";
  text.mutable_prompt()->add_segments()->set_text(words);
  const Reply long_text = Stream(*harness.generation, text);
  EXPECT_EQ(long_text.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << long_text.status.error_message();
  EXPECT_EQ(DetailOf<google::rpc::ErrorInfo>(long_text.status)->reason(), "context_length_exceeded");
}

TEST(GrpcServerTest, MessagesOverTheLimitAreRefusedAndTheConnectionStays) {
  GrpcServerOptions options;
  options.max_message_mib = 1;
  Harness harness({}, options);
  pb::GenerationSpec text;
  text.mutable_prompt()->add_segments()->set_text(std::string((1 << 20) + 1, 'a'));
  EXPECT_EQ(Stream(*harness.generation, text).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  grpc::ClientContext context;
  pb::GenerateRequest request;
  *request.mutable_spec() = text;
  pb::GenerateResponse response;
  EXPECT_EQ(harness.generation->Generate(&context, request, &response).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Stream(*harness.generation, TokenSpec(3, 5)).status.ok());
}

TEST(GrpcServerTest, ManyLogprobsArriveWhole) {
  MockService::Options options;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  Harness harness(options);
  grpc::ClientContext context;
  pb::GenerateRequest request;
  *request.mutable_spec() = TokenSpec(3, 4000);
  request.mutable_spec()->mutable_output()->set_top_logprobs(20);
  pb::GenerateResponse response;
  ASSERT_TRUE(harness.generation->Generate(&context, request, &response).ok());
  EXPECT_EQ(response.choices(0).logprobs().logprobs_size(), 4000);
  EXPECT_EQ(response.choices(0).logprobs().top_logprobs_size(), 80000);
}

TEST(GrpcServerTest, ManyStreamsAtOnce) {
  MockService::Options options;
  options.engine.script = [](const Request&, int32_t, int32_t position) { return 100 + position % 1000; };
  Harness harness(options);
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

TEST(GrpcServerTest, TokenizerServiceAgreesWithGeneration) {
  Harness harness;
  const auto stub = pb::TokenizerService::NewStub(harness.channel);
  {
    grpc::ClientContext context;
    pb::TokenizeRequest request;
    request.set_text("grep <|open|>");
    pb::TokenizeResponse response;
    ASSERT_TRUE(stub->Tokenize(&context, request, &response).ok());
    EXPECT_THAT(response.token_ids(), ElementsAreArray(MockService::Encode("grep <|open|>")));
    EXPECT_EQ(response.count(), static_cast<uint32_t>(response.token_ids_size()));
  }
  {
    grpc::ClientContext context;
    pb::DetokenizeRequest request;
    request.add_token_ids(static_cast<uint32_t>(MockService::TokenOf("\xF0")));
    request.add_token_ids(static_cast<uint32_t>(MockService::TokenOf("a")));
    pb::DetokenizeResponse response;
    ASSERT_TRUE(stub->Detokenize(&context, request, &response).ok());
    EXPECT_EQ(response.raw(),
              "\xF0"
              "a");
    EXPECT_EQ(response.text(),
              "\xEF\xBF\xBD"
              "a");
  }
  {
    grpc::ClientContext context;
    pb::RenderChatRequest request;
    *request.mutable_chat() = ChatSpec("What?").chat();
    pb::RenderChatResponse response;
    ASSERT_TRUE(stub->RenderChat(&context, request, &response).ok());
    pb::GenerationSpec spec = ChatSpec("What?");
    spec.mutable_stopping()->set_max_new_tokens(1);
    ASSERT_TRUE(Stream(*harness.generation, spec).status.ok());
    EXPECT_THAT(response.token_ids(), ElementsAreArray(harness.engine().LastRequest().prompt_tokens));
  }
}

TEST(GrpcServerTest, ModelServiceTellsWhatIsServed) {
  Harness harness;
  const auto stub = pb::ModelService::NewStub(harness.channel);
  {
    grpc::ClientContext context;
    pb::ListModelsResponse response;
    ASSERT_TRUE(stub->ListModels(&context, {}, &response).ok());
    ASSERT_EQ(response.models_size(), 2);
    EXPECT_EQ(response.models(0).name(), "tiny-k3");
    EXPECT_EQ(response.models(1).name(), "alias");
    EXPECT_EQ(response.models(0).created(), 1234567890);
  }
  {
    grpc::ClientContext context;
    pb::GetServerInfoResponse response;
    ASSERT_TRUE(stub->GetServerInfo(&context, {}, &response).ok());
    EXPECT_EQ(response.device(), "mock");
    EXPECT_EQ(response.limits().max_queue(), 256u);
    EXPECT_EQ(response.max_message_mib(), 64u);
  }
  {
    grpc::ClientContext context;
    pb::WatchLoadRequest request;
    request.set_interval_ms(100);
    const auto reader = stub->WatchLoad(&context, request);
    pb::WatchLoadResponse response;
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(reader->Read(&response));
    EXPECT_EQ(response.state(), pb::SERVING_STATE_SERVING);
    EXPECT_EQ(response.latent_pages().total(), static_cast<uint64_t>(harness.engine().Limits().latent_pages));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  {
    grpc::ClientContext context;
    pb::WatchLoadRequest request;
    request.set_interval_ms(1);
    const auto reader = stub->WatchLoad(&context, request);
    EXPECT_EQ(FieldOf(reader->Finish()), "interval_ms");
  }
}

TEST(GrpcServerTest, HealthFollowsTheStateAndIsPushed) {
  using grpc::health::v1::HealthCheckResponse;
  MockService::Options options;
  options.loaded = false;
  Harness harness(options);
  const auto stub = grpc::health::v1::Health::NewStub(harness.channel);
  const auto check = [&](const std::string& service) {
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    HealthCheckResponse response;
    const grpc::Status status = stub->Check(&context, request, &response);
    return status.ok() ? static_cast<int>(response.status()) : -static_cast<int>(status.error_code());
  };
  EXPECT_EQ(check(""), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(Stream(*harness.generation, TokenSpec(3, 2)).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  grpc::ClientContext watch;
  grpc::health::v1::HealthCheckRequest request;
  request.set_service("k3serve.inference.v1.GenerationService");
  const auto reader = stub->Watch(&watch, request);
  HealthCheckResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  harness.service().Install();
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  for (const char* service : {"", "k3serve.inference.v1.GenerationService", "k3serve.inference.v1.TokenizerService",
                              "k3serve.inference.v1.ModelService"}) {
    EXPECT_EQ(check(service), HealthCheckResponse::SERVING) << service;
  }
  EXPECT_EQ(check("unknown"), -static_cast<int>(grpc::StatusCode::NOT_FOUND));
  harness.service().health.StartDrain(Clock::duration::zero());
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  const Reply refused = Stream(*harness.generation, TokenSpec(3, 2));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(DetailOf<google::rpc::RetryInfo>(refused.status).has_value());
  watch.TryCancel();
  reader->Finish();
}

template <class Reflection, class Request, class Response>
void CheckReflection(const std::shared_ptr<grpc::Channel>& channel) {
  const auto stub = Reflection::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->ServerReflectionInfo(&context);
  Request request;
  request.set_list_services("");
  ASSERT_TRUE(stream->Write(request));
  Response response;
  ASSERT_TRUE(stream->Read(&response));
  std::set<std::string> services;
  for (const auto& service : response.list_services_response().service()) services.insert(service.name());
  EXPECT_THAT(services, Contains("k3serve.inference.v1.GenerationService"));
  EXPECT_THAT(services, Contains("grpc.health.v1.Health"));
  for (const std::string& service : services) {
    request.set_file_containing_symbol(service);
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_GT(response.file_descriptor_response().file_descriptor_proto_size(), 0) << service;
  }
  request.set_file_by_filename("nowhere.proto");
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.error_response().error_code(), static_cast<int>(grpc::StatusCode::NOT_FOUND));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(GrpcServerTest, ReflectionInBothVersions) {
  Harness harness;
  namespace v1 = grpc::reflection::v1;
  namespace v1alpha = grpc::reflection::v1alpha;
  CheckReflection<v1::ServerReflection, v1::ServerReflectionRequest, v1::ServerReflectionResponse>(harness.channel);
  CheckReflection<v1alpha::ServerReflection, v1alpha::ServerReflectionRequest, v1alpha::ServerReflectionResponse>(
      harness.channel);
}

TEST(GrpcServerTest, AdminServiceOnItsOwnPort) {
  Harness harness;
  const auto stub = pb::AdminService::NewStub(harness.Connect(harness.server().admin_port()));
  {
    grpc::ClientContext context;
    pb::FlushCacheResponse response;
    ASSERT_TRUE(stub->FlushCache(&context, {}, &response).ok());
    EXPECT_EQ(harness.engine().flushes(), 1);
  }
  {
    grpc::ClientContext context;
    pb::SetLogLevelRequest request;
    request.set_level(pb::LOG_LEVEL_WARN);
    pb::SetLogLevelResponse response;
    ASSERT_TRUE(stub->SetLogLevel(&context, request, &response).ok());
    EXPECT_EQ(response.previous(), pb::LOG_LEVEL_INFO);
    request.set_level(pb::LOG_LEVEL_INFO);
    grpc::ClientContext back;
    ASSERT_TRUE(stub->SetLogLevel(&back, request, &response).ok());
    EXPECT_EQ(response.previous(), pb::LOG_LEVEL_WARN);
    grpc::ClientContext bad;
    request.set_level(pb::LOG_LEVEL_UNSPECIFIED);
    EXPECT_EQ(FieldOf(stub->SetLogLevel(&bad, request, &response)), "level");
  }
  {
    grpc::ClientContext context;
    pb::StartProfileResponse response;
    EXPECT_EQ(stub->StartProfile(&context, {}, &response).error_code(), grpc::StatusCode::UNIMPLEMENTED);
  }
  {
    grpc::ClientContext context;
    pb::DrainResponse response;
    ASSERT_TRUE(stub->Drain(&context, {}, &response).ok());
    EXPECT_EQ(Stream(*harness.generation, TokenSpec(3, 2)).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  // Not on the public port.
  grpc::ClientContext context;
  pb::DrainResponse response;
  EXPECT_EQ(pb::AdminService::NewStub(harness.channel)->Drain(&context, {}, &response).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST(GrpcServerTest, ATakenPortIsAnError) {
  Harness harness;
  GrpcServerOptions options;
  options.port = static_cast<uint16_t>(harness.server().port());
  const ApiKeys keys;
  const auto second =
      GrpcServer::Start(options, &harness.service().generation, &harness.service().health, &keys, AdminActions());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(std::to_string(harness.server().port())));
}

// B45: streams end with their own status when the server gives them up.
TEST(GrpcServerTest, GivenUpStreamsEndUnavailable) {
  MockService::Options options;
  options.engine.step_time = 1ms;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  Harness harness(options);
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
