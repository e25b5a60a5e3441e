#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include "engine/engine_interface.h"

namespace k3 {

// The metrics of the balance of experts over ranks. Their series appear with the first measurement: without
// --moe-routing local-quantile or --measure-routing there are none. Not thread-safe.
class RoutingMetrics {
 public:
  explicit RoutingMetrics(prometheus::Registry& registry);
  // What the engine tells now.
  void Set(const RoutingLoad& load);

 private:
  using Gauges = prometheus::Family<prometheus::Gauge>;
  using Counters = prometheus::Family<prometheus::Counter>;
  static void Advance(Counters& family, uint64_t total);

  Gauges& expert_load_;
  Gauges& worst_expert_load_;
  Gauges& override_ratio_;
  Gauges& worst_override_ratio_;
  Gauges& mean_bias_;
  Gauges& epoch_;
  Gauges& live_epochs_;
  Counters& updates_;
  Counters& sign_changes_;
  Counters& halvings_;
  Counters& alarms_;
  Counters& dampings_;
  Counters& swaps_;
};

}  // namespace k3
