#pragma once

#include <grpcpp/server_context.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/api_keys.h"
#include "server/generation_service.h"
#include "server/grpc_call.h"
#include "server/grpc_convert.h"
#include "server/grpc_status.h"
#include "server/trace_context.h"
#include "server/worker_pool.h"

namespace k3 {

// A status with its trailers. Nothing goes into initial metadata, so that the client library may still retry.
inline grpc::Status GrpcRefusal(grpc::CallbackServerContext* context, const absl::Status& status,
                                const std::string& request_id, const TraceContext& trace) {
  if (trace.active()) context->AddTrailingMetadata("traceparent", trace.Header());
  context->AddTrailingMetadata("x-request-id", request_id);
  const std::string pushback = RetryPushback(status);
  if (!pushback.empty()) context->AddTrailingMetadata("grpc-retry-pushback-ms", pushback);
  return ToGrpcStatus(status, request_id, "spec.");
}

// What unary and streaming calls share: starting the request, and draining its stream on one thread at a time.
//
// Lifetime: gRPC reactors end with OnDone, the engine's notifications may come later; so a call is held by itself until
// OnDone, and by whoever drains it.
class GrpcGenerationCall : public std::enable_shared_from_this<GrpcGenerationCall> {
 public:
  GrpcGenerationCall(const char* method, GenerationService* generation, WorkerPool* pump,
                     grpc::CallbackServerContext* context)
      : method_(method),
        generation_(generation),
        pump_(pump),
        context_(context),
        cancelled_(std::make_shared<std::atomic<bool>>(false)) {}
  virtual ~GrpcGenerationCall() = default;

  // Ends a stream whose write has not ended for this long.
  virtual void EndIfStalled(Clock::duration limit) = 0;

 protected:
  void Begin(const ApiKeys& keys, const pb::GenerationSpec& spec) {
    self_ = shared_from_this();
    request_id_ = RequestIdOf(*context_);
    trace_ = generation_->TraceOf(MetadataOf(*context_, "traceparent"));
    uint64_t caller = 0;
    absl::Status status = Authorize(keys, *context_, &caller);
    if (!status.ok()) return OnStarted(status);
    absl::StatusOr<GenerationRequest> request = FromProto(spec);
    if (!request.ok()) {
      generation_->CountRefusal(request.status());
      return OnStarted(request.status());
    }
    request->request_id = request_id_;
    request->caller = caller;
    request->trace = trace_;
    request->deadline = DeadlineOf(*context_);
    if (!request->deadline.has_value()) spdlog::debug("grpc request={} has no deadline", request_id_);
    generation_->Start(*std::move(request), cancelled_,
                       [self = shared_from_this()](absl::StatusOr<std::shared_ptr<ResponseStream>> stream) {
                         self->OnStarted(std::move(stream));
                       });
  }

  void OnStarted(absl::StatusOr<std::shared_ptr<ResponseStream>> stream) {
    if (!stream.ok()) {
      if (!ClaimFinish()) return;
      Log(stream.status().code(), {});
      SendFinish(GrpcRefusal(context_, stream.status(), request_id_, trace_));
      return;
    }
    {
      std::lock_guard lock(mutex_);
      stream_ = *stream;
    }
    if (cancelled_->load()) (*stream)->Cancel();
    (*stream)->SetNotify([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->OnEvents();
    });
  }

  // Any thread, mostly the engine's: work goes to the pump.
  void OnEvents() {
    if (!WantsEvents()) return;
    pump_->Post([self = shared_from_this()] { self->Drive(); });
  }

  // Drains the stream and sends what can be sent, on one thread at a time.
  void Drive() {
    std::shared_ptr<ResponseStream> stream;
    {
      std::lock_guard lock(mutex_);
      if (driving_) {
        drive_again_ = true;
        return;
      }
      if (stream_ == nullptr) return;
      driving_ = true;
      stream = stream_;
    }
    while (true) {
      stream->Drain();
      Send(stream.get());
      std::lock_guard lock(mutex_);
      if (!std::exchange(drive_again_, false)) {
        driving_ = false;
        return;
      }
    }
  }

  // The one line of this call, from whoever has claimed its finish.
  void Log(absl::StatusCode code, const RequestUsage& usage) const {
    spdlog::info(
        "grpc request={} method={} status={} prompt_tokens={} cached_tokens={} completion_tokens={} seconds={:.3f}{}",
        request_id_, method_, absl::StatusCodeToString(code), usage.prompt_tokens, usage.cached_tokens,
        usage.completion_tokens, std::chrono::duration<double>(Clock::now() - arrival_).count(), trace_.LogField());
  }

  RequestUsage UsageSoFar() {
    std::lock_guard lock(mutex_);
    return stream_ == nullptr ? RequestUsage() : stream_->UsageSoFar();
  }

  // The client has gone: the engine hears of it before this returns.
  void CancelRequest() {
    cancelled_->store(true);
    std::shared_ptr<ResponseStream> stream;
    {
      std::lock_guard lock(mutex_);
      stream = stream_;
    }
    if (stream != nullptr) stream->Cancel();
  }

  // At most one write is in flight, and nothing is begun after the call was finished: whoever wants to do either claims
  // it first.
  bool ClaimWrite() {
    std::lock_guard lock(op_mutex_);
    if (writing_ || finished_) return false;
    writing_ = true;
    write_start_ = Clock::now();
    return true;
  }
  // The write has ended. True when the call was cancelled meanwhile and the caller must finish it.
  bool ReleaseWrite() {
    std::lock_guard lock(op_mutex_);
    writing_ = false;
    return cancelled_->load() && !std::exchange(finished_, true);
  }
  // The claimed write becomes the end of the call.
  void FinishInsteadOfWrite() {
    std::lock_guard lock(op_mutex_);
    finished_ = true;
  }
  // False also while a write is in flight: its end will finish a cancelled call.
  bool ClaimFinish() {
    std::lock_guard lock(op_mutex_);
    return !writing_ && !std::exchange(finished_, true);
  }
  bool ClaimFinishOfStalled(Clock::duration limit) {
    std::lock_guard lock(op_mutex_);
    return writing_ && Clock::now() - write_start_ >= limit && !std::exchange(finished_, true);
  }
  bool writing() {
    std::lock_guard lock(op_mutex_);
    return writing_;
  }

  // The same, and lets go of what waits: the call itself may live on until the reader takes its end.
  void DropRequest() {
    CancelRequest();
    std::shared_ptr<ResponseStream> stream;  // ends outside the lock
    std::lock_guard lock(mutex_);
    stream = std::move(stream_);
  }

  // gRPC is done with the reactor.
  void Release() {
    CancelRequest();
    self_.reset();
  }

  void FinishCancelled() {
    Log(absl::StatusCode::kCancelled, UsageSoFar());
    SendFinish(grpc::Status::CANCELLED);
  }

  virtual void SendFinish(const grpc::Status& status) = 0;
  virtual bool WantsEvents() = 0;
  virtual void Send(ResponseStream* stream) = 0;

  const char* const method_;
  GenerationService* const generation_;
  WorkerPool* const pump_;
  grpc::CallbackServerContext* const context_;
  const GenerationService::CancelFlag cancelled_;
  std::string request_id_;
  TraceContext trace_;
  const Clock::time_point arrival_ = Clock::now();

 private:
  std::shared_ptr<GrpcGenerationCall> self_;
  std::mutex op_mutex_;
  bool writing_ = false;  // guarded by op_mutex_, as the next two
  bool finished_ = false;
  Clock::time_point write_start_;
  std::mutex mutex_;
  std::shared_ptr<ResponseStream> stream_;  // guarded by mutex_, as all below
  bool driving_ = false;
  bool drive_again_ = false;
};

// Calls in progress, for the stall sweeper and for a shutdown that lets them say their last words.
class GrpcCallList {
 public:
  explicit GrpcCallList(std::atomic<int>* count) : count_(count) {}

  void Add(const std::shared_ptr<GrpcGenerationCall>& call) {
    std::lock_guard lock(mutex_);
    calls_[call.get()] = call;
    if (count_ != nullptr) count_->fetch_add(1);
  }
  void Remove(GrpcGenerationCall* call) {
    std::lock_guard lock(mutex_);
    calls_.erase(call);
    if (count_ != nullptr) count_->fetch_sub(1);
  }
  std::vector<std::shared_ptr<GrpcGenerationCall>> All() {
    std::vector<std::shared_ptr<GrpcGenerationCall>> all;
    std::lock_guard lock(mutex_);
    for (const auto& [call, weak] : calls_) {
      if (auto held = weak.lock()) all.push_back(std::move(held));
    }
    return all;
  }

 private:
  std::atomic<int>* const count_;
  std::mutex mutex_;
  std::unordered_map<GrpcGenerationCall*, std::weak_ptr<GrpcGenerationCall>> calls_;  // guarded by mutex_
};

}  // namespace k3
