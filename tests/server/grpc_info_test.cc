#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <set>
#include <thread>

#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "k3serve/inference/v1/admin_service.grpc.pb.h"
#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "k3serve/inference/v1/model_service.grpc.pb.h"
#include "k3serve/inference/v1/tokenizer_service.grpc.pb.h"
#include "server/grpc_server.h"
#include "tests/testing/grpc_harness.h"

namespace k3 {
namespace {

namespace pb = k3serve::inference::v1;
using testing::ChatSpec;
using ::testing::Contains;
using testing::DetailOf;
using ::testing::ElementsAreArray;
using testing::FieldOf;
using testing::GrpcHarness;
using testing::MockService;
using testing::Reply;
using testing::Stream;
using testing::TokenSpec;
using namespace std::chrono_literals;

TEST(GrpcInfoTest, TokenizerServiceAgreesWithGeneration) {
  GrpcHarness harness;
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

TEST(GrpcInfoTest, ModelServiceTellsWhatIsServed) {
  GrpcHarness harness;
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

TEST(GrpcInfoTest, HealthFollowsTheStateAndIsPushed) {
  using grpc::health::v1::HealthCheckResponse;
  MockService::Options options;
  options.loaded = false;
  GrpcHarness harness(options);
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

TEST(GrpcInfoTest, ReflectionInBothVersions) {
  GrpcHarness harness;
  namespace v1 = grpc::reflection::v1;
  namespace v1alpha = grpc::reflection::v1alpha;
  CheckReflection<v1::ServerReflection, v1::ServerReflectionRequest, v1::ServerReflectionResponse>(harness.channel);
  CheckReflection<v1alpha::ServerReflection, v1alpha::ServerReflectionRequest, v1alpha::ServerReflectionResponse>(
      harness.channel);
}

TEST(GrpcInfoTest, AdminServiceOnItsOwnPort) {
  GrpcHarness harness;
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

}  // namespace
}  // namespace k3
