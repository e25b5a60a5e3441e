#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/checkpoint.h"
#include "engine/model/model_config.h"
#include "engine/model/tensor_table.h"

namespace k3 {

// A stretch of one shard file.
struct FileRange {
  uint32_t shard = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// What a checkpoint holds for a model, established from headers alone.
struct TensorMatch {
  // Experts of layer L are packed MXFP4. Decided by tensor names, never by the config's ignore list (spec 1.4).
  std::vector<bool> mxfp4_experts;
  bool separate_head = false;  // lm_head is in the files
  uint64_t bytes = 0;          // of all tensors that the model uses
  uint64_t vision_bytes = 0;   // skipped
  // Where the tensors of the model (embedding, head, final norm) and of each layer lie, one range per shard.
  std::vector<FileRange> model_ranges;
  std::vector<std::vector<FileRange>> layer_ranges;
};

// Finds every tensor of the table in the checkpoint and checks shape and type. Missing or wrong tensors are DataLoss
// naming file, tensor, expected and actual, at most ten of them; so are weights of the model's own layers that nobody
// asks for. Other unknown tensors are a warning, vision tensors one log line.
absl::StatusOr<TensorMatch> MatchTensors(const Checkpoint& checkpoint, const ModelConfig& config);

// One "BF16 [2, 3]" for messages.
std::string DescribeStored(const Checkpoint& checkpoint, Checkpoint::Location at);

}  // namespace k3
