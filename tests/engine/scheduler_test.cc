#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::ExpectedPromptLogprobs;
using testing::ExpectedTokens;
using testing::Greedy;
using testing::RandomPrompt;
using testing::SchedulerHarness;
using Handle = SchedulerHarness::Handle;

SamplingParams Endless(int32_t tokens) {
  SamplingParams sampling = Greedy(tokens);
  sampling.ignore_eos = true;
  return sampling;
}

std::vector<int32_t> Join(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(SchedulerTest, OneRequestGivesTheModelsTokens) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const Handle handle = harness.Submit(RandomPrompt(100, 1), 20);
  harness.Run();
  harness.ExpectAlone(handle);
  EXPECT_EQ(handle.sink->admissions(), 1);
  EXPECT_EQ(handle.sink->usage().prompt_tokens, 100);
  EXPECT_EQ(handle.sink->usage().completion_tokens, static_cast<int32_t>(handle.sink->tokens().size()));
  EXPECT_GT(handle.sink->usage().prefill_seconds, 0);
  EXPECT_GT(handle.sink->usage().decode_seconds, 0);
  harness.ExpectIdle();
}

TEST(SchedulerTest, ManyRequestsTogetherGiveWhatEachGivesAlone) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 20; ++i) {
    handles.push_back(harness.Submit(RandomPrompt(1 + i * 13, i), 5 + static_cast<int32_t>(i)));
  }
  harness.Run();
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
  harness.ExpectIdle();
}

TEST(SchedulerTest, NothingToDoIsNoStep) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  EXPECT_FALSE(harness.Step());
  harness.Submit(RandomPrompt(3, 1), 1);
  EXPECT_TRUE(harness.Step());
  EXPECT_FALSE(harness.Step());
}

TEST(SchedulerTest, DecodesComeFirstAndChunksFillTheBudget) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_batched_tokens = 40;
  config.prefill_chunk = 40;
  SchedulerHarness harness(config);
  std::vector<Handle> decoding;
  for (uint64_t i = 0; i < 5; ++i) decoding.push_back(harness.Submit(RandomPrompt(4, i), Endless(100)));
  while (decoding.back().sink->tokens().empty()) harness.Step();
  const Handle prompt = harness.Submit(RandomPrompt(100, 9), Endless(3));
  while (prompt.sink->tokens().empty()) {
    const size_t before = decoding[0].sink->tokens().size();
    harness.Step();
    EXPECT_EQ(decoding[0].sink->tokens().size(), before + 1);
    const RankPlan& plan = harness.plan.ranks[0];
    EXPECT_EQ(plan.num_sequences(), 6);
    for (size_t s = 0; s < 5; ++s) EXPECT_EQ(plan.token_begin[s + 1] - plan.token_begin[s], 1);  // packed first
    if (prompt.sink->tokens().empty()) {
      EXPECT_EQ(plan.num_tokens(), 40);  // the rest belongs to the prompt
    }
  }
}

TEST(SchedulerTest, SequencesPerRankNeverExceedTheTokenBudget) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_batched_tokens = 3;
  config.prefill_chunk = 3;
  SchedulerHarness harness(config);
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 8; ++i) handles.push_back(harness.Submit(RandomPrompt(2, i), Endless(20)));
  while (harness.Step()) EXPECT_LE(harness.Load().running, 3);
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
}

TEST(SchedulerTest, ShortPromptsPassWaitingLongOnes) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_batched_tokens = 64;
  config.prefill_chunk = 32;
  config.long_prompt_tokens = 128;
  config.max_long_prefills = 2;
  SchedulerHarness harness(config);
  std::vector<Handle> longs;
  for (uint64_t i = 0; i < 4; ++i) longs.push_back(harness.Submit(RandomPrompt(600, i), 2));
  harness.Step();
  const Handle brief = harness.Submit(RandomPrompt(20, 9), 2);
  for (int step = 0; step < 3; ++step) harness.Step();
  EXPECT_TRUE(brief.sink->done());
  int admitted = 0;
  for (const Handle& handle : longs) admitted += handle.sink->admissions();
  EXPECT_EQ(admitted, 2);
  harness.Run();
  for (const Handle& handle : longs) harness.ExpectAlone(handle);
}

TEST(SchedulerTest, PriorityDecidesWhoRunsNext) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_seqs = 1;
  SchedulerHarness harness(config);
  const Handle running = harness.Submit(RandomPrompt(5, 1), Endless(5));
  harness.Step();
  const Handle low = harness.Submit(RandomPrompt(5, 2), 1, [](Request& r) { r.priority = -1; });
  const Handle high = harness.Submit(RandomPrompt(5, 3), 1, [](Request& r) { r.priority = 1; });
  while (!high.sink->done()) {
    EXPECT_FALSE(low.sink->done());
    ASSERT_TRUE(harness.Step());
  }
  harness.Run();
  EXPECT_TRUE(low.sink->status().ok());
  EXPECT_TRUE(running.sink->status().ok());
}

TEST(SchedulerTest, SessionsTakeTurns) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_seqs = 1;
  SchedulerHarness harness(config);
  std::vector<Handle> flood;
  for (uint64_t i = 0; i < 20; ++i) {
    flood.push_back(harness.Submit(RandomPrompt(5, i), 2, [](Request& r) { r.session_id = "flood"; }));
  }
  harness.Step();
  const Handle other = harness.Submit(RandomPrompt(5, 99), 2, [](Request& r) { r.session_id = "other"; });
  while (!other.sink->done()) ASSERT_TRUE(harness.Step());
  const auto done = std::count_if(flood.begin(), flood.end(), [](const Handle& h) { return h.sink->done(); });
  EXPECT_LE(done, 3);
  harness.Run();
}

TEST(SchedulerTest, TheOldestIsNeverPreemptedAndEverybodyEnds) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.latent_pages = 12;
  config.max_model_len = 180;
  SchedulerHarness harness(config);
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 12; ++i) handles.push_back(harness.Submit(RandomPrompt(15, i), Endless(150)));
  for (uint64_t before = 0; harness.Step(); before = harness.Load().preemptions) {
    if (harness.Load().preemptions == before) continue;
    // Nobody is admitted in a step that took pages away from somebody.
    EXPECT_TRUE(harness.plan.ranks[0].zero_slots.empty() && harness.plan.ranks[0].state_copies.empty());
  }
  EXPECT_GT(harness.Load().preemptions, 5u);
  EXPECT_EQ(handles[0].sink->usage().preemptions, 0);
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
  harness.ExpectIdle();
  EXPECT_EQ(harness.Load().pages_peak, 12);
}

TEST(SchedulerTest, DeadlinesEndRequestsInEveryPhase) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_seqs = 1;
  SchedulerHarness harness(config);
  const auto deadline = [&](int steps) {
    return [&harness, steps](Request& r) { r.deadline = harness.now + steps * harness.step_time; };
  };
  const Handle decoding = harness.Submit(RandomPrompt(5, 1), Endless(1000), deadline(20));
  const Handle queued = harness.Submit(RandomPrompt(5, 2), Endless(5), deadline(10));
  const Handle after = harness.Submit(RandomPrompt(5, 3), Endless(5), deadline(1000));
  EXPECT_EQ(harness.scheduler.NextDeadline(), harness.now + 10 * harness.step_time);
  harness.Run();
  EXPECT_EQ(queued.sink->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(queued.sink->choice().reason, FinishReason::kCancelled);
  EXPECT_EQ(decoding.sink->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NEAR(static_cast<double>(decoding.sink->tokens().size()), 20, 1);
  harness.ExpectAlone(after);
  harness.ExpectIdle();
}

TEST(SchedulerTest, DeadlinesOfEndedRequestsAreForgotten) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const Clock::time_point far = harness.now + std::chrono::hours(1);
  for (int i = 0; i < 20000; ++i) {
    const Handle handle = harness.Submit({1, 2, 3}, 1, [far](Request& r) { r.deadline = far; });
    harness.Cancel(handle);
  }
  const Handle last =
      harness.Submit({1, 2, 3}, Endless(5), [&](Request& r) { r.deadline = harness.now + harness.step_time; });
  EXPECT_EQ(harness.scheduler.NextDeadline(), harness.now + harness.step_time);
  harness.Run();
  EXPECT_EQ(last.sink->status().code(), absl::StatusCode::kDeadlineExceeded);
}

// --- several choices ---

TEST(SchedulerChoicesTest, ChoicesShareThePromptAndDiffer) {
  for (size_t length : {1, 15, 16, 17, 40, 64}) {
    for (bool caching : {true, false}) {
      EngineConfig config = SchedulerHarness::SmallConfig();
      config.enable_prefix_caching = caching;
      SchedulerHarness harness(config);
      SamplingParams sampling = Endless(20);
      sampling.temperature = 1;
      const Handle handle = harness.Submit(RandomPrompt(length, 1), sampling, [](Request& r) { r.num_choices = 4; });
      int64_t prompt_tokens = 0;
      while (harness.Step()) {
        for (int32_t position : harness.plan.ranks[0].position)
          prompt_tokens += position < static_cast<int32_t>(length);
        if (!handle.sink->tokens().empty() && !handle.sink->done() && handle.sink->tokens().size() == 2) {
          // Full pages once, and one open page for each.
          EXPECT_LE(harness.Load().pages_used, static_cast<int64_t>(length / 16) + 4);
          EXPECT_EQ(harness.Load().state_slots_used, 4);
        }
      }
      EXPECT_EQ(prompt_tokens, static_cast<int64_t>(length));  // computed once
      harness.ExpectAlone(handle);
      EXPECT_NE(handle.sink->tokens(0), handle.sink->tokens(1));
      EXPECT_EQ(handle.sink->usage().completion_tokens, 80);
      harness.ExpectIdle();
    }
  }
}

TEST(SchedulerChoicesTest, MoreChoicesThanMayRunAtOnceTakeTurns) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_seqs = 1;
  SchedulerHarness harness(config);
  SamplingParams sampling = Endless(12);
  sampling.temperature = 1;
  const Handle handle = harness.Submit(RandomPrompt(40, 1), sampling, [](Request& r) { r.num_choices = 5; });
  while (harness.Step()) EXPECT_LE(harness.plan.ranks[0].num_sequences(), 1);
  harness.ExpectAlone(handle);
  EXPECT_EQ(handle.sink->usage().preemptions, 0);
}

TEST(SchedulerChoicesTest, TheSourceMayEndFirst) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  SamplingParams sampling = Greedy(10);
  sampling.temperature = 1;
  const std::vector<int32_t> prompt = RandomPrompt(40, 1);
  // Choice 0 ends with its first token, the others do not.
  sampling.stop_token_ids = {ExpectedTokens(harness.model, prompt, sampling, 0, {}).tokens[0]};
  const Handle handle = harness.Submit(prompt, sampling, [](Request& r) { r.num_choices = 3; });
  harness.Run();
  harness.ExpectAlone(handle);
  EXPECT_EQ(handle.sink->tokens(0).size(), 1u);
  EXPECT_GT(handle.sink->tokens(1).size() + handle.sink->tokens(2).size(), 2u);
  harness.ExpectIdle();
}

TEST(SchedulerChoicesTest, AllMayEndWithTheirFirstToken) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const Handle handle = harness.Submit(RandomPrompt(40, 1), Greedy(1), [](Request& r) { r.num_choices = 3; });
  harness.Run();
  harness.ExpectAlone(handle);
  harness.ExpectIdle();
}

TEST(SchedulerChoicesTest, ANonFiniteChoiceEndsItsRequestOnce) {
  for (size_t poisoned = 0; poisoned < 3; ++poisoned) {
    SchedulerHarness harness(SchedulerHarness::SmallConfig());
    SamplingParams sampling = Endless(40);
    sampling.temperature = 1;
    const std::vector<int32_t> prompt = RandomPrompt(40, 1);
    const Handle handle = harness.Submit(prompt, sampling, [](Request& r) { r.num_choices = 3; });
    const Handle other = harness.Submit(RandomPrompt(30, 2), Endless(40));
    while (handle.sink->tokens(2).size() < 5) ASSERT_TRUE(harness.Step());
    // Find the choice's slot by what it fed last.
    const RankPlan& plan = harness.plan.ranks[0];
    const std::vector<int32_t> tokens = handle.sink->tokens(static_cast<int32_t>(poisoned));
    for (size_t s = 0; s < plan.context.size(); ++s) {
      const size_t position = static_cast<size_t>(plan.context[s]);
      if (position == prompt.size() + tokens.size() - 2 && plan.tokens[s] == tokens[tokens.size() - 2]) {
        harness.runner.PoisonSlot(0, {plan.state_slot[s]});
      }
    }
    ASSERT_TRUE(harness.Step());
    EXPECT_EQ(handle.sink->status().code(), absl::StatusCode::kInternal);
    EXPECT_EQ(harness.Load().nonfinite_rows, 1u);
    harness.Run();
    harness.ExpectAlone(other);
    harness.ExpectIdle();
    const Handle again = harness.Submit(prompt, sampling);
    harness.Run();
    EXPECT_EQ(again.sink->cached_tokens(), 0);
    harness.ExpectAlone(again);
  }
}

TEST(SchedulerChoicesTest, StoppingTheSourceDuringThePromptPassesItOn) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const std::vector<int32_t> prompt = RandomPrompt(200, 1);
  SamplingParams sampling = Endless(10);
  sampling.temperature = 1;
  sampling.prompt_logprobs = true;
  const Handle handle = harness.Submit(prompt, sampling, [](Request& r) { r.num_choices = 3; });
  harness.Step();
  harness.scheduler.StopChoice(handle.id, 0, harness.now);
  harness.Step([&] { harness.scheduler.StopChoice(handle.id, 1, harness.now); });
  harness.Run();
  EXPECT_TRUE(handle.sink->status().ok());
  EXPECT_TRUE(handle.sink->tokens(0).empty());
  EXPECT_TRUE(handle.sink->tokens(1).empty());
  EXPECT_EQ(handle.sink->choice(1).reason, FinishReason::kStop);
  EXPECT_EQ(handle.sink->tokens(2), ExpectedTokens(harness.model, prompt, sampling, 2, {}).tokens);
  EXPECT_EQ(handle.sink->prompt_logprobs(), ExpectedPromptLogprobs(harness.model, prompt));
  harness.ExpectIdle();
}

// --- log-probabilities ---

TEST(SchedulerLogprobsTest, PromptTokensAreScoredOnceInOrder) {
  for (int32_t max_new : {0, 5}) {
    for (size_t length : {1, 2, 17, 150}) {
      EngineConfig config = SchedulerHarness::SmallConfig();
      config.latent_pages = 12;
      config.max_model_len = 180;
      SchedulerHarness harness(config);
      const std::vector<int32_t> prompt = RandomPrompt(length, 1);
      harness.Submit(prompt, 1);  // the second request does not resume from what this one leaves
      harness.Run();
      SamplingParams sampling = Endless(max_new);
      sampling.prompt_logprobs = true;
      sampling.top_logprobs = 3;
      const Handle handle = harness.Submit(prompt, sampling);
      harness.Run();
      EXPECT_TRUE(handle.sink->status().ok());
      EXPECT_EQ(handle.sink->cached_tokens(), 0);
      EXPECT_EQ(handle.sink->prompt_logprobs(), ExpectedPromptLogprobs(harness.model, prompt));
      EXPECT_EQ(handle.sink->tokens().size(), static_cast<size_t>(max_new));
      EXPECT_EQ(handle.sink->choice().reason, FinishReason::kLength);
      harness.ExpectIdle();
    }
  }
}

TEST(SchedulerLogprobsTest, ChosenAndTopTokens) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  std::vector<Handle> handles;
  for (int32_t top : {-1, 0, 3, 20}) {
    SamplingParams sampling = Endless(6);
    sampling.top_logprobs = top;
    handles.push_back(harness.Submit(RandomPrompt(20, 1), sampling));
  }
  harness.Run();
  EXPECT_TRUE(handles[0].sink->choice().logprobs.empty());
  for (size_t i = 1; i < handles.size(); ++i) {
    const testing::RecordingSink::Choice got = handles[i].sink->choice();
    ASSERT_EQ(got.logprobs.size(), 6u);
    for (size_t t = 0; t < 6; ++t) {
      ASSERT_EQ(got.tops[t].size(), static_cast<size_t>(handles[i].sampling.top_logprobs));
      if (got.tops[t].empty()) continue;
      EXPECT_EQ(got.tops[t][0].token, got.tokens[t]);  // greedy
      EXPECT_EQ(got.tops[t][0].logprob, got.logprobs[t]);
      for (size_t k = 1; k < got.tops[t].size(); ++k) EXPECT_LE(got.tops[t][k].logprob, got.tops[t][k - 1].logprob);
    }
  }
}

// --- ends ---

TEST(SchedulerEndsTest, StopsMinimaAndRepetition) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const std::vector<int32_t> prompt = RandomPrompt(20, 1);
  const std::vector<int32_t> plain = ExpectedTokens(harness.model, prompt, Endless(10), 0, {}).tokens;

  SamplingParams stopped = Endless(10);
  stopped.stop_token_ids = {plain[3]};
  const Handle stop = harness.Submit(prompt, stopped);
  SamplingParams late = stopped;
  late.min_new_tokens = 6;
  const Handle minimum = harness.Submit(prompt, late);
  SamplingParams looping = Endless(20);
  looping.allowed_ids = {7};
  looping.repetition_max_period = 2;
  looping.repetition_count = 4;
  const Handle loop = harness.Submit(prompt, looping);
  harness.Run();
  harness.ExpectAlone(stop);
  EXPECT_EQ(stop.sink->choice().stop_token, plain[3]);
  EXPECT_EQ(stop.sink->tokens().size(), 4u);
  harness.ExpectAlone(minimum);
  EXPECT_GE(minimum.sink->tokens().size(), 6u);
  harness.ExpectAlone(loop);
  EXPECT_EQ(loop.sink->choice().reason, FinishReason::kRepetition);
  EXPECT_EQ(loop.sink->tokens(), std::vector<int32_t>(4, 7));
}

TEST(SchedulerEndsTest, ARowWithNothingAllowedIsAnError) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  SamplingParams sampling = Endless(5);
  sampling.allowed_ids = {4};
  sampling.banned_ids = {4};
  const Handle bad = harness.Submit(RandomPrompt(20, 1), sampling);
  const Handle good = harness.Submit(RandomPrompt(20, 2), Endless(5));
  harness.Run();
  EXPECT_EQ(bad.sink->status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(bad.sink->tokens().empty());
  EXPECT_EQ(harness.Load().nonfinite_rows, 0u);
  harness.ExpectAlone(good);
}

// --- prefix cache ---

TEST(SchedulerCacheTest, ThirdPromptResumesWhereTwoDiverged) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.snapshot_interval = 1024;
  SchedulerHarness harness(config);
  const std::vector<int32_t> shared = RandomPrompt(96, 1);
  const auto run = [&](uint64_t seed) {
    const Handle handle = harness.Submit(Join(shared, RandomPrompt(60, seed)), 4);
    harness.Run();
    harness.ExpectAlone(handle);
    return handle.sink->cached_tokens();
  };
  EXPECT_EQ(run(10), 0);
  EXPECT_EQ(run(11), 0);  // pages for 96 tokens are there, a state is not: it takes one
  EXPECT_EQ(run(12), 96);
  const EngineLoad load = harness.Load();
  EXPECT_EQ(load.prefix_query_tokens, 3u * 156u);
  EXPECT_EQ(load.prefix_page_hit_tokens, 2u * 96u);
  EXPECT_EQ(load.prefix_hit_tokens, 96u);
}

TEST(SchedulerCacheTest, AnswersAreCachedToo) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());  // a state every 64 tokens
  const std::vector<int32_t> prompt = RandomPrompt(50, 1);
  const Handle first = harness.Submit(prompt, Endless(100));
  harness.Run();
  const Handle second = harness.Submit(Join(Join(prompt, first.sink->tokens()), RandomPrompt(10, 2)), Endless(5));
  harness.Run();
  EXPECT_EQ(second.sink->cached_tokens(), 128);
  harness.ExpectAlone(second);
}

TEST(SchedulerCacheTest, SaltBypassAndFlush) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const std::vector<int32_t> prompt = RandomPrompt(100, 1);
  const auto cached = [&](const std::function<void(Request&)>& change) {
    const Handle handle = harness.Submit(prompt, Endless(4), change);
    harness.Run();
    harness.ExpectAlone(handle);
    return handle.sink->cached_tokens();
  };
  const auto salt = [](const char* name) { return [name](Request& r) { r.cache_salt = name; }; };
  const auto bypass = [](Request& r) { r.bypass_prefix_cache = true; };
  EXPECT_EQ(cached(bypass), 0);
  EXPECT_EQ(harness.Load().pages_cached, 0);  // and it leaves nothing
  EXPECT_EQ(cached(salt("a")), 0);
  EXPECT_EQ(cached(salt("b")), 0);
  EXPECT_EQ(cached(salt("a")), 96);
  EXPECT_EQ(cached({}), 0);
  EXPECT_EQ(cached(bypass), 0);
  harness.scheduler.FlushCache();
  EXPECT_EQ(cached(salt("a")), 0);
}

TEST(SchedulerCacheTest, AWrongFingerprintIsRecomputed) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const std::vector<int32_t> prompt = RandomPrompt(100, 1);
  harness.Submit(prompt, 1);
  harness.Run();
  CacheManager& cache = harness.scheduler.cache(0);
  for (int32_t id = harness.config.state_slots; id < harness.config.state_slots + harness.config.snapshot_slots; ++id) {
    if (!cache.states().IsFree({id})) cache.cache_for_test().CorruptFingerprintForTest({id});
  }
  const Handle handle = harness.Submit(prompt, Endless(10));
  harness.Run();
  EXPECT_EQ(handle.sink->cached_tokens(), 0);
  harness.ExpectAlone(handle);
  EXPECT_EQ(harness.scheduler.fingerprint_mismatches(), 2u);
}

TEST(SchedulerCacheTest, VerifiedHitsAgreeUnlessTheSnapshotIsWrong) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.verify_hits = 1;
  SchedulerHarness harness(config);
  const std::vector<int32_t> prompt = RandomPrompt(100, 1);
  SamplingParams sampling = Endless(6);
  sampling.temperature = 0.9f;
  harness.Submit(prompt, sampling);
  harness.Run();
  EXPECT_EQ(harness.Load().verified_hits, 0u);  // no hit, nothing to verify
  const Handle hit = harness.Submit(prompt, sampling);
  harness.Run();
  harness.ExpectAlone(hit);
  EXPECT_EQ(harness.Load().verified_hits, 1u);
  EXPECT_EQ(harness.Load().hit_disagreements, 0u);
  EXPECT_EQ(harness.Load().prompt_tokens, 200u);  // the recomputation is not a request
  EXPECT_EQ(harness.Load().generated_tokens, 12u);
  // A finite but wrong state: no check of the server's own can see it, except this one.
  for (int32_t id = config.state_slots; id < config.state_slots + config.snapshot_slots; ++id) {
    harness.runner.Slot(0, {id}).fold ^= 1;
  }
  harness.Submit(prompt, sampling);
  harness.Run();
  EXPECT_EQ(harness.Load().verified_hits, 2u);
  EXPECT_EQ(harness.Load().hit_disagreements, 1u);
  harness.ExpectIdle();
}

TEST(SchedulerCacheTest, VerifiesTheShareThatIsAskedFor) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.verify_hits = 0.25;
  SchedulerHarness harness(config);
  harness.Submit(RandomPrompt(40, 1), 1);
  harness.Run();
  for (int i = 0; i < 400; ++i) {
    harness.Submit(RandomPrompt(40, 1), 1);
    harness.Run();
  }
  EXPECT_NEAR(static_cast<double>(harness.Load().verified_hits), 100, 30);
  EXPECT_EQ(harness.Load().hit_disagreements, 0u);
}

// --- ranks ---

TEST(SchedulerRanksTest, SequencesGoWhereTheirPrefixIsOrLeastRuns) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.data_parallel = 3;
  SchedulerHarness harness(config);
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 6; ++i) handles.push_back(harness.Submit(RandomPrompt(50, i), Endless(10)));
  ASSERT_TRUE(harness.Step());
  ASSERT_EQ(harness.plan.ranks.size(), 3u);  // every rank is in every plan
  for (const RankPlan& rank : harness.plan.ranks) EXPECT_EQ(rank.num_sequences(), 2);
  harness.Run();
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
  // Each again: it is resumed, hence on the rank that holds it.
  for (uint64_t i = 0; i < 6; ++i) {
    const Handle again = harness.Submit(RandomPrompt(50, i), Endless(10));
    harness.Run();
    EXPECT_EQ(again.sink->cached_tokens(), 48);
    harness.ExpectAlone(again);
  }
  const Handle lone = harness.Submit(RandomPrompt(5, 50), Endless(2));
  ASSERT_TRUE(harness.Step());
  int idle = 0;
  for (const RankPlan& rank : harness.plan.ranks) idle += rank.empty();
  EXPECT_EQ(idle, 2);
  harness.Run();
  harness.ExpectAlone(lone);
}

TEST(SchedulerRanksTest, MaxNumSeqsCountsOverAllRanks) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.data_parallel = 2;
  config.max_num_seqs = 3;
  SchedulerHarness harness(config);
  for (uint64_t i = 0; i < 9; ++i) harness.Submit(RandomPrompt(30, i), Endless(10));
  while (harness.Step()) EXPECT_LE(harness.Load().running, 3);
  harness.ExpectIdle();
}

TEST(SchedulerTest, WhatBindsIsCounted) {
  const auto bound = [](const std::function<void(EngineConfig&)>& change) {
    EngineConfig config = SchedulerHarness::SmallConfig();
    change(config);
    SchedulerHarness harness(config);
    for (uint64_t i = 0; i < 4; ++i) harness.Submit(RandomPrompt(60, i), Endless(20));
    harness.Run();
    const EngineLoad load = harness.Load();
    return std::vector<bool>{load.steps_bound_by_pages > 0, load.steps_bound_by_state_slots > 0,
                             load.steps_bound_by_max_seqs > 0};
  };
  EXPECT_EQ(bound([](EngineConfig&) {}), (std::vector<bool>{false, false, false}));
  EXPECT_EQ(bound([](EngineConfig& c) { c.latent_pages = 7; }), (std::vector<bool>{true, false, false}));
  EXPECT_EQ(bound([](EngineConfig& c) { c.state_slots = 2; }), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(bound([](EngineConfig& c) { c.max_num_seqs = 2; }), (std::vector<bool>{false, false, true}));
}

// --- many waiting ---

TEST(SchedulerTest, AHundredThousandWaitWithoutHarm) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  ASSERT_TRUE(config.Resolve().ok());
  Scheduler scheduler(config);
  testing::HashModelRunner runner(testing::HashModel(config.vocab_size), config);
  class Quiet : public TokenSink {
    void OnToken(int32_t, int32_t, const TokenLogprob*) override {}
    void OnChoiceFinished(int32_t, FinishReason, int32_t) override {}
    void OnFinished(const absl::Status&, const RequestUsage&) override {}
  };
  const auto quiet = std::make_shared<Quiet>();
  Clock::time_point now{};
  constexpr int kRequests = 100000;
  for (int i = 1; i <= kRequests; ++i) {
    auto request = std::make_unique<Request>();
    request->prompt_tokens = {i % 90, 1, 2};
    request->sampling = Endless(1000);
    request->session_id = std::to_string(i % 100);
    request->priority = i % 7;
    request->sink = quiet;
    scheduler.Submit(static_cast<RequestId>(i), std::move(request), now);
  }
  StepPlan plan;
  StepResult result;
  for (int step = 0; step < 100; ++step) {
    now += std::chrono::milliseconds(1);
    ASSERT_TRUE(scheduler.PlanStep(now, &plan));
    EXPECT_EQ(plan.ranks[0].num_sequences(), 8);
    ASSERT_TRUE(runner.Run(plan, &result).ok());
    scheduler.CommitStep(plan, result, now);
  }
  EXPECT_EQ(scheduler.backlog().queued, kRequests - 8);
  for (int i = 1; i <= kRequests; ++i) scheduler.Cancel(static_cast<RequestId>(i), absl::CancelledError(""), now);
  EXPECT_FALSE(scheduler.HasWork());
  EXPECT_EQ(scheduler.backlog().queued, 0);
}

}  // namespace
}  // namespace k3
