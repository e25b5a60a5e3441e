#include "server/grpc_server.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "grpc/health/v1/health.grpc.pb.h"
#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "k3serve/inference/v1/model_service.grpc.pb.h"
#include "tests/testing/grpc_harness.h"

namespace k3 {
namespace {

namespace pb = k3serve::inference::v1;
using testing::ChatSpec;
using testing::DetailOf;
using testing::FieldOf;
using testing::GrpcHarness;
using ::testing::HasSubstr;
using testing::MockService;
using testing::Reply;
using testing::Scripted;
using testing::Stream;
using testing::TokenSpec;
using namespace std::chrono_literals;

TEST(GrpcServerTest, StreamsAnAnswerWithMetadata) {
  std::vector<int32_t> tokens = MockService::Encode("hm");
  const std::vector<int32_t> markup =
      *MockService::tokenizer()->Encode("<|close|>think<|sep|><|open|>response<|sep|>", EncodeMode::kControl);
  tokens.insert(tokens.end(), markup.begin(), markup.end());
  for (const int32_t id : MockService::Encode("grep finds lines.")) tokens.push_back(id);
  GrpcHarness harness(Scripted(tokens));
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
  GrpcHarness harness(Scripted(MockService::Encode("some answer with \xE4\xB8\xAD\xE5\x9B\xBD in it")));
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
  GrpcHarness harness(Scripted(MockService::Encode("abc\nUser: never seen and much more text after it")));
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
  GrpcHarness harness(options);
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
  GrpcHarness harness(options);
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
  GrpcHarness harness({}, {}, *ApiKeys::Load(path));
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

TEST(GrpcServerTest, InternalErrorsNameTheRequestAndNothingElse) {
  MockService::Options options;
  options.engine.manual = true;
  GrpcHarness harness(options);
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
  GrpcHarness harness(options);
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

// B46.
TEST(GrpcServerTest, LongPromptsReachValidation) {
  MockService::Options options;
  options.engine.limits.max_model_len = 4096;
  GrpcHarness harness(options);
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
  GrpcHarness harness({}, options);
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

TEST(GrpcServerTest, TheMessageLimitIsExact) {
  GrpcServerOptions options;
  options.max_message_mib = 1;
  GrpcHarness harness({}, options);
  pb::GenerateRequest request;
  *request.mutable_spec() = TokenSpec(3, 2);
  std::string* const salt = request.mutable_spec()->mutable_cache()->mutable_salt();
  salt->assign((1 << 20) - 100, 's');
  salt->append((1 << 20) - request.ByteSizeLong(), 's');
  ASSERT_EQ(request.ByteSizeLong(), 1u << 20);
  for (const bool over : {false, true, false}) {
    if (over) salt->push_back('s');
    grpc::ClientContext context;
    pb::GenerateResponse response;
    const grpc::Status status = harness.generation->Generate(&context, request, &response);
    EXPECT_EQ(status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED, over) << status.error_message();
    if (over) salt->pop_back();
  }
}

TEST(GrpcServerTest, ManyLogprobsArriveWhole) {
  MockService::Options options;
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  GrpcHarness harness(options);
  grpc::ClientContext context;
  pb::GenerateRequest request;
  *request.mutable_spec() = TokenSpec(3, 4000);
  request.mutable_spec()->mutable_output()->set_top_logprobs(20);
  pb::GenerateResponse response;
  ASSERT_TRUE(harness.generation->Generate(&context, request, &response).ok());
  EXPECT_EQ(response.choices(0).logprobs().logprobs_size(), 4000);
  EXPECT_EQ(response.choices(0).logprobs().top_logprobs_size(), 80000);
}

// What comes at once is merged, but not into messages beyond what clients take by default.
TEST(GrpcServerTest, LogprobsOfALongPromptComeInMessagesThatAnyClientTakes) {
  constexpr int kTokens = 40'000;
  GrpcHarness harness;
  const auto stub = pb::GenerationService::NewStub(
      grpc::CreateChannel("127.0.0.1:" + std::to_string(harness.server().port()), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  pb::StreamGenerateRequest request;
  *request.mutable_spec() = TokenSpec(kTokens, 1);
  request.mutable_spec()->mutable_output()->set_prompt_logprobs(true);
  request.mutable_spec()->mutable_output()->set_top_logprobs(20);
  const auto reader = stub->StreamGenerate(&context, request);
  pb::StreamGenerateResponse response;
  int rows = 0;
  while (reader->Read(&response)) rows += response.prompt_logprobs().logprobs_size();
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(rows, kTokens - 1);
}

// A client that never pauses must hear UNAVAILABLE, which it may retry elsewhere, up to the end of the last connection.
TEST(GrpcServerTest, CallsThatMeetTheShutdownAreUnavailable) {
  constexpr int kServers = 20;
  constexpr int kClients = 8;
  for (int i = 0; i < kServers; ++i) {
    GrpcHarness harness;
    harness.service().health.StartDrain(Clock::duration::zero());
    std::atomic<bool> ended{false};
    std::mutex mutex;
    std::map<grpc::StatusCode, int> codes;
    std::vector<std::thread> clients;
    for (int c = 0; c < kClients; ++c) {
      clients.emplace_back([&] {
        const auto stub = pb::GenerationService::NewStub(harness.Connect(harness.server().port()));
        pb::GenerateRequest request;
        *request.mutable_spec() = TokenSpec(5, 5);
        while (!ended) {
          grpc::ClientContext context;
          pb::GenerateResponse response;
          const grpc::Status status = stub->Generate(&context, request, &response);
          std::lock_guard lock(mutex);
          ++codes[status.error_code()];
        }
      });
    }
    std::this_thread::sleep_for(20ms);
    harness.server().Shutdown(200ms);
    ended = true;
    for (std::thread& client : clients) client.join();
    EXPECT_GT(codes[grpc::StatusCode::UNAVAILABLE], 0);
    for (const auto& [code, count] : codes) {
      EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE) << count << " calls at server " << i;
    }
  }
}

TEST(GrpcServerTest, ATakenPortIsAnError) {
  GrpcHarness harness;
  GrpcServerOptions options;
  options.port = static_cast<uint16_t>(harness.server().port());
  const ApiKeys keys;
  const auto second =
      GrpcServer::Start(options, &harness.service().generation, &harness.service().health, &keys, AdminActions());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(std::to_string(harness.server().port())));
}

}  // namespace
}  // namespace k3
