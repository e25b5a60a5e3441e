#include "server/grpc_generation.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "server/api_keys.h"
#include "server/error_details.h"
#include "server/generation_service.h"
#include "server/grpc_call.h"
#include "server/grpc_convert.h"
#include "server/grpc_generation_call.h"
#include "server/grpc_status.h"
#include "server/version.h"
#include "server/worker_pool.h"

namespace k3 {
namespace {

void AddInitialMetadata(grpc::CallbackServerContext* context, const AcceptedEvent& accepted,
                        const TraceContext& trace) {
  if (trace.active()) context->AddInitialMetadata("traceparent", trace.Header());
  context->AddInitialMetadata("x-request-id", accepted.request_id);
  context->AddInitialMetadata("k3serve-version", kVersion);
  context->AddInitialMetadata("k3serve-weights-version", accepted.weights_version);
}

void AddUsageTrailers(grpc::CallbackServerContext* context, const RequestUsage& usage) {
  const auto ms = [](double seconds) { return absl::StrFormat("%.3f", seconds * 1000); };
  context->AddTrailingMetadata("k3serve-queue-ms", ms(usage.queue_seconds));
  context->AddTrailingMetadata("k3serve-prefill-ms", ms(usage.prefill_seconds));
  context->AddTrailingMetadata("k3serve-decode-ms", ms(usage.decode_seconds));
  context->AddTrailingMetadata("k3serve-prompt-tokens", absl::StrCat(usage.prompt_tokens));
  context->AddTrailingMetadata("k3serve-cached-tokens", absl::StrCat(usage.cached_tokens));
  context->AddTrailingMetadata("k3serve-completion-tokens", absl::StrCat(usage.completion_tokens));
  if (usage.routing_rank >= 0) {
    context->AddTrailingMetadata("k3serve-routing-epoch", absl::StrCat(usage.routing_rank, ".", usage.routing_epoch));
  }
}

class StreamCall final : public GrpcGenerationCall, public grpc::ServerWriteReactor<pb::StreamGenerateResponse> {
 public:
  using GrpcGenerationCall::GrpcGenerationCall;

  static grpc::ServerWriteReactor<pb::StreamGenerateResponse>* Start(GenerationService* generation, WorkerPool* pump,
                                                                     GrpcCallList* list, const ApiKeys& keys,
                                                                     grpc::CallbackServerContext* context,
                                                                     const pb::StreamGenerateRequest& request) {
    auto call = std::make_shared<StreamCall>("StreamGenerate", generation, pump, context);
    call->list_ = list;
    list->Add(call);
    call->Begin(keys, request.spec());
    return call.get();
  }

  void EndIfStalled(Clock::duration limit) override {
    if (!ClaimFinishOfStalled(limit)) return;
    Log(absl::StatusCode::kResourceExhausted, UsageSoFar());
    DropRequest();
    ErrorDetails details;
    details.reason = "slow_reader";
    const double seconds = std::chrono::duration<double>(limit).count();
    const absl::Status status =
        absl::ResourceExhaustedError(absl::StrFormat("the reader took nothing for %g s", seconds));
    // The trailers leave behind the message that waits, should the reader go on.
    Finish(ToGrpcStatus(WithDetails(status, details), request_id_));
  }

 private:
  // While a write is in flight its end will drain, unless the text must be watched for a stop.
  bool WantsEvents() override { return eager_.load() || !writing(); }

  void Send(ResponseStream* stream) override {
    eager_.store(stream->drain_eagerly());
    // A claim is always followed by a write, whose end drains again: events that come meanwhile need no wake-up.
    if (!stream->Ready() || !ClaimWrite()) return;
    StreamEvent event;
    stream->Next(&event);
    if (auto* finish = std::get_if<FinishedEvent>(&event)) {
      FinishInsteadOfWrite();
      Log(finish->status.code(), finish->usage);
      AddUsageTrailers(context_, finish->usage);
      if (!finish->status.ok()) {
        Finish(GrpcRefusal(context_, finish->status, request_id_, trace_));
      } else {
        response_.Clear();
        ToProto(*finish, response_.mutable_usage());
        StartWriteAndFinish(&response_, grpc::WriteOptions(), grpc::Status::OK);
      }
      return;
    }
    Fill(std::move(event));
    StartWrite(&response_);
  }

  void Fill(StreamEvent&& event) {
    response_.Clear();
    if (auto* accepted = std::get_if<AcceptedEvent>(&event)) {
      AddInitialMetadata(context_, *accepted, trace_);
      ToProto(*accepted, response_.mutable_accepted());
    } else if (auto* prefill = std::get_if<PrefillEvent>(&event)) {
      response_.mutable_prefill()->set_done(static_cast<uint32_t>(prefill->done));
      response_.mutable_prefill()->set_total(static_cast<uint32_t>(prefill->total));
    } else if (auto* prompt = std::get_if<PromptLogprobsEvent>(&event)) {
      ToProto(prompt->rows, response_.mutable_prompt_logprobs());
    } else if (auto* delta = std::get_if<DeltaEvent>(&event)) {
      ToProto(std::move(*delta), response_.mutable_delta());
    } else if (auto* call = std::get_if<ToolCallEvent>(&event)) {
      ToProto(std::move(*call), response_.mutable_tool_call());
    } else {
      ToProto(std::get<ChoiceFinishedEvent>(event), response_.mutable_finished());
    }
  }

  void SendFinish(const grpc::Status& status) override { Finish(status); }

  void OnWriteDone(bool ok) override {
    if (!ok) CancelRequest();
    if (ReleaseWrite()) return FinishCancelled();
    Drive();
  }

  void OnCancel() override {
    CancelRequest();
    if (ClaimFinish()) FinishCancelled();
  }

  void OnDone() override {
    list_->Remove(this);
    Release();
  }

  GrpcCallList* list_ = nullptr;
  pb::StreamGenerateResponse response_;  // belongs to the claimed write
  std::atomic<bool> eager_{false};
};

class UnaryCall final : public GrpcGenerationCall, public grpc::ServerUnaryReactor {
 public:
  using GrpcGenerationCall::GrpcGenerationCall;

  static grpc::ServerUnaryReactor* Start(GenerationService* generation, WorkerPool* pump, GrpcCallList* list,
                                         const ApiKeys& keys, grpc::CallbackServerContext* context,
                                         const pb::GenerateRequest& request, pb::GenerateResponse* response) {
    auto call = std::make_shared<UnaryCall>("Generate", generation, pump, context);
    call->response_ = response;
    call->list_ = list;
    list->Add(call);
    call->Begin(keys, request.spec());
    return call.get();
  }

 private:
  bool WantsEvents() override { return true; }

  void Send(ResponseStream* stream) override {
    StreamEvent event;
    while (stream->Next(&event)) Collect(std::move(event));
  }

  void EndIfStalled(Clock::duration) override {}

  pb::Choice* ChoiceAt(int32_t index) {
    while (reply_.choices_size() <= index) {
      pb::Choice* choice = reply_.add_choices();
      choice->set_index(static_cast<uint32_t>(reply_.choices_size() - 1));
    }
    return reply_.mutable_choices(index);
  }

  void Collect(StreamEvent&& event) {
    if (auto* accepted = std::get_if<AcceptedEvent>(&event)) {
      accepted_ = *accepted;
      ToProto(*accepted, reply_.mutable_accepted());
    } else if (auto* prompt = std::get_if<PromptLogprobsEvent>(&event)) {
      ToProto(prompt->rows, reply_.mutable_prompt_logprobs());
    } else if (auto* delta = std::get_if<DeltaEvent>(&event)) {
      pb::Choice* choice = ChoiceAt(delta->choice);
      if (delta->channel == OutputChannel::kReasoning) {
        choice->mutable_reasoning()->append(delta->text);
      } else {
        choice->mutable_content()->append(delta->text);
      }
      choice->mutable_token_ids()->Add(delta->token_ids.begin(), delta->token_ids.end());
      if (!delta->logprobs.token_ids.empty()) ToProto(delta->logprobs, choice->mutable_logprobs());
      choice->mutable_undecoded()->append(delta->undecoded);
    } else if (auto* piece = std::get_if<ToolCallEvent>(&event)) {
      pb::Choice* choice = ChoiceAt(piece->choice);
      while (choice->tool_calls_size() <= piece->index) choice->add_tool_calls();
      pb::ToolCall* call = choice->mutable_tool_calls(piece->index);
      call->mutable_id()->append(piece->id);
      call->mutable_name()->append(piece->name);
      call->mutable_arguments()->append(piece->arguments);
    } else if (auto* finished = std::get_if<ChoiceFinishedEvent>(&event)) {
      ToProto(*finished, ChoiceAt(finished->choice)->mutable_finished());
    } else if (auto* finish = std::get_if<FinishedEvent>(&event)) {
      if (!ClaimFinish()) return;
      Log(finish->status.code(), finish->usage);
      AddUsageTrailers(context_, finish->usage);
      if (!finish->status.ok()) return Finish(GrpcRefusal(context_, finish->status, request_id_, trace_));
      AddInitialMetadata(context_, accepted_, trace_);
      ToProto(*finish, reply_.mutable_usage());
      response_->Swap(&reply_);
      Finish(grpc::Status::OK);
    }
  }

  void SendFinish(const grpc::Status& status) override { Finish(status); }

  void OnCancel() override {
    CancelRequest();
    if (ClaimFinish()) FinishCancelled();
  }

  void OnDone() override {
    list_->Remove(this);
    Release();
  }

  GrpcCallList* list_ = nullptr;
  pb::GenerateResponse* response_ = nullptr;  // gRPC's; touched by whoever has claimed the finish
  pb::GenerateResponse reply_;
  AcceptedEvent accepted_;
};

class GrpcGenerationService final : public pb::GenerationService::CallbackService {
 public:
  GrpcGenerationService(k3::GenerationService* generation, const ApiKeys* keys, const GrpcGenerationOptions& options)
      : generation_(generation), keys_(keys), options_(options), calls_(options.calls), pump_(options.pump_threads) {
    sweeper_ = std::thread([this] { Sweep(); });
  }

  ~GrpcGenerationService() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    sweeper_.join();
  }

  grpc::ServerUnaryReactor* Generate(grpc::CallbackServerContext* context, const pb::GenerateRequest* request,
                                     pb::GenerateResponse* response) override {
    return UnaryCall::Start(generation_, &pump_, &calls_, *keys_, context, *request, response);
  }

  grpc::ServerWriteReactor<pb::StreamGenerateResponse>* StreamGenerate(
      grpc::CallbackServerContext* context, const pb::StreamGenerateRequest* request) override {
    return StreamCall::Start(generation_, &pump_, &calls_, *keys_, context, *request);
  }

 private:
  void Sweep() {
    std::unique_lock lock(mutex_);
    const auto interval = std::min<std::chrono::milliseconds>(options_.write_stall_limit / 4, std::chrono::seconds(1));
    while (!stopping_) {
      wake_.wait_for(lock, interval);
      lock.unlock();
      for (const auto& call : calls_.All()) call->EndIfStalled(options_.write_stall_limit);
      lock.lock();
    }
  }

  k3::GenerationService* const generation_;
  const ApiKeys* const keys_;
  const GrpcGenerationOptions options_;
  GrpcCallList calls_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread sweeper_;
  WorkerPool pump_;  // ends first: its tasks use all of the above
};

}  // namespace

std::unique_ptr<grpc::Service> MakeGrpcGenerationService(GenerationService* generation, const ApiKeys* keys,
                                                         const GrpcGenerationOptions& options) {
  return std::make_unique<GrpcGenerationService>(generation, keys, options);
}

}  // namespace k3
