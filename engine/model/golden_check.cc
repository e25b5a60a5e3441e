#include "engine/model/golden_check.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

constexpr float kClearMargin = 1e-2f;

// Counts how many expert choices equal the golden's and, where asked, puts the golden's in their place.
class ExpertProbe : public RoutingProbe {
 public:
  ExpertProbe(const GoldenPrompt& prompt, bool force, Ops& ops) : prompt_(prompt), force_(force), ops_(ops) {
    if (force_) {
      const size_t bytes = prompt.experts.size() * sizeof(int32_t);
      device_ids_ = static_cast<int32_t*>(ops.Allocate(std::max<size_t>(bytes, 4)));
      ops.CopyToDevice(device_ids_, prompt.experts.data(), bytes, ops.stream());
    }
  }
  ~ExpertProbe() override {
    if (device_ids_ != nullptr) ops_.Free(device_ids_);
  }

  // Positions of the prompt that the next forward call covers.
  void SetChunk(int64_t begin, int64_t end) { begin_ = begin, end_ = end; }

  const int32_t* ForcedIds(int32_t moe_layer) override { return force_ ? device_ids_ + Offset(moe_layer) : nullptr; }

  void OnRouted(int32_t moe_layer, const int32_t* ids, int64_t tokens) override {
    std::vector<int32_t> host(static_cast<size_t>(tokens) * prompt_.top_k);
    ops_.CopyToHost(host.data(), ids, host.size() * sizeof(int32_t), ops_.stream());
    ops_.Synchronize(ops_.stream());
    // Sets, not places: one early difference must not count for all ids behind it.
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t* own = host.data() + t * prompt_.top_k;
      const int32_t* golden = prompt_.experts.data() + Offset(moe_layer) + t * prompt_.top_k;
      for (int32_t k = 0; k < prompt_.top_k; ++k) {
        equal_ += std::binary_search(golden, golden + prompt_.top_k, own[k]) ? 1 : 0;
        ++total_;
      }
    }
  }

  double equal_share() const { return total_ == 0 ? 1.0 : static_cast<double>(equal_) / static_cast<double>(total_); }

 private:
  int64_t Offset(int32_t moe_layer) const {
    return (moe_layer * static_cast<int64_t>(prompt_.tokens.size()) + begin_) * prompt_.top_k;
  }

  const GoldenPrompt& prompt_;
  bool force_;
  Ops& ops_;
  int32_t* device_ids_ = nullptr;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  int64_t equal_ = 0;
  int64_t total_ = 0;
};

absl::Status CheckFits(const ModelConfig& config, const GoldenPrompt& prompt) {
  int32_t moe_layers = 0;
  for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) moe_layers += config.IsMoe(layer) ? 1 : 0;
  if (prompt.vocab_size != config.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("golden prompt ", prompt.name, ": logits over ", prompt.vocab_size,
                                                   " ids, the model has ", config.vocab_size));
  }
  if (!prompt.experts.empty() && (prompt.moe_layers != moe_layers || prompt.top_k != config.num_experts_per_token)) {
    return absl::InvalidArgumentError(absl::StrCat("golden prompt ", prompt.name, ": experts of ", prompt.moe_layers,
                                                   " layers, top-", prompt.top_k, "; the model has ", moe_layers,
                                                   " MoE layers, top-", config.num_experts_per_token));
  }
  for (int32_t id : prompt.experts) {
    if (id >= config.num_experts) {
      return absl::InvalidArgumentError(
          absl::StrCat("golden prompt ", prompt.name, ": expert ", id, ", the model has ", config.num_experts));
    }
  }
  return absl::OkStatus();
}

void CompareLogits(const GoldenPrompt& prompt, GoldenResult* result) {
  const size_t vocab = static_cast<size_t>(prompt.vocab_size);
  double difference = 0, norm = 0;
  for (size_t r = 0; r < prompt.rows.size(); ++r) {
    double row_difference = 0, row_norm = 0;
    for (size_t i = r * vocab; i < (r + 1) * vocab; ++i) {
      const double d = static_cast<double>(result->logits[i]) - prompt.logits[i];
      row_difference += d * d;
      row_norm += static_cast<double>(prompt.logits[i]) * prompt.logits[i];
    }
    difference += row_difference;
    norm += row_norm;
    const double error = std::sqrt(row_difference / row_norm);
    // A NaN error must win, not vanish in a comparison.
    if (r == 0 || !(error <= result->worst_row_error)) {
      result->worst_row = prompt.rows[r];
      result->worst_row_error = error;
    }
  }
  result->rel_error = std::sqrt(difference / norm);
}

int32_t ArgMax(const float* logits, int64_t size) {
  return static_cast<int32_t>(std::max_element(logits, logits + size) - logits);
}

}  // namespace

absl::StatusOr<GoldenResult> CheckGolden(const Model& model, Ops& ops, const GoldenPrompt& prompt,
                                         const GoldenCheckOptions& options) {
  if (absl::Status fits = CheckFits(model.config(), prompt); !fits.ok()) return fits;
  const int64_t length = static_cast<int64_t>(prompt.tokens.size());
  const int64_t chunk = std::clamp<int64_t>(options.chunk, 1, length);
  SequenceRunner runner(model, ops, length + static_cast<int64_t>(prompt.greedy.size()) + 1, chunk);
  runner.before_forward = options.before_forward;
  ExpertProbe probe(prompt, options.golden_routing && !prompt.experts.empty(), ops);
  RoutingProbe* routing = prompt.experts.empty() ? nullptr : &probe;

  GoldenResult result;
  std::vector<float> last;  // logits of the last position
  size_t next_row = 0;
  for (int64_t begin = 0; begin < length; begin += chunk) {
    const int64_t end = std::min(begin + chunk, length);
    std::vector<int32_t> rows;
    const size_t first_row = next_row;
    for (; next_row < prompt.rows.size() && prompt.rows[next_row] < end; ++next_row) {
      rows.push_back(static_cast<int32_t>(prompt.rows[next_row] - begin));
    }
    const size_t kept = next_row - first_row;
    if (end == length) rows.push_back(static_cast<int32_t>(end - begin - 1));
    probe.SetChunk(begin, end);
    const std::span<const int32_t> tokens(prompt.tokens.data() + begin, static_cast<size_t>(end - begin));
    const std::vector<float> logits = runner.Append(tokens, rows, routing);
    result.logits.insert(result.logits.end(), logits.begin(), logits.begin() + kept * prompt.vocab_size);
    if (end == length) last.assign(logits.end() - prompt.vocab_size, logits.end());
  }
  CompareLogits(prompt, &result);
  result.experts_equal_share = probe.equal_share();

  for (size_t step = 0; step < prompt.greedy.size() && prompt.margin[step] >= kClearMargin; ++step) {
    const int32_t token = ArgMax(last.data(), prompt.vocab_size);
    ++result.greedy_compared;
    if (token != prompt.greedy[step]) break;
    ++result.greedy_equal;
    if (step + 1 < prompt.greedy.size()) {
      const int32_t row = 0;
      last = runner.Append(std::span(&token, 1), std::span(&row, 1));
    }
  }
  return result;
}

}  // namespace k3
