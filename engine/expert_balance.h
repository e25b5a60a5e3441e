#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/epoch_log.h"
#include "engine/model/model_config.h"
#include "engine/quantile_control.h"
#include "engine/step.h"
#include "kernels/ops.h"

namespace k3 {

struct BalanceOptions {
  bool adaptive = false;  // false: counts, and routes exactly
  int32_t groups = 0;     // destination ranks; 0: those of the layout
  QuantileOptions control;
  // Swaps in a step what goes beyond so many times a rank's share. Routing then depends on the step's other tokens.
  std::optional<double> soft_cap;
  double soft_cap_tau = 0.03;
  // Replay: the one epoch that all requests are routed by.
  std::shared_ptr<const BiasEpoch> fixed;
  EpochLog* log = nullptr;  // may be null; outlives the balance
};

// One rank's part in the balance of experts, on its device: the table of live bias epochs, what the routers count, and
// the control that makes new epochs of it. Ranks that compute the same tokens come to the same epochs by themselves.
// Called from the rank's thread.
class ExpertBalance {
 public:
  // INVALID_ARGUMENT when the model or the options do not allow it. `ranks`: of the layout.
  static absl::Status Check(const ModelConfig& config, const BalanceOptions& options, int32_t ranks, bool is_cpu);
  static int64_t Bytes(const ModelConfig& config, const BalanceOptions& options, int32_t ranks, int64_t tokens,
                       int64_t sequences);

  // For steps of up to `tokens` tokens and `sequences` sequences. Throws DeviceError.
  ExpertBalance(const ModelConfig& config, Ops& ops, const BalanceOptions& options, int32_t ranks, int32_t data_rank,
                int64_t tokens, int64_t sequences);
  ~ExpertBalance();
  ExpertBalance(const ExpertBalance&) = delete;
  ExpertBalance& operator=(const ExpertBalance&) = delete;

  const BalanceOptions& options() const { return options_; }
  // What the router of a MoE layer needs for a step.
  RouterBalance Layer(int32_t moe_layer, const SequenceBatch& batch) const;

  // Of a step that is being submitted, on the stream: first the epochs that it brings ...
  void Upload(const std::vector<EpochUpload>& uploads);
  // ... and behind everything else, whether and where to fetch what was counted since the last time. `rows`: as many as
  // the routers were given, `live` of them no padding. `place`: which of the steps in flight.
  bool Fetch(int64_t rows, int64_t live, bool prompt, int place);
  // The step has run: moves the control on.
  void Take(int place, RankRouting* routing);
  // Forgets what was counted, by a warm-up.
  void Reset();

  const QuantileControl& control() const { return control_; }

 private:
  static constexpr int kPlaces = 2;

  Ops& ops_;
  const BalanceOptions options_;
  const int32_t data_rank_;
  const int32_t top_k_;
  const int32_t layers_;
  const int32_t groups_;
  QuantileControl control_;
  size_t layer_bytes_ = 0;    // of what a layer counts: sums, load, margins
  size_t table_bytes_ = 0;    // of one epoch
  float* table_ = nullptr;    // device, [kEpochSlots, layers, groups]
  float* staging_ = nullptr;  // host, the same
  char* counts_ = nullptr;    // device, [layers] of layer_bytes_
  char* fetched_[kPlaces] = {};
  int32_t* zeros_ = nullptr;       // device, [sequences]: slot 0 for everybody
  int32_t* candidates_ = nullptr;  // device, see RouterBalance; null without a soft cap
  float* candidate_values_ = nullptr;
  float* candidate_scores_ = nullptr;
};

}  // namespace k3
