#include "engine/expert_balance.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace k3 {
namespace {

constexpr int64_t kMostObserved = 1024;        // rows of a layer and step whose margins are counted
constexpr int32_t kMostDeviceCandidates = 32;  // of the CUDA router: one a lane

int64_t ObserveEvery(int64_t rows) { return std::max<int64_t>(1, (rows + kMostObserved - 1) / kMostObserved); }

int32_t MoeLayers(const ModelConfig& config) {
  int32_t layers = 0;
  for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) layers += config.IsMoe(layer);
  return layers;
}

// Sums, load, margins of one layer.
size_t LayerBytes(int32_t groups) {
  const size_t load = (static_cast<size_t>(groups) * sizeof(uint32_t) + 15) / 16 * 16;
  return kBalanceSums * sizeof(uint64_t) + load + static_cast<size_t>(groups) * kMarginBins * sizeof(uint32_t);
}

QuantileControl MakeControl(const ModelConfig& config, const BalanceOptions& options, int32_t layers, int32_t groups) {
  if (options.fixed != nullptr) return QuantileControl(config.num_experts_per_token, *options.fixed);
  if (options.adaptive) return QuantileControl(layers, groups, config.num_experts_per_token, options.control);
  BiasEpoch zero;
  zero.groups = groups;
  zero.delta.assign(static_cast<size_t>(layers) * static_cast<size_t>(groups), 0.0f);
  return QuantileControl(config.num_experts_per_token, std::move(zero));
}

}  // namespace

absl::Status ExpertBalance::Check(const ModelConfig& config, const BalanceOptions& options, int32_t ranks,
                                  bool is_cpu) {
  const int32_t groups = options.groups > 0 ? options.groups : ranks;
  const int32_t layers = MoeLayers(config);
  if (layers == 0) return absl::InvalidArgumentError("the model has no routed experts to balance");
  if (groups > config.num_experts) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model's ", config.num_experts, " experts cannot be balanced over ", groups, " ranks"));
  }
  if (options.adaptive && config.num_experts <= config.num_experts_per_token) {
    return absl::InvalidArgumentError("the model chooses all of its experts: there is nothing to balance");
  }
  if (!is_cpu && 2 * config.num_experts_per_token > kMostDeviceCandidates) {
    return absl::InvalidArgumentError(absl::StrCat("the GPU's router balances at most ", kMostDeviceCandidates / 2,
                                                   " experts a token, the model has ", config.num_experts_per_token));
  }
  if (options.soft_cap.has_value() && !(*options.soft_cap >= 1 && options.soft_cap_tau >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat("the soft cap is ", *options.soft_cap, " with tau ",
                                                   options.soft_cap_tau, ", must be at least 1 and 0"));
  }
  if (options.fixed != nullptr &&
      (options.fixed->groups != groups ||
       options.fixed->delta.size() != static_cast<size_t>(layers) * static_cast<size_t>(groups))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the recorded epoch is of ", options.fixed->delta.size() / std::max(1, options.fixed->groups), " layers and ",
        options.fixed->groups, " ranks, the model has ", layers, " layers of experts on ", groups, " ranks"));
  }
  return options.control.Check();
}

int64_t ExpertBalance::Bytes(const ModelConfig& config, const BalanceOptions& options, int32_t ranks, int64_t tokens,
                             int64_t sequences) {
  const int64_t groups = options.groups > 0 ? options.groups : ranks;
  const int64_t layers = MoeLayers(config);
  const int64_t candidates = options.soft_cap.has_value() ? tokens * 2 * config.num_experts_per_token * 12 : 0;
  return kEpochSlots * layers * groups * 4 + layers * static_cast<int64_t>(LayerBytes(static_cast<int32_t>(groups))) +
         sequences * 4 + candidates;
}

ExpertBalance::ExpertBalance(const ModelConfig& config, Ops& ops, const BalanceOptions& options, int32_t ranks,
                             int32_t data_rank, int64_t tokens, int64_t sequences)
    : ops_(ops),
      options_(options),
      data_rank_(data_rank),
      top_k_(config.num_experts_per_token),
      layers_(MoeLayers(config)),
      groups_(options.groups > 0 ? options.groups : ranks),
      control_(MakeControl(config, options, layers_, groups_)),
      layer_bytes_(LayerBytes(groups_)),
      table_bytes_(static_cast<size_t>(layers_) * static_cast<size_t>(groups_) * sizeof(float)) {
  K3_CHECK(control_.layers() == layers_ && control_.groups() == groups_);
  const size_t counts = layer_bytes_ * static_cast<size_t>(layers_);
  table_ = static_cast<float*>(ops.Allocate(table_bytes_ * kEpochSlots));
  ops.Fill(table_, 0, table_bytes_ * kEpochSlots, ops.stream());
  staging_ = static_cast<float*>(ops.AllocateHost(table_bytes_ * kEpochSlots));
  counts_ = static_cast<char*>(ops.Allocate(counts));
  ops.Fill(counts_, 0, counts, ops.stream());
  for (char*& place : fetched_) place = static_cast<char*>(ops.AllocateHost(counts));
  zeros_ = static_cast<int32_t*>(ops.Allocate(static_cast<size_t>(sequences) * sizeof(int32_t)));
  ops.Fill(zeros_, 0, static_cast<size_t>(sequences) * sizeof(int32_t), ops.stream());
  if (!options.soft_cap.has_value()) return;
  const size_t candidates = static_cast<size_t>(tokens) * 2 * static_cast<size_t>(top_k_) * 4;
  candidates_ = static_cast<int32_t*>(ops.Allocate(candidates));
  candidate_values_ = static_cast<float*>(ops.Allocate(candidates));
  candidate_scores_ = static_cast<float*>(ops.Allocate(candidates));
}

ExpertBalance::~ExpertBalance() {
  for (void* device : {static_cast<void*>(table_), static_cast<void*>(counts_), static_cast<void*>(zeros_),
                       static_cast<void*>(candidates_), static_cast<void*>(candidate_values_),
                       static_cast<void*>(candidate_scores_)}) {
    if (device != nullptr) ops_.Free(device);
  }
  for (void* host : {static_cast<void*>(staging_), static_cast<void*>(fetched_[0]), static_cast<void*>(fetched_[1])}) {
    if (host != nullptr) ops_.FreeHost(host);
  }
}

RouterBalance ExpertBalance::Layer(int32_t moe_layer, const SequenceBatch& batch) const {
  char* counts = counts_ + static_cast<size_t>(moe_layer) * layer_bytes_;
  const size_t margins = layer_bytes_ - static_cast<size_t>(groups_) * kMarginBins * sizeof(uint32_t);
  RouterBalance balance;
  balance.groups = groups_;
  balance.delta = table_ + int64_t{moe_layer} * groups_;
  balance.slot_stride = int64_t{layers_} * groups_;
  balance.slot_of_sequence = batch.epoch_slot != nullptr ? batch.epoch_slot : zeros_;
  balance.sequence_of_token = batch.sequence_of_token;
  balance.observe_every = ObserveEvery(batch.num_tokens);
  balance.sums = reinterpret_cast<uint64_t*>(counts);
  balance.load = reinterpret_cast<uint32_t*>(counts + kBalanceSums * sizeof(uint64_t));
  balance.margins = reinterpret_cast<uint32_t*>(counts + margins);
  balance.candidates = candidates_;
  balance.candidate_values = candidate_values_;
  balance.candidate_scores = candidate_scores_;
  return balance;
}

void ExpertBalance::Upload(const std::vector<EpochUpload>& uploads) {
  for (const EpochUpload& upload : uploads) {
    const std::shared_ptr<const BiasEpoch> epoch = control_.Find(static_cast<uint64_t>(upload.number));
    K3_CHECK(epoch != nullptr && upload.slot > 0 && upload.slot < kEpochSlots);
    const size_t offset = static_cast<size_t>(upload.slot) * (table_bytes_ / sizeof(float));
    std::memcpy(staging_ + offset, epoch->delta.data(), table_bytes_);
    ops_.CopyToDevice(table_ + offset, staging_ + offset, table_bytes_, ops_.stream());
    if (options_.log != nullptr) options_.log->Append(data_rank_, *epoch);
  }
}

bool ExpertBalance::Fetch(int64_t rows, int64_t live, bool prompt, int place) {
  const int64_t every = ObserveEvery(rows);
  if (!control_.StepEnds((live + every - 1) / every, prompt)) return false;
  const size_t bytes = layer_bytes_ * static_cast<size_t>(layers_);
  ops_.CopyToHost(fetched_[place], counts_, bytes, ops_.stream());
  ops_.Fill(counts_, 0, bytes, ops_.stream());
  return true;
}

void ExpertBalance::Take(int place, RankRouting* routing) {
  const size_t margins = layer_bytes_ - static_cast<size_t>(groups_) * kMarginBins * sizeof(uint32_t);
  routing->updated = 1;
  routing->groups = groups_;
  routing->load.resize(static_cast<size_t>(layers_) * static_cast<size_t>(groups_));
  routing->swaps = 0;
  for (int32_t layer = 0; layer < layers_; ++layer) {
    const char* counts = fetched_[place] + static_cast<size_t>(layer) * layer_bytes_;
    const auto* sums = reinterpret_cast<const uint64_t*>(counts);
    control_.histogram(layer).Add(reinterpret_cast<const uint32_t*>(counts + margins), sums);
    routing->swaps += sums[3];
    std::memcpy(routing->load.data() + static_cast<size_t>(layer) * static_cast<size_t>(groups_),
                counts + kBalanceSums * sizeof(uint64_t), static_cast<size_t>(groups_) * sizeof(uint32_t));
  }
  control_.Update();
  routing->newest_epoch = control_.current()->number;
  const QuantileControl::Stats stats = control_.stats();
  routing->override_share = stats.override_share;
  routing->worst_override_share = stats.worst_override_share;
  routing->mean_delta = stats.mean_delta;
  routing->sign_changes = stats.sign_changes;
  routing->halvings = stats.halvings;
  routing->alarms = stats.alarms;
  routing->dampings = stats.dampings;
}

void ExpertBalance::Reset() { ops_.Fill(counts_, 0, layer_bytes_ * static_cast<size_t>(layers_), ops_.stream()); }

}  // namespace k3
