#pragma once

#include "engine/cache/cache_storage.h"
#include "engine/model/model_config.h"
#include "engine/model/parallel.h"
#include "engine/model/workspace.h"
#include "kernels/ops.h"

namespace k3 {

// Sees or replaces the experts of a step: `k3serve verify` and debugging. Called between ops, after the layer's router.
class RoutingProbe {
 public:
  virtual ~RoutingProbe() = default;
  // Ids to use instead of the router's, [T, top_k] ascending in device memory, or null. `moe_layer` counts MoE layers.
  virtual const int32_t* ForcedIds(int32_t moe_layer) = 0;
  // The ids in use, [T, top_k] in device memory; valid until the next layer runs.
  virtual void OnRouted(int32_t moe_layer, const int32_t* ids, int64_t tokens) = 0;
};

// What every sublayer of one step works with. Lives on the stack of Model::Forward.
class ExpertBalance;
struct LayerContext {
  const ModelConfig& config;
  Ops& ops;
  Stream stream;
  const SequenceBatch& batch;
  Workspace& workspace;
  CacheStorage& cache;
  const ParallelContext& parallel;
  RoutingProbe* probe;           // may be null
  const ExpertBalance* balance;  // of experts over ranks; null: routed exactly, and not counted
  int64_t dispatch_rows;  // tokens of the group that has most: what every group's exchange of experts is padded to
};

}  // namespace k3
