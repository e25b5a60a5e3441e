#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/process_group.h"
#include "engine/rank_group.h"
#include "server/served_model.h"
#include "server/server_config.h"

namespace k3 {

// The device, the loaded model and the engine over it: everything below the front ends, in the order in which it must
// live. Made by one thread; the engine may then be used from any.
class EngineHost {
 public:
  // Why a start failed: an exit code and a sentence.
  struct Failure {
    int exit_code = 0;
    std::string message;
  };

  // Loads the model of `config` and starts its engine. `progress` gets the percent read so far. Null, and `failure`
  // filled in, when that cannot be done. `observer` may be null and must outlive the host; `profile`, which may be
  // null, has the engine's steps profiled while it runs.
  static std::unique_ptr<EngineHost> Load(const ServerConfig& config, const std::function<void(double)>& progress,
                                          EngineObserver* observer, std::shared_ptr<ProfileSwitch> profile,
                                          Failure* failure);
  // Ends what still runs with UNAVAILABLE.
  ~EngineHost();

  // Of the process that leads; the others have none.
  Engine& engine() { return *engine_; }
  // This process's ranks.
  const RankGroup& ranks() const { return *ranks_; }
  bool leads() const { return processes_ == nullptr || processes_->leads(); }
  // A process without an engine: runs the steps of the leader until it ends; the exit code.
  int Follow();
  // Why the server cannot go on although no step has failed yet; empty while it can.
  std::string lost() const;
  std::shared_ptr<const ServedModel> served_model() const { return served_; }

 private:
  EngineHost() = default;

  absl::Status OpenDevice(const ServerConfig& config);
  // Fills in balance_: what the flags say, with its files.
  absl::Status OpenBalance(const ServerConfig& config);
  absl::Status LoadModel(const ServerConfig& config, const std::function<void(double)>& progress, Failure* failure);
  // Fills in plan_; RESOURCE_EXHAUSTED when it does not fit.
  absl::Status Plan(const ModelConfig& model_config, const MemoryRequest& request, Failure* failure);
  absl::Status StartEngine(const ServerConfig& config, EngineObserver* observer, Failure* failure);

  MemoryPlan plan_;
  // All processes say whether they are well; the first reason of one that is not.
  absl::Status Agree(const absl::Status& own);
  // Pools as small as those of the process that has least room.
  absl::Status AgreeOnPools();
  void OnLost(const std::string& why);

  mutable std::mutex lost_mutex_;
  std::string lost_;  // guarded by lost_mutex_
  std::unique_ptr<EpochLog> epoch_log_;
  std::optional<BalanceOptions> balance_;  // of experts; none: chosen exactly and not counted
  std::unique_ptr<RankGroup> ranks_;
  std::unique_ptr<ProcessGroup> processes_;        // of several processes
  std::unique_ptr<ProcessRunner> process_runner_;  // of the leader among several
  std::shared_ptr<ProfileSwitch> profile_switch_;
  ProfiledOps* profile_ = nullptr;  // of the first rank, when steps are or may be profiled
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<ServedModel> served_;
};

// The ids that end a reply: of config.json, generation_config.json and the tokenizer, ascending, each once.
std::vector<int32_t> EosTokenIds(const ModelConfig& config, const SamplingDefaults& defaults,
                                 const Tokenizer& tokenizer);

// Names the weights: equal for equal checkpoints, of headers, sizes and samples of the data. `seed` for random weights.
std::string WeightsVersion(const LoadedModel& model, std::optional<int64_t> seed);

}  // namespace k3
