#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "server/grpc_server.h"
#include "tests/testing/mock_server.h"
#include "tests/testing/slowdown.h"

// A gRPC server and what its tests ask it with.
namespace k3::testing {

namespace pb = k3serve::inference::v1;
using namespace std::chrono_literals;

constexpr int kBigMessages = 256 << 20;

// A real server on free ports, over a mock engine.
class GrpcHarness {
 public:
  explicit GrpcHarness(MockService::Options service = {}, GrpcServerOptions options = {}, ApiKeys keys = {})
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
  ~GrpcHarness() { server_->Shutdown(0ms); }

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
    limit *= kSlowdown;
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

inline pb::GenerationSpec TokenSpec(size_t prompt, uint32_t max_new) {
  pb::GenerationSpec spec;
  for (size_t i = 0; i < prompt; ++i) spec.mutable_tokens()->add_ids(100);
  spec.mutable_stopping()->set_max_new_tokens(max_new);
  return spec;
}

inline pb::GenerationSpec ChatSpec(const std::string& text) {
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

inline std::multimap<std::string, std::string> Strings(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
  std::multimap<std::string, std::string> out;
  for (const auto& [key, value] : metadata) {
    out.emplace(std::string(key.data(), key.size()), std::string(value.data(), value.size()));
  }
  return out;
}

inline Reply Stream(pb::GenerationService::Stub& stub, const pb::GenerationSpec& spec,
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

inline std::string FieldOf(const grpc::Status& status) {
  const auto detail = DetailOf<google::rpc::BadRequest>(status);
  return detail.has_value() && detail->field_violations_size() > 0 ? detail->field_violations(0).field() : "";
}

inline MockService::Options Scripted(std::vector<int32_t> tokens) {
  MockService::Options options;
  options.engine.script = MockService::Tokens(std::move(tokens));
  return options;
}

}  // namespace k3::testing
