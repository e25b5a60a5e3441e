#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/model.h"
#include "engine/step.h"

namespace k3 {

// Runs one rank's share of each step on its device: one upload, zeroing and copies of slots and pages, forward pass
// with snapshots in passing, sampling, one download, one synchronization. Owns the rank's workspace and cache memory.
// Called from the engine thread; knows nothing of requests.
class Executor : public StepRunner {
 public:
  // RESOURCE_EXHAUSTED with the sizes when workspace or pools do not fit. `model` and `ops` must outlive it.
  static absl::StatusOr<std::unique_ptr<Executor>> Create(const Model& model, Ops& ops, const StepBounds& bounds,
                                                          const CacheGeometry& geometry);
  ~Executor() override;

  absl::Status Run(const StepPlan& plan, StepResult* result) override;
  void Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) override;
  int32_t vocab_size() const override { return static_cast<int32_t>(model_.config().vocab_size); }

  CacheStorage& cache() { return cache_; }
  Workspace& workspace() { return workspace_; }

 private:
  // A device buffer with its host twin; grows when a step needs more than any before it (log-probabilities, penalties),
  // never on the ordinary path.
  struct Staging {
    void* host = nullptr;
    void* device = nullptr;
    size_t capacity = 0;
  };

  Executor(const Model& model, Ops& ops, const StepBounds& bounds, const CacheGeometry& geometry);
  void Reserve(Staging& staging, size_t bytes);
  void RunRank(const RankPlan& plan, RankResult* result);

  const Model& model_;
  Ops& ops_;
  Workspace workspace_;
  CacheStorage cache_;
  Staging input_;
  Staging output_;
};

}  // namespace k3
