#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "server/engine_host.h"
#include "server/health.h"
#include "server/server_config.h"

namespace k3 {

// Loads on a thread of its own, so that signals and health questions are answered meanwhile. Given up, the thread goes
// on and keeps what it needs alive by itself.
class ModelLoader {
 public:
  ModelLoader(const ServerConfig& config, ServerHealth* health, EngineObserver* observer,
              std::shared_ptr<ProfileSwitch> profile)
      : shared_(std::make_shared<Shared>()) {
    thread_ = std::thread([shared = shared_, config, health, observer, profile = std::move(profile)] {
      EngineHost::Failure failure;
      auto host = EngineHost::Load(
          config,
          [&](double percent) {
            if (!shared->given_up.load()) health->SetLoadPercent(percent);
          },
          observer, profile, &failure);
      std::lock_guard lock(shared->mutex);
      shared->host = std::move(host);
      shared->failure = failure;
      shared->done = true;
    });
  }
  ~ModelLoader() {
    if (thread_.joinable()) thread_.join();
  }

  bool Done() const {
    std::lock_guard lock(shared_->mutex);
    return shared_->done;
  }
  // After Done: null when loading failed.
  std::unique_ptr<EngineHost> Take(EngineHost::Failure* failure) {
    thread_.join();
    *failure = shared_->failure;
    return std::move(shared_->host);
  }
  void GiveUp() {
    shared_->given_up.store(true);
    thread_.detach();
  }

 private:
  struct Shared {
    mutable std::mutex mutex;
    std::unique_ptr<EngineHost> host;  // guarded by mutex, as the next two
    EngineHost::Failure failure;
    bool done = false;
    std::atomic<bool> given_up{false};
  };
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace k3
