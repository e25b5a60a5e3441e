#include <grpcpp/alarm.h>

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "k3serve/inference/v1/model_service.grpc.pb.h"
#include "server/error_details.h"
#include "server/generation_service.h"
#include "server/grpc_call.h"
#include "server/grpc_info.h"
#include "server/grpc_status.h"
#include "server/version.h"

namespace k3 {
namespace {

namespace pb = k3serve::inference::v1;

pb::ServingState ToProto(ServingState state) {
  switch (state) {
    case ServingState::kLoading:
      return pb::SERVING_STATE_LOADING;
    case ServingState::kServing:
      return pb::SERVING_STATE_SERVING;
    case ServingState::kDraining:
      return pb::SERVING_STATE_DRAINING;
    case ServingState::kStalled:
      return pb::SERVING_STATE_STALLED;
  }
  return pb::SERVING_STATE_UNSPECIFIED;
}

void FillPool(pb::PoolUse* pool, int64_t used, int64_t cached, int64_t total, int64_t peak) {
  pool->set_used(static_cast<uint64_t>(used));
  pool->set_cached(static_cast<uint64_t>(cached));
  pool->set_total(static_cast<uint64_t>(total));
  pool->set_peak(static_cast<uint64_t>(peak));
}

// One WatchLoad call: report, wait, report. A write and an alarm are never pending together.
class LoadWatcher final : public grpc::ServerWriteReactor<pb::WatchLoadResponse> {
 public:
  LoadWatcher(GenerationService* generation, const ServerHealth* health, std::chrono::milliseconds interval)
      : generation_(generation), health_(health), interval_(interval) {
    Report();
  }
  // A watcher that only says what is wrong.
  explicit LoadWatcher(const grpc::Status& status) { Finish(status); }

 private:
  void Report() {
    const Clock::time_point now = Clock::now();
    response_.Clear();
    response_.set_state(ToProto(health_->State()));
    response_.set_load_percent(health_->LoadPercent());
    const auto model = generation_->model();
    const EngineLoad load = model != nullptr ? model->engine->Load() : EngineLoad();
    response_.set_running(static_cast<uint32_t>(load.running));
    response_.set_waiting(static_cast<uint32_t>(load.waiting));
    FillPool(response_.mutable_latent_pages(), load.pages_used, load.pages_cached, load.pages_total, load.pages_peak);
    FillPool(response_.mutable_state_slots(), load.state_slots_used, 0, load.state_slots_total, load.state_slots_peak);
    FillPool(response_.mutable_snapshots(), 0, load.snapshots_used, load.snapshots_total, 0);
    const double seconds = std::chrono::duration<double>(now - last_time_).count();
    if (reports_ > 0 && seconds > 0) {
      const auto rate = [seconds](uint64_t before, uint64_t after) {
        return after > before ? static_cast<double>(after - before) / seconds : 0.0;
      };
      response_.set_steps_per_second(rate(last_.steps, load.steps));
      response_.set_prompt_tokens_per_second(rate(last_.prompt_tokens, load.prompt_tokens));
      response_.set_generated_tokens_per_second(rate(last_.generated_tokens, load.generated_tokens));
    }
    response_.set_preemptions(load.preemptions);
    last_ = load;
    last_time_ = now;
    ++reports_;
    StartWrite(&response_);
  }

  void OnWriteDone(bool ok) override {
    std::unique_lock lock(mutex_);
    if (!ok || cancelled_) {
      lock.unlock();
      Finish(grpc::Status::CANCELLED);
      return;
    }
    waiting_ = true;
    alarm_.Set(std::chrono::system_clock::now() + interval_, [this](bool) { OnAlarm(); });
  }

  void OnAlarm() {
    bool cancelled = false;
    {
      std::lock_guard lock(mutex_);
      waiting_ = false;
      cancelled = cancelled_;
    }
    if (cancelled) return Finish(grpc::Status::CANCELLED);
    Report();
  }

  void OnCancel() override {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    if (waiting_) alarm_.Cancel();  // runs OnAlarm
  }

  void OnDone() override { delete this; }

  GenerationService* generation_ = nullptr;
  const ServerHealth* health_ = nullptr;
  std::chrono::milliseconds interval_{1000};
  pb::WatchLoadResponse response_;
  EngineLoad last_;
  Clock::time_point last_time_;
  int64_t reports_ = 0;
  std::mutex mutex_;
  bool waiting_ = false;    // guarded by mutex_: the alarm is set
  bool cancelled_ = false;  // guarded by mutex_
  grpc::Alarm alarm_;
};

class GrpcModelService final : public pb::ModelService::CallbackService {
 public:
  GrpcModelService(GenerationService* generation, const ServerHealth* health, const ApiKeys* keys, GrpcModelInfo info)
      : generation_(generation), health_(health), keys_(keys), info_(std::move(info)) {}

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context, const pb::ListModelsRequest*,
                                       pb::ListModelsResponse* response) override {
    return WithModel(context, [response](const ServedModel& model) {
      for (const std::string& name : model.names) {
        pb::Model* entry = response->add_models();
        entry->set_name(name);
        entry->set_root(model.root);
        entry->set_created(model.created);
        entry->set_max_model_len(static_cast<uint32_t>(model.engine->Limits().max_model_len));
      }
    });
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context, const pb::GetServerInfoRequest*,
                                          pb::GetServerInfoResponse* response) override {
    return WithModel(context, [this, response](const ServedModel& model) {
      response->set_version(kVersion);
      response->set_commit(kCommit);
      response->set_weights_version(model.weights_version);
      response->set_device(model.device);
      const EngineLimits limits = model.engine->Limits();
      pb::Limits* out = response->mutable_limits();
      out->set_vocab_size(static_cast<uint32_t>(limits.vocab_size));
      out->set_max_model_len(static_cast<uint32_t>(limits.max_model_len));
      out->set_latent_pages(static_cast<uint64_t>(limits.latent_pages));
      out->set_page_size(static_cast<uint32_t>(limits.page_size));
      out->set_state_slots(static_cast<uint32_t>(limits.state_slots));
      out->set_snapshot_slots(static_cast<uint32_t>(limits.snapshot_slots));
      out->set_max_num_seqs(static_cast<uint32_t>(limits.max_num_seqs));
      out->set_max_queue(static_cast<uint32_t>(limits.max_queue));
      response->set_max_message_mib(static_cast<uint32_t>(info_.max_message_mib));
      response->set_default_effort(DefaultEffort(model));
      response->set_uptime_seconds(std::chrono::duration<double>(Clock::now() - start_).count());
    });
  }

  grpc::ServerWriteReactor<pb::WatchLoadResponse>* WatchLoad(grpc::CallbackServerContext* context,
                                                             const pb::WatchLoadRequest* request) override {
    absl::Status status = Authorize(*keys_, *context);
    const uint32_t interval = request->has_interval_ms() ? request->interval_ms() : 1000;
    if (status.ok() && (interval < 100 || interval > 60000)) {
      status = InvalidField("interval_ms", absl::StrCat("must be from 100 to 60000, not ", interval));
    }
    if (!status.ok()) return new LoadWatcher(ToGrpcStatus(status));
    return new LoadWatcher(generation_, health_, std::chrono::milliseconds(interval));
  }

 private:
  // What a request gets that names no effort.
  std::string DefaultEffort(const ServedModel& model) const {
    if (!info_.default_effort.empty()) return info_.default_effort;
    return model.renderer->format() == ChatFormat::kXtml ? "max" : "none";
  }

  template <class Fill>
  grpc::ServerUnaryReactor* WithModel(grpc::CallbackServerContext* context, const Fill& fill) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::Status status = Authorize(*keys_, *context);
    const auto model = generation_->model();
    if (status.ok() && model == nullptr) status = UnavailableFor("loading", "the model is loading", absl::Seconds(2));
    if (status.ok()) fill(*model);
    FinishUnary(context, reactor, status);
    return reactor;
  }

  GenerationService* const generation_;
  const ServerHealth* const health_;
  const ApiKeys* const keys_;
  const GrpcModelInfo info_;
  const Clock::time_point start_ = Clock::now();
};

}  // namespace

std::unique_ptr<grpc::Service> MakeGrpcModelService(GenerationService* generation, const ServerHealth* health,
                                                    const ApiKeys* keys, GrpcModelInfo info) {
  return std::make_unique<GrpcModelService>(generation, health, keys, std::move(info));
}

}  // namespace k3
