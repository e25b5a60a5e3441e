#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/api_keys.h"
#include "server/generation_service.h"
#include "server/health.h"
#include "server/metrics.h"
#include "server/served_model.h"
#include "tests/testing/mock_engine.h"

namespace k3::testing {

// The generation service over a MockEngine, with tiny-k3's tokenizer and chat format.
struct MockService {
  struct Options {
    MockEngine::Options engine;
    GenerationService::Options service;
    bool loaded = true;
  };
  explicit MockService(Options options);

  // Makes the model known and the state serving.
  void Install();
  // The engine will produce these tokens for every choice, then the end of the message.
  static MockEngine::Script Tokens(std::vector<int32_t> tokens);
  // The ids of ordinary text.
  static std::vector<int32_t> Encode(const std::string& text);
  // A token of exactly these bytes.
  static int32_t TokenOf(const std::string& bytes);

  static std::shared_ptr<const Tokenizer> tokenizer();
  static int32_t eos();  // <|end_of_msg|>

  ServerHealth health;
  Metrics metrics;
  GenerationService generation;
  MockEngine engine;  // ends first: its sinks belong to the service
};

}  // namespace k3::testing
