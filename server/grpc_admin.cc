#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "k3serve/inference/v1/admin_service.grpc.pb.h"
#include "server/error_details.h"
#include "server/generation_service.h"
#include "server/grpc_call.h"
#include "server/grpc_info.h"

namespace k3 {
namespace {

namespace pb = k3serve::inference::v1;

struct LevelPair {
  pb::LogLevel wire;
  spdlog::level::level_enum log;
};
constexpr LevelPair kLevels[] = {{pb::LOG_LEVEL_TRACE, spdlog::level::trace},
                                 {pb::LOG_LEVEL_DEBUG, spdlog::level::debug},
                                 {pb::LOG_LEVEL_INFO, spdlog::level::info},
                                 {pb::LOG_LEVEL_WARN, spdlog::level::warn},
                                 {pb::LOG_LEVEL_ERROR, spdlog::level::err}};

constexpr char kNoProfile[] = "this server profiles no steps";

class GrpcAdminService final : public pb::AdminService::CallbackService {
 public:
  GrpcAdminService(GenerationService* generation, const ApiKeys* keys, AdminActions actions)
      : generation_(generation), keys_(keys), actions_(std::move(actions)) {}

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const pb::DrainRequest*,
                                  pb::DrainResponse* response) override {
    return Do(context, [this, response] {
      spdlog::info("drain asked for by an admin call");
      actions_.drain();
      if (const auto model = generation_->model()) {
        const EngineLoad load = model->engine->Load();
        response->set_running(static_cast<uint32_t>(load.running));
        response->set_waiting(static_cast<uint32_t>(load.waiting));
      }
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* FlushCache(grpc::CallbackServerContext* context, const pb::FlushCacheRequest*,
                                       pb::FlushCacheResponse*) override {
    return Do(context, [this] {
      const auto model = generation_->model();
      if (model == nullptr) return UnavailableFor("loading", "the model is loading", absl::Seconds(2));
      model->engine->FlushCache();
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* SetLogLevel(grpc::CallbackServerContext* context, const pb::SetLogLevelRequest* request,
                                        pb::SetLogLevelResponse* response) override {
    return Do(context, [request, response] {
      for (const LevelPair& level : kLevels) {
        if (level.wire != request->level()) continue;
        for (const LevelPair& previous : kLevels) {
          if (previous.log == spdlog::get_level()) response->set_previous(previous.wire);
        }
        spdlog::set_level(level.log);
        return absl::OkStatus();
      }
      return InvalidField("level", absl::StrCat("names no log level: ", static_cast<int>(request->level())));
    });
  }

  grpc::ServerUnaryReactor* StartProfile(grpc::CallbackServerContext* context, const pb::StartProfileRequest* request,
                                         pb::StartProfileResponse*) override {
    return Do(context, [this, request] {
      return actions_.start_profile ? actions_.start_profile(request->steps())
                                    : UnimplementedFeature("profile", kNoProfile);
    });
  }

  grpc::ServerUnaryReactor* StopProfile(grpc::CallbackServerContext* context, const pb::StopProfileRequest*,
                                        pb::StopProfileResponse* response) override {
    return Do(context, [this, response] {
      return actions_.stop_profile ? actions_.stop_profile(response->mutable_path())
                                   : UnimplementedFeature("profile", kNoProfile);
    });
  }

 private:
  template <class Action>
  grpc::ServerUnaryReactor* Do(grpc::CallbackServerContext* context, const Action& action) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::Status status = Authorize(*keys_, *context);
    if (status.ok()) status = action();
    FinishUnary(context, reactor, status);
    return reactor;
  }

  GenerationService* const generation_;
  const ApiKeys* const keys_;
  const AdminActions actions_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeGrpcAdminService(GenerationService* generation, const ApiKeys* keys,
                                                    AdminActions actions) {
  return std::make_unique<GrpcAdminService>(generation, keys, std::move(actions));
}

}  // namespace k3
