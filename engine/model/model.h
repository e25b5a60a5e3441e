#pragma once

#include "engine/model/layer_context.h"
#include "engine/model/weights.h"

namespace k3 {

// The text model of one rank: its shape and its weights. Immutable; Forward may be called from one thread at a time.
class Model {
 public:
  Model(const ModelConfig& config, const Weights& weights, Ops& ops) : config_(config), weights_(weights), ops_(ops) {}

  const ModelConfig& config() const { return config_; }

  // Runs the step's tokens ([T] ids in device memory) through all layers; pages and states of `cache` are read and
  // advanced. Returns the normed final hidden states [T, D] (in workspace.hidden), valid until the next call.
  MatrixView Forward(const SequenceBatch& batch, const int32_t* tokens, Workspace& workspace, CacheStorage& cache,
                     RoutingProbe* probe = nullptr) const;

  // Logits [R, V] (in workspace.logits) of `rows` packed rows of `hidden`; count <= bounds().logits_rows.
  MatrixView Logits(const MatrixView& hidden, const int32_t* rows, int64_t count, Workspace& workspace) const;

 private:
  const ModelConfig& config_;
  const Weights& weights_;
  Ops& ops_;
};

}  // namespace k3
