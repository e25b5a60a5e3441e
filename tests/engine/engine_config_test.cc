#include "engine/engine_config.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/testing/recording_sink.h"
#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::SchedulerHarness;

TEST(EngineConfigTest, DefaultsAreFilledIn) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.prefill_chunk = 0;
  config.long_prompt_tokens = 0;
  ASSERT_TRUE(config.Resolve().ok());
  EXPECT_EQ(config.prefill_chunk, config.max_num_batched_tokens);
  EXPECT_EQ(config.long_prompt_tokens, 4 * config.prefill_chunk);
  EXPECT_EQ(config.pool_tokens(), 256 * 16);
  EXPECT_EQ(config.PagesFor(0), 0);
  EXPECT_EQ(config.PagesFor(16), 1);
  EXPECT_EQ(config.PagesFor(17), 2);
}

TEST(EngineConfigTest, EveryBadValueIsNamed) {
  const std::pair<const char*, std::function<void(EngineConfig&)>> cases[] = {
      {"vocab_size", [](EngineConfig& c) { c.vocab_size = 0; }},
      {"max_model_len", [](EngineConfig& c) { c.max_model_len = 1; }},
      {"max_num_seqs", [](EngineConfig& c) { c.max_num_seqs = 0; }},
      {"max_num_batched_tokens", [](EngineConfig& c) { c.max_num_batched_tokens = 0; }},
      {"prefill_chunk", [](EngineConfig& c) { c.prefill_chunk = c.max_num_batched_tokens + 1; }},
      {"prefill_chunk", [](EngineConfig& c) { c.prefill_chunk = -1; }},
      {"max_queue", [](EngineConfig& c) { c.max_queue = 0; }},
      {"data_parallel", [](EngineConfig& c) { c.data_parallel = 0; }},
      {"page_size", [](EngineConfig& c) { c.page_size = 0; }},
      {"latent_pages", [](EngineConfig& c) { c.latent_pages = 0; }},
      {"state_slots", [](EngineConfig& c) { c.state_slots = 0; }},
      {"snapshot_slots", [](EngineConfig& c) { c.snapshot_slots = -1; }},
      {"snapshot_interval", [](EngineConfig& c) { c.snapshot_interval = 24; }},
      {"verify_hits", [](EngineConfig& c) { c.verify_hits = 1.5; }},
      {"ageing_seconds", [](EngineConfig& c) { c.ageing_seconds = 0; }},
      {"eos_token_ids", [](EngineConfig& c) { c.eos_token_ids = {c.vocab_size}; }},
  };
  for (const auto& [field, change] : cases) {
    EngineConfig config = SchedulerHarness::SmallConfig();
    change(config);
    const absl::Status status = config.Resolve();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_NE(status.message().find(field), absl::string_view::npos) << status.ToString();
  }
}

TEST(CheckRequestTest, EveryBadRequestIsRefused) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  ASSERT_TRUE(config.Resolve().ok());
  const std::pair<const char*, std::function<void(Request&)>> cases[] = {
      {"prompt_tokens", [](Request& r) { r.prompt_tokens.clear(); }},
      {"prompt_tokens", [](Request& r) { r.prompt_tokens[1] = SchedulerHarness::kVocab; }},
      {"prompt_tokens", [](Request& r) { r.prompt_tokens[1] = -1; }},
      {"sink", [](Request& r) { r.sink = nullptr; }},
      {"num_choices", [](Request& r) { r.num_choices = 0; }},
      {"constraints", [](Request& r) { r.constraints.resize(2); }},
      {"max_new_tokens", [](Request& r) { r.sampling.max_new_tokens = 0; }},
      {"max_new_tokens", [](Request& r) { r.sampling.max_new_tokens = -1; }},
      {"context limit", [](Request& r) { r.sampling.max_new_tokens = 4094; }},
      {"context limit", [](Request& r) { r.sampling.max_new_tokens = INT32_MAX; }},
      {"stop_token_ids", [](Request& r) { r.sampling.stop_token_ids = {SchedulerHarness::kVocab}; }},
      {"banned_ids", [](Request& r) { r.sampling.banned_ids = {-1}; }},
      {"allowed_ids", [](Request& r) { r.sampling.allowed_ids = {1 << 30}; }},
      {"logit_bias",
       [](Request& r) {
         r.sampling.logit_bias = {{SchedulerHarness::kVocab, 1.0f}};
       }},
  };
  for (const auto& [word, change] : cases) {
    Request request;
    request.prompt_tokens = {1, 2, 3};
    request.sampling.max_new_tokens = 4093;
    request.sink = std::make_shared<testing::RecordingSink>();
    EXPECT_TRUE(CheckRequest(config, request).ok());
    change(request);
    const absl::Status status = CheckRequest(config, request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << word;
    EXPECT_NE(status.message().find(word), absl::string_view::npos) << status.ToString();
  }
}

TEST(CheckRequestTest, ScoringAloneNeedsNoNewTokens) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  ASSERT_TRUE(config.Resolve().ok());
  Request request;
  request.prompt_tokens.assign(4096, 1);  // the whole context, and the whole pool
  request.sampling.max_new_tokens = 0;
  request.sampling.prompt_logprobs = true;
  request.sink = std::make_shared<testing::RecordingSink>();
  EXPECT_TRUE(CheckRequest(config, request).ok());
}

}  // namespace
}  // namespace k3
