#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/checkpoint.h"
#include "engine/model/load_progress.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "kernels/ops.h"

namespace k3 {

struct LoadOptions {
  // Called after each part (a layer, or the model's own tensors), from one thread at a time.
  std::function<void(const LoadProgress&)> progress;
  bool print_progress = true;  // LoadProgressPrinter
  int threads = 1;             // parts built at the same time; the backend's Make methods allow it

  // This rank's share: heads, dense and shared MLP and vocabulary are cut by the tensor-parallel rank, whole experts
  // are spread over the expert ranks.
  int32_t tensor_parallel_rank = 0;
  int32_t tensor_parallel_size = 1;
  int32_t expert_rank = 0;
  int32_t expert_ranks = 1;
  int32_t expert_leaves = 1;  // groups that this rank's experts are kept in (ParallelLayout::LeavesPerRank)

  // Weights of this shape drawn at random instead of read: no checkpoint is opened.
  std::optional<uint64_t> random_seed;
};

// A model's weights together with what they may point into. Destroyed from the bottom up: weights before mapping. The
// Ops object they were made with must outlive this.
struct LoadedModel {
  ModelConfig config;
  std::unique_ptr<Checkpoint> checkpoint;               // null with random weights
  std::vector<std::unique_ptr<uint8_t[]>> host_memory;  // tables that are not in the mapping
  Weights weights;
};

// Reads the weights of `dir` for the model `config` into the form that `ops` multiplies by. All files are checked
// before the first large read. NotFound: no directory or no weights; DataLoss: a damaged or mismatched checkpoint,
// naming file, tensor, expected and actual; InvalidArgument: the shares do not divide. A DeviceError of the backend
// passes through.
absl::StatusOr<std::unique_ptr<LoadedModel>> LoadWeights(const std::string& dir, const ModelConfig& config, Ops& ops,
                                                         const LoadOptions& options = {});

// Experts [first, first + count) of an expert rank.
struct ExpertRange {
  int32_t first = 0;
  int32_t count = 0;
};
ExpertRange ExpertsOfRank(int32_t experts, int32_t rank, int32_t ranks);
// OK when heads, widths and vocabulary divide by the tensor-parallel size; else InvalidArgument naming the field.
absl::Status CheckTensorParallel(const ModelConfig& config, int32_t size);

}  // namespace k3
