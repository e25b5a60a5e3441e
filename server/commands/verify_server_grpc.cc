#include <grpcpp/create_channel.h>

#include <chrono>
#include <functional>
#include <memory>

#include "grpc/health/v1/health.grpc.pb.h"
#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "k3serve/inference/v1/model_service.grpc.pb.h"
#include "k3serve/inference/v1/tokenizer_service.grpc.pb.h"
#include "server/commands/verify_server.h"

namespace k3 {
namespace {

namespace pb = k3serve::inference::v1;
using Status = grpc::Status;

constexpr int kMaxReply = 64 << 20;

class GrpcContract {
 public:
  GrpcContract(const std::string& target, const ClientAccess& access) : key_(access.key()) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxReply);
    channel_ = grpc::CreateCustomChannel(target, access.ChannelCredentials(), arguments);
    generation_ = pb::GenerationService::NewStub(channel_);
  }

  // A context with the key and a deadline.
  std::unique_ptr<grpc::ClientContext> Context(std::chrono::milliseconds limit = std::chrono::seconds(60)) const {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + limit);
    if (!key_.empty()) context->AddMetadata("authorization", "Bearer " + key_);
    return context;
  }
  static pb::GenerationSpec Spec(uint32_t max_new_tokens) {
    pb::GenerationSpec spec;
    spec.mutable_prompt()->add_segments()->set_text(kContractPrompt);
    spec.mutable_sampling()->set_temperature(0);
    spec.mutable_stopping()->set_max_new_tokens(max_new_tokens);
    spec.mutable_stopping()->set_ignore_eos(true);
    return spec;
  }
  Status Generate(const pb::GenerationSpec& spec, pb::GenerateResponse* response,
                  std::unique_ptr<grpc::ClientContext> context) const {
    pb::GenerateRequest request;
    *request.mutable_spec() = spec;
    return generation_->Generate(context.get(), request, response);
  }
  absl::Status Refuses(const std::function<void(pb::GenerationSpec*)>& change, grpc::StatusCode code) const {
    pb::GenerationSpec spec = Spec(4);
    change(&spec);
    pb::GenerateResponse response;
    const Status status = Generate(spec, &response, Context());
    return AllOf(
        {Expect("code (" + status.error_message() + ")", static_cast<int>(status.error_code()), static_cast<int>(code)),
         ExpectTrue(!status.error_details().empty(), "the status carries no details")});
  }

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  pb::GenerationService::Stub& generation() const { return *generation_; }

 private:
  const std::string key_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<pb::GenerationService::Stub> generation_;
};

absl::Status Ok(const Status& status) {
  return status.ok()
             ? absl::OkStatus()
             : absl::InternalError("code " + std::to_string(status.error_code()) + ": " + status.error_message());
}

}  // namespace

void CheckGrpcContract(const std::string& target, const ClientAccess& access, ContractReport& report,
                       std::string* greedy) {
  const GrpcContract grpc(target, access);
  report.Run("grpc.health", [&] {
    const auto health = grpc::health::v1::Health::NewStub(grpc.channel());
    for (const char* service : {"", "k3serve.inference.v1.GenerationService"}) {
      grpc::health::v1::HealthCheckRequest request;
      request.set_service(service);
      grpc::health::v1::HealthCheckResponse response;
      const auto context = grpc.Context();
      const absl::Status status = AllOf({Ok(health->Check(context.get(), request, &response)),
                                         Expect("status", static_cast<int>(response.status()),
                                                static_cast<int>(grpc::health::v1::HealthCheckResponse::SERVING))});
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  });
  report.Run("grpc.models", [&] {
    const auto models = pb::ModelService::NewStub(grpc.channel());
    pb::ListModelsResponse list;
    pb::GetServerInfoResponse info;
    const auto context = grpc.Context();
    const auto second = grpc.Context();
    return AllOf({Ok(models->ListModels(context.get(), {}, &list)),
                  ExpectTrue(list.models_size() > 0, "no model is listed"),
                  Ok(models->GetServerInfo(second.get(), {}, &info)),
                  ExpectTrue(info.limits().max_model_len() > 0, "max_model_len is 0")});
  });
  report.Run("grpc.tokenize", [&] {
    const auto tokenizer = pb::TokenizerService::NewStub(grpc.channel());
    pb::TokenizeRequest request;
    request.set_text(kContractPrompt);
    pb::TokenizeResponse ids;
    auto context = grpc.Context();
    if (const absl::Status status = Ok(tokenizer->Tokenize(context.get(), request, &ids)); !status.ok()) return status;
    pb::DetokenizeRequest back;
    *back.mutable_token_ids() = ids.token_ids();
    pb::DetokenizeResponse text;
    context = grpc.Context();
    return AllOf({Ok(tokenizer->Detokenize(context.get(), back, &text)), Expect("text", text.text(), kContractPrompt)});
  });
  report.Run("grpc.generate", [&] {
    pb::GenerateResponse reply;
    const absl::Status status = Ok(grpc.Generate(grpc.Spec(8), &reply, grpc.Context()));
    if (!status.ok()) return status;
    if (reply.choices_size() != 1) return absl::InternalError("there is not one choice");
    if (greedy->empty()) *greedy = reply.choices(0).content();
    return AllOf({Expect("the greedy text (of HTTP, where checked)", reply.choices(0).content(), *greedy),
                  Expect("usage.completion_tokens", reply.usage().completion_tokens(), 8u)});
  });
  report.Run("grpc.stream", [&] {
    pb::StreamGenerateRequest request;
    *request.mutable_spec() = grpc.Spec(8);
    const auto context = grpc.Context();
    const auto reader = grpc.generation().StreamGenerate(context.get(), request);
    std::string text;
    pb::StreamGenerateResponse event;
    bool first = true;
    bool usage = false;
    while (reader->Read(&event)) {
      if (first && !event.has_accepted()) return absl::InternalError("the first event is not Accepted");
      if (usage) return absl::InternalError("something follows the usage");
      first = false;
      usage = event.has_usage();
      text += event.delta().text();
    }
    return AllOf(
        {Ok(reader->Finish()), ExpectTrue(usage, "the last event is not the usage"), Expect("text", text, *greedy)});
  });
  report.Run("grpc.refusals", [&] {
    using grpc::StatusCode;
    return AllOf(
        {grpc.Refuses([](auto* spec) { spec->mutable_sampling()->set_temperature(-1); }, StatusCode::INVALID_ARGUMENT),
         grpc.Refuses([](auto* spec) { spec->mutable_tokens()->add_ids(0xFFFFFFFF); }, StatusCode::INVALID_ARGUMENT),
         grpc.Refuses([](auto* spec) { spec->mutable_stopping()->set_max_new_tokens(1u << 30); },
                      StatusCode::INVALID_ARGUMENT),
         grpc.Refuses([](auto* spec) { spec->clear_input(); }, StatusCode::INVALID_ARGUMENT),
         grpc.Refuses([](auto* spec) { spec->set_model("no-such-model"); }, StatusCode::NOT_FOUND)});
  });
  report.Run("grpc.deadline", [&] {
    pb::GenerateResponse reply;
    const Status status = grpc.Generate(grpc.Spec(100000), &reply, grpc.Context(std::chrono::milliseconds(100)));
    return ExpectTrue(status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
                          status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED ||
                          status.error_code() == grpc::StatusCode::INVALID_ARGUMENT,  // over a small model's limit
                      "code is " + std::to_string(status.error_code()));
  });
  report.Run("grpc.cancel", [&] {
    pb::StreamGenerateRequest request;
    *request.mutable_spec() = grpc.Spec(1000);
    const auto context = grpc.Context();
    const auto reader = grpc.generation().StreamGenerate(context.get(), request);
    pb::StreamGenerateResponse event;
    if (!reader->Read(&event)) return Ok(reader->Finish());
    context->TryCancel();
    while (reader->Read(&event)) continue;
    const Status status = reader->Finish();
    return ExpectTrue(status.ok() || status.error_code() == grpc::StatusCode::CANCELLED,
                      "code is " + std::to_string(status.error_code()));
  });
}

}  // namespace k3
