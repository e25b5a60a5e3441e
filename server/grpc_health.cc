#include "server/grpc_health.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/error_details.h"
#include "server/health.h"

namespace k3 {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

HealthCheckResponse::ServingStatus StatusOf(ServingState state) {
  return state == ServingState::kServing ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

// One Watch call. Holds itself until gRPC is done with it; the listener holds it weakly.
class Watcher : public grpc::ServerWriteReactor<HealthCheckResponse>, public std::enable_shared_from_this<Watcher> {
 public:
  // An unknown service may yet appear, says the protocol: the stream stays open.
  static Watcher* Start(ServerHealth* health, bool known_service) {
    auto watcher = std::make_shared<Watcher>();
    watcher->self_ = watcher;
    watcher->health_ = health;
    if (known_service) {
      watcher->subscription_ = health->Subscribe([weak = std::weak_ptr<Watcher>(watcher)](ServingState) {
        if (const auto self = weak.lock()) self->Push();
      });
    }
    watcher->known_service_ = known_service;
    watcher->Push();
    return watcher.get();
  }

 private:
  // Sends the present status unless the last one sent is the same; one write at a time.
  void Push() {
    {
      std::lock_guard lock(mutex_);
      if (writing_ || finished_) return;
      const auto status = known_service_ ? StatusOf(health_->State()) : HealthCheckResponse::SERVICE_UNKNOWN;
      if (sent_any_ && response_.status() == status) return;
      response_.set_status(status);
      sent_any_ = true;
      writing_ = true;
    }
    StartWrite(&response_);
  }

  void OnWriteDone(bool ok) override {
    bool finish = false;
    {
      std::lock_guard lock(mutex_);
      writing_ = false;
      finish = (!ok || cancelled_) && !std::exchange(finished_, true);
    }
    finish ? Finish(grpc::Status::CANCELLED) : Push();
  }

  void OnCancel() override {
    bool finish = false;
    {
      std::lock_guard lock(mutex_);
      cancelled_ = true;
      finish = !writing_ && !std::exchange(finished_, true);
    }
    if (finish) Finish(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    if (known_service_) health_->Unsubscribe(subscription_);
    self_.reset();
  }

  std::shared_ptr<Watcher> self_;
  ServerHealth* health_ = nullptr;
  int subscription_ = 0;
  bool known_service_ = true;
  std::mutex mutex_;
  HealthCheckResponse response_;  // guarded by mutex_ unless writing_
  bool sent_any_ = false;         // guarded by mutex_, as all below
  bool writing_ = false;
  bool cancelled_ = false;
  bool finished_ = false;
};

class HealthService : public grpc::health::v1::Health::CallbackService {
 public:
  HealthService(ServerHealth* health, std::vector<std::string> services)
      : health_(health), services_(std::move(services)) {}

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context, const HealthCheckRequest* request,
                                  HealthCheckResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (!Knows(request->service())) {
      reactor->Finish(
          grpc::Status(grpc::StatusCode::NOT_FOUND, absl::StrCat("no service called ", Excerpt(request->service()))));
      return reactor;
    }
    response->set_status(StatusOf(health_->State()));
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerWriteReactor<HealthCheckResponse>* Watch(grpc::CallbackServerContext*,
                                                       const HealthCheckRequest* request) override {
    return Watcher::Start(health_, Knows(request->service()));
  }

 private:
  bool Knows(const std::string& service) const {
    return service.empty() || std::find(services_.begin(), services_.end(), service) != services_.end();
  }

  ServerHealth* const health_;
  const std::vector<std::string> services_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeHealthService(ServerHealth* health, std::vector<std::string> services) {
  return std::make_unique<HealthService>(health, std::move(services));
}

}  // namespace k3
