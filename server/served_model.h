#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine_interface.h"
#include "server/grammar/grammar_pool.h"
#include "server/text/chat_renderer.h"
#include "server/text/tokenizer.h"

namespace k3 {

// What generation_config.json says; absent sampling values are neutral.
struct SamplingDefaults {
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<int32_t> top_k;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::vector<int32_t> eos_token_ids;
};

// Everything about the loaded model that requests need. Immutable once it is installed; the engine outlives it.
struct ServedModel {
  std::vector<std::string> names;  // the first is told back
  std::string root;                // ModelNameOf the folder
  int64_t created = 0;             // seconds since 1970
  std::string weights_version;
  std::string device;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const ChatRenderer> renderer;
  std::vector<int32_t> eos_token_ids;  // what the engine stops at
  SamplingDefaults defaults;
  EngineInterface* engine = nullptr;
  std::shared_ptr<GrammarPool> grammars;  // null: this build has no structured output
};

// Reads generation_config.json in `dir`; all absent when there is none. INVALID_ARGUMENT naming file and field. Fields
// that would change answers but cannot be followed, such as beam search, are one warning.
absl::StatusOr<SamplingDefaults> LoadSamplingDefaults(const std::string& dir);

}  // namespace k3
