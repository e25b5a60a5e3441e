#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "engine/model/weights_loader.h"
#include "tests/engine/model/recording_ops.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/temp_dir.h"

namespace k3::testing {

inline const RecordedLinear& Recorded(const std::unique_ptr<LinearWeight>& weight) {
  return dynamic_cast<const RecordedLinear&>(*weight);
}

// A checkpoint on disk and what loading it with a RecordingOps gives.
struct Loaded {
  TempDir dir;
  RecordingOps ops;
  absl::StatusOr<std::unique_ptr<LoadedModel>> model = absl::UnknownError("not loaded");

  explicit Loaded(const TestCheckpoint& content, int shards = 1, const LoadOptions& options = {}) {
    content.Write(dir.path(), shards);
    Load(options);
  }
  void Load(const LoadOptions& options = {}) {
    const auto config = LoadModelConfig(dir.path());
    model = config.ok() ? LoadWeights(dir.path(), *config, ops, options) : config.status();
  }
  std::string message() const { return std::string(model.status().message()); }
  const Weights& weights() const { return (*model)->weights; }
};

// The rows of these tensors below each other, as floats.
inline std::vector<float> Stacked(const TestCheckpoint& content, const std::string& prefix,
                                  std::initializer_list<const char*> names) {
  std::vector<float> values;
  for (const char* name : names) {
    const std::vector<double> part = content.Doubles(prefix + name);
    EXPECT_FALSE(part.empty()) << prefix << name;
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}

inline std::vector<float> Folded(const TestCheckpoint& content, const std::string& norm, const std::string& query) {
  const std::vector<double> a = content.Doubles(norm), b = content.Doubles(query);
  std::vector<float> out;
  for (size_t i = 0; i < a.size(); ++i) out.push_back(static_cast<float>(a[i]) * static_cast<float>(b[i]));
  return out;
}

// The message of a load that a change to the checkpoint makes fail.
inline std::string FailureAfter(const ModelConfig& config, const std::function<void(TestCheckpoint&)>& change,
                                int shards = 1) {
  TestCheckpoint content(config);
  change(content);
  const Loaded loaded(content, shards);
  if (loaded.model.ok()) return "loaded without an error";
  EXPECT_EQ(loaded.model.status().code(), absl::StatusCode::kDataLoss) << loaded.message();
  return loaded.message();
}

inline constexpr char kK3[] = "language_model.model.";

}  // namespace k3::testing
