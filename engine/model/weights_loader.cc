#include "engine/model/weights_loader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/model/part_builder.h"
#include "engine/model/tensor_match.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

constexpr int32_t kModelPart = -1;  // part number of the tensors outside the layers

// One piece of work and where its bytes lie.
struct LoadPart {
  int32_t layer = kModelPart;
  std::vector<FileRange> ranges;
  uint64_t bytes = 0;
};

// In file order, so that a disk is read forwards.
std::vector<LoadPart> PartsInFileOrder(const TensorMatch* match, int32_t layers) {
  std::vector<LoadPart> parts(static_cast<size_t>(layers) + 1);
  for (int32_t layer = 0; layer < layers; ++layer) parts[layer + 1].layer = layer;
  if (match == nullptr) return parts;
  for (LoadPart& part : parts) {
    part.ranges = part.layer == kModelPart ? match->model_ranges : match->layer_ranges[part.layer];
    for (const FileRange& range : part.ranges) part.bytes += range.end - range.begin;
  }
  std::stable_sort(parts.begin(), parts.end(), [](const LoadPart& a, const LoadPart& b) {
    const FileRange& x = a.ranges.front();
    const FileRange& y = b.ranges.front();
    return x.shard != y.shard ? x.shard < y.shard : x.begin < y.begin;
  });
  return parts;
}

// Builds all parts, on one or several threads; the first failure ends it.
class LoadRun {
 public:
  LoadRun(const TensorMatch* match, Ops& ops, const LoadOptions& options, LoadedModel& model)
      : match_(match),
        ops_(ops),
        options_(options),
        model_(model),
        parts_(PartsInFileOrder(match, model.config.num_hidden_layers)) {
    for (const LoadPart& part : parts_) progress_.bytes_total += part.bytes;
  }

  absl::Status Run() {
    if (options_.threads <= 1) {
      Work();
    } else {
      std::vector<std::thread> threads;
      for (int i = 0; i < options_.threads; ++i) threads.emplace_back([this] { Work(); });
      for (std::thread& thread : threads) thread.join();
    }
    if (exception_ != nullptr) std::rethrow_exception(exception_);
    if (!status_.ok()) return status_;
    if (match_ == nullptr) {
      spdlog::info("made {:.3f} GB of random weights", static_cast<double>(model_.weights.bytes) / 1e9);
    } else if (options_.print_progress) {
      printer_.Finish(progress_);
    }
    return absl::OkStatus();
  }

 private:
  void Work() {
    while (!failed_) {
      const size_t index = next_++;
      if (index >= parts_.size()) return;
      if (index == 0) Advise(parts_[0], &MappedFile::Prefetch);
      if (index + 1 < parts_.size()) Advise(parts_[index + 1], &MappedFile::Prefetch);
      try {
        Build(parts_[index]);
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (exception_ == nullptr) exception_ = std::current_exception();
        failed_ = true;
      }
    }
  }

  void Build(const LoadPart& part) {
    PartBuilder builder(match_, ops_, options_, model_);
    absl::Status status;
    if (part.layer == kModelPart) {
      builder.Model();
    } else {
      status = builder.Layer(part.layer);
    }
    // The embedding table may be used in place; everything else has been copied. Should a backend point into the file
    // after all, the bytes are still there, only to be read again.
    if (part.layer != kModelPart) Advise(part, &MappedFile::Release);
    std::lock_guard lock(mutex_);
    if (!status.ok()) {
      if (status_.ok()) status_ = status;
      failed_ = true;
      return;
    }
    model_.weights.bytes += builder.bytes();
    progress_.bytes_done += part.bytes;
    progress_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (options_.progress) options_.progress(progress_);
    if (options_.print_progress) printer_.Update(progress_);
  }

  void Advise(const LoadPart& part, void (MappedFile::*advise)(uint64_t, uint64_t) const) const {
    for (const FileRange& range : part.ranges) {
      (model_.checkpoint->shard_file(range.shard).*advise)(range.begin, range.end);
    }
  }

  const TensorMatch* match_;
  Ops& ops_;
  const LoadOptions& options_;
  LoadedModel& model_;
  const std::vector<LoadPart> parts_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // guards everything below and model_'s totals
  LoadProgress progress_;
  LoadProgressPrinter printer_;
  absl::Status status_;
  std::exception_ptr exception_;
};

}  // namespace

ExpertRange ExpertsOfRank(int32_t experts, int32_t rank, int32_t ranks) {
  const auto begin = [&](int64_t r) { return static_cast<int32_t>(experts * r / ranks); };
  return {begin(rank), begin(rank + 1) - begin(rank)};
}

absl::Status CheckTensorParallel(const ModelConfig& config, int32_t size) {
  if (size == 1) return absl::OkStatus();
  const auto check = [&](const char* field, int64_t value) {
    if (value % size == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("tensor-parallel-size ", size, " does not divide ", field, " (", value, ")"));
  };
  const std::pair<const char*, int64_t> fields[] = {
      {"num_attention_heads", config.num_attention_heads},
      {"linear_attn_config.num_heads", config.kda_heads},
      {"intermediate_size", config.intermediate_size},
      {"the shared experts' width", config.shared_intermediate_size()},
      {"routed_expert_hidden_size", config.routed_expert_hidden_size},
      {"vocab_size", config.vocab_size},
  };
  for (const auto& [field, value] : fields) {
    if (absl::Status status = check(field, value); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadWeights(const std::string& dir, const ModelConfig& config, Ops& ops,
                                                         const LoadOptions& options) {
  if (absl::Status status = CheckTensorParallel(config, options.tensor_parallel_size); !status.ok()) return status;
  auto model = std::make_unique<LoadedModel>();
  model->config = config;
  model->weights.layers.resize(config.num_hidden_layers);
  std::optional<TensorMatch> match;
  if (!options.random_seed) {
    auto checkpoint = Checkpoint::Open(dir);
    if (!checkpoint.ok()) return checkpoint.status();
    model->checkpoint = *std::move(checkpoint);
    auto matched = MatchTensors(*model->checkpoint, config);
    if (!matched.ok()) return matched.status();
    match = *std::move(matched);
  }
  LoadRun run(match ? &*match : nullptr, ops, options, *model);
  if (absl::Status status = run.Run(); !status.ok()) return status;
  return model;
}

}  // namespace k3
