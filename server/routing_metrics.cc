#include "server/routing_metrics.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

prometheus::Family<prometheus::Gauge>& GaugeFamily(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(absl::StrCat("k3serve_", name)).Help(help).Register(registry);
}

prometheus::Family<prometheus::Counter>& CounterFamily(prometheus::Registry& registry, const char* name,
                                                       const char* help) {
  return prometheus::BuildCounter().Name(absl::StrCat("k3serve_", name)).Help(help).Register(registry);
}

}  // namespace

RoutingMetrics::RoutingMetrics(prometheus::Registry& registry)
    : expert_load_(GaugeFamily(registry, "expert_load_max_over_mean",
                               "Choices of the busiest rank's experts over the mean rank's in the last update, the "
                               "mean over a group of layers of experts")),
      worst_expert_load_(GaugeFamily(registry, "expert_load_worst_max_over_mean", "The same of the worst layer")),
      override_ratio_(
          GaugeFamily(registry, "routing_override_ratio", "Share of expert choices changed by the balance rule")),
      worst_override_ratio_(
          GaugeFamily(registry, "routing_worst_override_ratio", "The same of the worst rank and layer")),
      mean_bias_(GaugeFamily(registry, "routing_mean_bias", "Mean of how far ranks' biases are lowered")),
      epoch_(GaugeFamily(registry, "routing_epoch", "Newest bias epoch that requests are routed by; 0 is no bias")),
      live_epochs_(GaugeFamily(registry, "routing_live_epochs", "Bias epochs in use, of the rank with most")),
      updates_(CounterFamily(registry, "routing_updates_total", "Updates of the balance of experts, over ranks")),
      sign_changes_(CounterFamily(registry, "routing_sign_changes_total", "Steps of a bias that turned back")),
      halvings_(CounterFamily(registry, "routing_limit_halvings_total",
                              "A layer's largest bias halved because it changed too many choices")),
      alarms_(CounterFamily(registry, "routing_alarms_total", "A layer given back to exact routing for the same")),
      dampings_(CounterFamily(registry, "routing_dampings_total", "A layer slowed down because it oscillated")),
      swaps_(CounterFamily(registry, "routing_soft_cap_swaps_total", "Choices replaced by the soft cap")) {}

void RoutingMetrics::Advance(Counters& family, uint64_t total) {
  prometheus::Counter& counter = family.Add({});
  const double now = static_cast<double>(total);
  if (now > counter.Value()) counter.Increment(now - counter.Value());
}

void RoutingMetrics::Set(const RoutingLoad& load) {
  if (load.updates == 0) return;
  for (int32_t g = 0; g < load.layer_groups; ++g) {
    const std::string layers = absl::StrCat(load.first_layer[g], "-", load.last_layer[g]);
    expert_load_.Add({{"layer_group", layers}}).Set(static_cast<double>(load.max_over_mean[g]));
  }
  worst_expert_load_.Add({}).Set(load.worst_max_over_mean);
  override_ratio_.Add({}).Set(load.override_share);
  worst_override_ratio_.Add({}).Set(load.worst_override_share);
  mean_bias_.Add({}).Set(load.mean_delta);
  epoch_.Add({}).Set(static_cast<double>(load.epoch));
  live_epochs_.Add({}).Set(load.live_epochs);
  Advance(updates_, load.updates);
  Advance(sign_changes_, load.sign_changes);
  Advance(halvings_, load.halvings);
  Advance(alarms_, load.alarms);
  Advance(dampings_, load.dampings);
  Advance(swaps_, load.swaps);
}

}  // namespace k3
