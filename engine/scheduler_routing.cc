#include <algorithm>
#include <numeric>

#include "engine/scheduler.h"

// What the scheduler knows of the balance of experts: epochs of the routers' bias, and figures for metrics.
namespace k3 {

void Scheduler::PinEpoch(LiveRequest& live, int32_t rank, int32_t slot) {
  EpochSlots& epochs = ranks_[static_cast<size_t>(rank)].epochs;
  epochs.Pin(slot);
  live.epoch = {rank, slot, epochs.number(slot)};
  live.usage.routing_epoch = live.epoch.number;
  live.usage.routing_rank = rank;
}

void Scheduler::UnpinEpoch(LiveRequest& live) {
  if (live.epoch.rank < 0) return;
  ranks_[static_cast<size_t>(live.epoch.rank)].epochs.Unpin(live.epoch.slot);
  live.epoch.rank = -1;
}

void Scheduler::NoteRouting(Rank& rank, const RankRouting& routing) {
  if (config_.bias_epochs) rank.epochs.Offer(routing.newest_epoch);
  rank.routing = routing;
  RoutingLoad load;
  load.updates = counters_.routing.updates + 1;
  load.swaps = counters_.routing.swaps + routing.swaps;
  const int32_t groups = routing.groups;
  std::vector<uint64_t>& choices = choices_scratch_;  // [layers, groups] of all source ranks
  choices.assign(routing.load.size(), 0);
  int32_t measured = 0;
  for (const Rank& source : ranks_) {
    const RankRouting& last = source.routing;
    if (last.updated == 0) continue;
    ++measured;
    for (size_t i = 0; i < choices.size(); ++i) choices[i] += last.load[i];
    load.override_share += last.override_share;
    load.worst_override_share = std::max(load.worst_override_share, last.worst_override_share);
    load.mean_delta += last.mean_delta;
    load.sign_changes += last.sign_changes;
    load.halvings += last.halvings;
    load.alarms += last.alarms;
    load.dampings += last.dampings;
  }
  load.override_share /= measured;
  load.mean_delta /= measured;
  const int32_t layers = static_cast<int32_t>(choices.size()) / groups;
  load.layer_groups = std::min(layers, RoutingLoad::kLayerGroups);
  for (int32_t g = 0; g < load.layer_groups; ++g) {
    load.first_layer[g] = layers * g / load.layer_groups;
    load.last_layer[g] = layers * (g + 1) / load.layer_groups - 1;
    double sum = 0;
    for (int32_t layer = load.first_layer[g]; layer <= load.last_layer[g]; ++layer) {
      const auto begin = choices.begin() + static_cast<ptrdiff_t>(layer) * groups;
      const uint64_t all = std::accumulate(begin, begin + groups, uint64_t{0});
      const uint64_t most = *std::max_element(begin, begin + groups);
      const double ratio = all == 0 ? 1 : static_cast<double>(most) * groups / static_cast<double>(all);
      load.worst_max_over_mean = std::max(load.worst_max_over_mean, ratio);
      sum += ratio;
    }
    load.max_over_mean[g] = static_cast<float>(sum / (load.last_layer[g] - load.first_layer[g] + 1));
  }
  counters_.routing = load;
}

void Scheduler::FillRouting(RoutingLoad* load) const {
  for (const Rank& rank : ranks_) {
    load->live_epochs = std::max(load->live_epochs, rank.epochs.live());
    load->epoch = std::max(load->epoch, rank.epochs.number(rank.epochs.current()));
  }
}

}  // namespace k3
