#include "server/commands/bench_grpc_client.h"

#include <grpcpp/create_channel.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "k3serve/inference/v1/model_service.grpc.pb.h"

namespace k3 {
namespace {

namespace v1 = ::k3serve::inference::v1;

constexpr auto kConnectTimeout = std::chrono::seconds(10);

void ShowKey(const BenchConfig& config, grpc::ClientContext* context) {
  if (!config.access.key().empty()) context->AddMetadata("authorization", "Bearer " + config.access.key());
}

void FillSpec(const BenchConfig& config, const BenchRequest& request, const std::string& model,
              v1::GenerationSpec* spec) {
  spec->set_model(model);
  if (!request.prompt_tokens.empty()) {
    auto& ids = *spec->mutable_tokens()->mutable_ids();
    ids.Reserve(static_cast<int>(request.prompt_tokens.size()));
    for (const int32_t id : request.prompt_tokens) ids.Add(static_cast<uint32_t>(id));
  } else if (config.input == BenchInput::kChat) {
    v1::ChatMessage* message = spec->mutable_chat()->add_messages();
    message->set_role(v1::ROLE_USER);
    message->add_content()->set_text(request.prompt_text);
  } else {
    spec->mutable_prompt()->add_segments()->set_text(request.prompt_text);
  }
  spec->mutable_sampling()->set_temperature(static_cast<float>(config.temperature));
  spec->mutable_sampling()->set_seed(request.seed);
  spec->mutable_stopping()->set_max_new_tokens(static_cast<uint32_t>(request.max_tokens));
  spec->mutable_stopping()->set_ignore_eos(config.ignore_eos);
  spec->mutable_output()->set_token_ids(true);
  spec->mutable_cache()->set_bypass(config.bypass_prefix_cache);
}

const char* CodeName(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK:
      return "OK";
    case grpc::StatusCode::CANCELLED:
      return "CANCELLED";
    case grpc::StatusCode::UNKNOWN:
      return "UNKNOWN";
    case grpc::StatusCode::INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::NOT_FOUND:
      return "NOT_FOUND";
    case grpc::StatusCode::ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case grpc::StatusCode::PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case grpc::StatusCode::FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case grpc::StatusCode::ABORTED:
      return "ABORTED";
    case grpc::StatusCode::OUT_OF_RANGE:
      return "OUT_OF_RANGE";
    case grpc::StatusCode::UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    case grpc::StatusCode::INTERNAL:
      return "INTERNAL";
    case grpc::StatusCode::UNAVAILABLE:
      return "UNAVAILABLE";
    case grpc::StatusCode::DATA_LOSS:
      return "DATA_LOSS";
    case grpc::StatusCode::UNAUTHENTICATED:
      return "UNAUTHENTICATED";
    default:
      return "unknown code";
  }
}

absl::Status ToAbsl(const std::string& what, const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      absl::StrCat(what, ": ", CodeName(status.error_code()), ": ", status.error_message()));
}

}  // namespace

// One call; deletes itself when the library is done with it.
class BenchGrpcClient::Exchange : public grpc::ClientReadReactor<v1::StreamGenerateResponse> {
 public:
  Exchange(BenchGrpcClient* client, const BenchRequest& request, Done done) : client_(client), done_(std::move(done)) {
    record_.index = request.index;
    record_.kind = request.kind;
    FillSpec(client_->config_, request, client_->model_, request_.mutable_spec());
  }

  void Start(v1::GenerationService::Stub* stub) {
    record_.sent = Clock::now();
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::duration_cast<std::chrono::system_clock::duration>(
                              std::chrono::duration<double>(client_->config_.timeout_seconds)));
    ShowKey(client_->config_, &context_);
    stub->async()->StreamGenerate(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const Clock::time_point now = Clock::now();
    switch (response_.event_case()) {
      case v1::StreamGenerateResponse::kAccepted:
        record_.prompt_tokens = static_cast<int32_t>(response_.accepted().prompt_tokens());
        record_.cached_tokens = static_cast<int32_t>(response_.accepted().cached_tokens());
        break;
      case v1::StreamGenerateResponse::kDelta:
        if (response_.delta().token_ids_size() > 0) {
          record_.arrivals.push_back({now, static_cast<int32_t>(response_.delta().token_ids_size())});
        }
        break;
      case v1::StreamGenerateResponse::kUsage:
        complete_ = true;
        break;
      default:
        break;
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    record_.finished = Clock::now();
    if (!status.ok()) {
      record_.error = CodeName(status.error_code());
    } else if (!complete_) {
      record_.error = "stream without usage";
    }
    BenchGrpcClient* const client = client_;
    done_(std::move(record_));
    delete this;
    const std::lock_guard<std::mutex> lock(client->mutex_);
    if (--client->in_flight_ == 0) client->idle_.notify_all();
  }

 private:
  BenchGrpcClient* const client_;
  const Done done_;
  grpc::ClientContext context_;
  v1::StreamGenerateRequest request_;
  v1::StreamGenerateResponse response_;
  RequestRecord record_;
  bool complete_ = false;
};

BenchGrpcClient::BenchGrpcClient(const BenchConfig& config) : config_(config) {}

BenchGrpcClient::~BenchGrpcClient() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return in_flight_ == 0; });
}

absl::StatusOr<BenchServerInfo> BenchGrpcClient::Prepare() {
  for (int64_t i = 0; i < config_.connections; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // else equal channels share one connection
    arguments.SetMaxReceiveMessageSize(-1);
    channels_.push_back(grpc::CreateCustomChannel(config_.target, config_.access.ChannelCredentials(), arguments));
    stubs_.push_back(v1::GenerationService::NewStub(channels_.back()));
  }
  for (const auto& channel : channels_) {
    if (!channel->WaitForConnected(std::chrono::system_clock::now() + kConnectTimeout)) {
      return absl::UnavailableError(absl::StrCat("cannot connect to ", config_.target, " within 10 s"));
    }
  }
  BenchServerInfo info;
  const auto stub = v1::ModelService::NewStub(channels_[0]);
  {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kConnectTimeout);
    ShowKey(config_, &context);
    v1::GetServerInfoResponse response;
    const grpc::Status status = stub->GetServerInfo(&context, v1::GetServerInfoRequest(), &response);
    if (!status.ok()) return ToAbsl("GetServerInfo", status);
    info.server = absl::StrCat("k3serve ", response.version(), " on ", response.device());
    info.vocab_size = static_cast<int32_t>(response.limits().vocab_size());
  }
  model_ = config_.model;
  if (model_.empty()) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kConnectTimeout);
    ShowKey(config_, &context);
    v1::ListModelsResponse response;
    const grpc::Status status = stub->ListModels(&context, v1::ListModelsRequest(), &response);
    if (!status.ok()) return ToAbsl("ListModels", status);
    if (response.models_size() == 0) return absl::NotFoundError("ListModels: the server serves no model");
    model_ = response.models(0).name();
  }
  info.model = model_;
  return info;
}

void BenchGrpcClient::Send(const BenchRequest& request, Done done) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++in_flight_;
  }
  auto* exchange = new Exchange(this, request, std::move(done));
  exchange->Start(stubs_[next_stub_++ % stubs_.size()].get());
}

}  // namespace k3
