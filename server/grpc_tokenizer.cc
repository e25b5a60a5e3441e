#include <utility>

#include "k3serve/inference/v1/tokenizer_service.grpc.pb.h"
#include "server/generation_service.h"
#include "server/grpc_call.h"
#include "server/grpc_convert.h"
#include "server/grpc_info.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

// A unary reactor that finishes on whatever thread the text work ends.
template <class Response>
GenerationService::IdsDone FillIds(grpc::CallbackServerContext* context, grpc::ServerUnaryReactor* reactor,
                                   Response* response) {
  return [context, reactor, response](absl::StatusOr<std::vector<int32_t>> ids) {
    if (ids.ok()) {
      response->mutable_token_ids()->Add(ids->begin(), ids->end());
      response->set_count(static_cast<uint32_t>(ids->size()));
    }
    FinishUnary(context, reactor, ids.status());
  };
}

class GrpcTokenizerService final : public pb::TokenizerService::CallbackService {
 public:
  GrpcTokenizerService(GenerationService* generation, const ApiKeys* keys) : generation_(generation), keys_(keys) {}

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const pb::TokenizeRequest* request,
                                     pb::TokenizeResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Status status = Authorize(*keys_, *context);
    if (!status.ok()) {
      FinishUnary(context, reactor, status);
    } else {
      generation_->Tokenize(request->model(), request->text(), request->control_tokens(),
                            FillIds(context, reactor, response));
    }
    return reactor;
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context, const pb::DetokenizeRequest* request,
                                       pb::DetokenizeResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::Status status = Authorize(*keys_, *context);
    if (status.ok()) {
      const std::vector<uint32_t> ids(request->token_ids().begin(), request->token_ids().end());
      absl::StatusOr<std::string> bytes =
          generation_->Detokenize(request->model(), ids, request->skip_control_tokens());
      status = bytes.status();
      if (bytes.ok()) {
        response->set_text(SanitizeUtf8(*bytes));
        response->set_raw(*std::move(bytes));
      }
    }
    FinishUnary(context, reactor, status);
    return reactor;
  }

  grpc::ServerUnaryReactor* RenderChat(grpc::CallbackServerContext* context, const pb::RenderChatRequest* request,
                                       pb::RenderChatResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::Status status = Authorize(*keys_, *context);
    absl::StatusOr<ChatRequest> chat = FromProto(request->chat());
    if (status.ok()) status = chat.status();
    absl::StatusOr<RequestedReasoning> reasoning = FromProto(request->reasoning());
    if (status.ok()) status = reasoning.status();
    if (!status.ok()) {
      FinishUnary(context, reactor, status);
      return reactor;
    }
    GenerationRequest generation;
    generation.model = request->model();
    generation.input = *std::move(chat);
    generation.reasoning = *std::move(reasoning);
    generation.constraint = FromProto(request->constraint());
    generation_->Render(std::move(generation), FillIds(context, reactor, response));
    return reactor;
  }

 private:
  GenerationService* const generation_;
  const ApiKeys* const keys_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeGrpcTokenizerService(GenerationService* generation, const ApiKeys* keys) {
  return std::make_unique<GrpcTokenizerService>(generation, keys);
}

}  // namespace k3
