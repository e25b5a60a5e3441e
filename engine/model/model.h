#pragma once

#include <vector>

#include "engine/model/layer_context.h"
#include "engine/model/weights.h"

namespace k3 {

// The text model of one rank: its shape and its weights. Immutable; Forward may be called from one thread at a time.
class Model {
 public:
  // `config` is the rank's share (RankConfig). With several ranks each of them makes the same calls.
  Model(const ModelConfig& config, const Weights& weights, Ops& ops, const ParallelContext& parallel = {});

  const ModelConfig& config() const { return config_; }
  const ParallelContext& parallel() const { return parallel_; }
  WorkspaceRanks workspace_ranks() const;

  // Runs the step's tokens ([T] ids in device memory) through all layers; pages and states of `cache` are read and
  // advanced. Returns the normed final hidden states [T, D] (in workspace.hidden), valid until the next call.
  // `dispatch_rows`: the most tokens of any group in this step, where there are several; 0 = this one's. A group
  // without tokens lends its experts to the others. `balance` biases and counts the choice of experts.
  MatrixView Forward(const SequenceBatch& batch, const int32_t* tokens, Workspace& workspace, CacheStorage& cache,
                     RoutingProbe* probe = nullptr, int64_t dispatch_rows = 0,
                     const ExpertBalance* balance = nullptr) const;

  // Logits [R, V] (in workspace.logits) of `rows` packed rows of `hidden`; count <= bounds().logits_rows.
  MatrixView Logits(const MatrixView& hidden, const int32_t* rows, int64_t count, Workspace& workspace) const;

 private:
  const ModelConfig& config_;
  const Weights& weights_;
  Ops& ops_;
  const ParallelContext parallel_;
  std::vector<const float*> mix_queries_;  // of all sites in the order of BlockResidual
};

}  // namespace k3
