// Cases from public bug reports of other servers (B01 to B21), at the level of the scheduler, over the hash model.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::Endless;
using testing::ExpectedChoice;
using testing::Greedy;
using testing::HashState;
using testing::Join;
using testing::RandomPrompt;
using testing::SchedulerHarness;
using Handle = SchedulerHarness::Handle;

// C, S, P of the cases in the harness's own words.
EngineConfig Config(int32_t chunk, int32_t interval, int32_t page, int32_t budget = 256) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.prefill_chunk = chunk;
  config.snapshot_interval = interval;
  config.page_size = page;
  config.latent_pages = 4096 / page;
  config.max_num_batched_tokens = std::max(budget, chunk);
  return config;
}

// The harness poisons every free slot and page before each step, in all of these cases.
TEST(BugReportCases, B01ReusedSlotHoldsNothingOfThePreviousRequest) {
  EngineConfig config = Config(64, 64, 64);
  config.max_num_seqs = 1;
  config.state_slots = 1;
  SchedulerHarness harness(config);
  for (size_t length : {1, 2, 3, 4, 63, 64, 65}) {
    const Handle handle = harness.Submit(RandomPrompt(length, length), 16);
    harness.Run();
    harness.ExpectAlone(handle);
  }
  EXPECT_EQ(harness.Load().nonfinite_rows, 0u);
  const Handle a = harness.Submit(RandomPrompt(500, 100), 4);
  harness.Run();
  const Handle b = harness.Submit(RandomPrompt(5, 101), 16);
  harness.Run();
  harness.ExpectAlone(a);
  harness.ExpectAlone(b);
}

TEST(BugReportCases, B02PreemptedRequestsRecomputeFromAMatchingState) {
  EngineConfig config = Config(64, 64, 16);
  config.max_model_len = 512;
  config.latent_pages = 40;  // 640 tokens: two requests of 400 do not fit
  for (bool caching : {true, false}) {
    config.enable_prefix_caching = caching;
    SchedulerHarness harness(config);
    SamplingParams sampling = Endless(200);
    const Handle a = harness.Submit(RandomPrompt(200, 1), sampling);
    const Handle b = harness.Submit(RandomPrompt(200, 2), sampling);
    harness.Run();
    EXPECT_GE(harness.Load().preemptions, 1u);
    EXPECT_EQ(a.sink->usage().preemptions, 0);  // the older one is never the victim
    EXPECT_GE(b.sink->usage().preemptions, 1);
    harness.ExpectAlone(a);
    harness.ExpectAlone(b);
  }
}

TEST(BugReportCases, B02PreemptedTwice) {
  EngineConfig config = Config(64, 64, 16);
  config.max_model_len = 512;
  config.latent_pages = 20;  // 320 tokens; three answers together want 600
  SchedulerHarness harness(config);
  SamplingParams sampling = Endless(170);
  std::vector<Handle> handles;
  handles.push_back(harness.Submit(RandomPrompt(30, 10), sampling));
  sampling.max_new_tokens = 100;
  handles.push_back(harness.Submit(RandomPrompt(30, 11), sampling));
  sampling.max_new_tokens = 250;
  handles.push_back(harness.Submit(RandomPrompt(30, 12), sampling));
  harness.Run();
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
  EXPECT_GE(handles[2].sink->usage().preemptions, 2);
}

TEST(BugReportCases, B02PreemptedInTheMiddleOfPrefill) {
  EngineConfig config = Config(8, 64, 2, 32);
  config.latent_pages = 44;
  SchedulerHarness harness(config);
  SamplingParams sampling = Endless(50);
  const Handle a = harness.Submit(RandomPrompt(20, 1), sampling);
  while (a.sink->tokens().empty()) ASSERT_TRUE(harness.Step());
  // Fits when it is admitted, but while its eight chunks are computed the older one takes four pages more.
  const Handle b = harness.Submit(RandomPrompt(64, 2), 8);
  while (harness.Load().preemptions == 0) ASSERT_TRUE(harness.Step());
  EXPECT_EQ(b.sink->admissions(), 1);
  EXPECT_TRUE(b.sink->tokens().empty());
  EXPECT_EQ(harness.Load().running, 1);
  harness.Run();
  EXPECT_GE(b.sink->usage().preemptions, 1);
  harness.ExpectAlone(a);
  harness.ExpectAlone(b);
}

TEST(BugReportCases, B03EveryChunkReachesTheState) {
  for (size_t length : {1, 63, 64, 65, 127, 128, 129, 193}) {
    std::vector<int32_t> first;
    for (int32_t chunk : {64, 4096}) {
      EngineConfig config = Config(chunk, 64, 16, 4096);
      SchedulerHarness harness(config);
      const Handle handle = harness.Submit(RandomPrompt(length, length), 8);
      harness.Run();
      harness.ExpectAlone(handle);
    }
  }
  // Token 0 of a prompt of several chunks matters.
  std::vector<int32_t> prompt = RandomPrompt(193, 193);
  SchedulerHarness harness(Config(64, 64, 16));
  const Handle original = harness.Submit(prompt, 8);
  prompt[0] = (prompt[0] + 1) % 90;
  const Handle changed = harness.Submit(prompt, 8);
  harness.Run();
  EXPECT_NE(original.sink->tokens(), changed.sink->tokens());
}

TEST(BugReportCases, B05SnapshotsOfSeveralPromptsInOneStep) {
  for (const std::vector<size_t>& lengths : {std::vector<size_t>{70, 130, 200}, std::vector<size_t>{200, 70, 130}}) {
    SchedulerHarness harness(Config(256, 64, 64, 512));
    std::vector<Handle> first;
    for (size_t length : lengths) first.push_back(harness.Submit(RandomPrompt(length, length), 1));
    ASSERT_TRUE(harness.Step());
    ASSERT_EQ(harness.plan.ranks[0].num_sequences(), 3);  // they share one step
    harness.Run();
    for (size_t length : lengths) {
      const Handle again = harness.Submit(Join(RandomPrompt(length, length), RandomPrompt(10, 999)), 16);
      harness.Run();
      EXPECT_EQ(again.sink->cached_tokens(), static_cast<int32_t>(length / 64 * 64));
      harness.ExpectAlone(again);
    }
  }
}

TEST(BugReportCases, B06StoredPositionIsWhatAHitSkips) {
  EngineConfig refused = Config(64, 48, 64);
  const absl::Status status = refused.Resolve();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("48"), absl::string_view::npos) << status.ToString();
  for (int32_t page : {64, 16}) {
    SchedulerHarness harness(Config(64, 64, page));
    for (size_t length = 50; length <= 204; length += 7) {
      harness.Submit(RandomPrompt(length, length), 1);
      harness.Run();
      const Handle longer = harness.Submit(Join(RandomPrompt(length, length), RandomPrompt(20, 5)), 8);
      harness.Run();
      harness.ExpectAlone(longer);
      // The documented rule: snapshots lie at the last page boundary at or before length - 1 and every S tokens.
      const int32_t n = static_cast<int32_t>(length);
      EXPECT_EQ(longer.sink->cached_tokens(), std::max((n - 1) / page * page, n / 64 * 64));
      harness.scheduler.FlushCache();
    }
  }
}

TEST(BugReportCases, B08ShortContinuationsLeaveTheSharedSnapshotAlone) {
  for (int32_t chunk : {64, 2}) {
    SchedulerHarness harness(Config(chunk, 64, 64));
    const std::vector<int32_t> prefix = RandomPrompt(64, 7);
    const Handle seed = harness.Submit(Join(prefix, {1}), 1);
    harness.Run();
    harness.ExpectAlone(seed);
    StateSlot slot;
    const CacheManager& cache = harness.scheduler.cache(0);
    for (int32_t id = 0; id < cache.pages().total(); ++id) {
      if (cache.cache().Contains({id}) && cache.cache().SnapshotOf({id}).valid()) slot = cache.cache().SnapshotOf({id});
    }
    ASSERT_TRUE(slot.valid());
    const HashState bytes = harness.runner.Slot(0, slot);
    std::vector<Handle> handles;
    for (int round = 0; round < 2; ++round) {
      for (size_t more = 1; more <= 4; ++more) {
        handles.push_back(harness.Submit(Join(prefix, RandomPrompt(more, 20 + more)), 8));
        if (round == 0) harness.Run();
      }
      harness.Run();
    }
    handles.push_back(harness.Submit(Join(prefix, RandomPrompt(50, 40)), 8));
    harness.Run();
    for (const Handle& handle : handles) {
      EXPECT_EQ(handle.sink->cached_tokens(), 64);
      harness.ExpectAlone(handle);
    }
    EXPECT_EQ(harness.runner.Slot(0, slot), bytes);
  }
}

TEST(BugReportCases, B09NonFiniteRowEndsOnlyItsOwnRequest) {
  EngineConfig config = Config(64, 64, 16);
  config.state_slots = 4;
  SchedulerHarness harness(config);
  SamplingParams sampling = Endless(40);
  const std::vector<int32_t> poisoned_prompt = RandomPrompt(100, 1);
  const Handle a = harness.Submit(poisoned_prompt, sampling);
  const Handle b = harness.Submit(RandomPrompt(90, 2), sampling);
  const Handle c = harness.Submit(RandomPrompt(80, 3), sampling);
  while (a.sink->tokens().size() < 5) ASSERT_TRUE(harness.Step());
  // A was admitted first into the first slot.
  harness.runner.Slot(0, {0}).fold = testing::kPoison;
  int steps = 0;
  while (!a.sink->done()) {
    ASSERT_TRUE(harness.Step());
    ASSERT_LE(++steps, 2);
  }
  EXPECT_EQ(a.sink->status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(a.sink->choice().reason, FinishReason::kError);
  EXPECT_EQ(harness.Load().nonfinite_rows, 1u);
  EXPECT_GT(harness.runner.scrubbed_pages, 0);
  EXPECT_GT(harness.runner.scrubbed_slots, 0);
  harness.Run();
  harness.ExpectAlone(b);
  harness.ExpectAlone(c);
  std::vector<Handle> later;
  for (uint64_t i = 0; i < 20; ++i) later.push_back(harness.Submit(RandomPrompt(30 + i * 5, 50 + i), 10));
  harness.Run();
  for (const Handle& handle : later) harness.ExpectAlone(handle);
  const Handle again = harness.Submit(poisoned_prompt, sampling);
  harness.Run();
  EXPECT_EQ(again.sink->cached_tokens(), 0);
  harness.ExpectAlone(again);
  EXPECT_EQ(harness.Load().nonfinite_rows, 1u);
  harness.ExpectIdle();
}

TEST(BugReportCases, B09ABadSnapshotIsNotMetTwice) {
  SchedulerHarness harness(Config(64, 64, 16));
  const std::vector<int32_t> prompt = RandomPrompt(130, 1);
  harness.Submit(prompt, 1);
  harness.Run();
  for (int32_t id = harness.config.state_slots; id < harness.config.state_slots + harness.config.snapshot_slots; ++id) {
    if (!harness.scheduler.cache(0).states().IsFree({id})) harness.runner.PoisonSlot(0, {id});
  }
  // Both snapshots on the way, at 128 and at 64, are bad: each is dropped by the request that meets it.
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Handle hit = harness.Submit(prompt, 4);
    harness.Run();
    EXPECT_EQ(hit.sink->cached_tokens(), attempt == 0 ? 128 : 64);
    EXPECT_EQ(hit.sink->status().code(), absl::StatusCode::kInternal);
  }
  const Handle fresh = harness.Submit(prompt, 4);
  harness.Run();
  EXPECT_EQ(fresh.sink->cached_tokens(), 0);
  harness.ExpectAlone(fresh);
}

TEST(BugReportCases, B10RepeatedPromptsDoNotApplyTheLastTokenTwice) {
  SchedulerHarness harness(Config(64, 64, 64));
  const std::pair<size_t, int32_t> cases[] = {{127, 64}, {128, 64}, {129, 128}};
  for (const auto& [length, cached] : cases) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Handle handle = harness.Submit(RandomPrompt(length, 1000 + length), 12);
      harness.Run();
      EXPECT_EQ(handle.sink->cached_tokens(), repeat == 0 ? 0 : cached) << length;
      harness.ExpectAlone(handle);
    }
  }
}

TEST(BugReportCases, B12ImpossibleRequestsAreRefusedAtOnce) {
  EngineConfig config = Config(64, 64, 16, 256);
  config.max_model_len = 16384;
  config.latent_pages = 256;  // 4,096 tokens
  SchedulerHarness harness(config);
  Request impossible;
  impossible.prompt_tokens = RandomPrompt(5000, 1);
  impossible.sampling = Greedy(10);
  impossible.sink = std::make_shared<testing::RecordingSink>();
  const absl::Status status = CheckRequest(harness.config, impossible);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("5000"), absl::string_view::npos);
  EXPECT_NE(status.message().find("4096"), absl::string_view::npos);

  SamplingParams endless = Endless(500);
  const Handle large = harness.Submit(RandomPrompt(4000, 2), endless);
  const Handle small = harness.Submit(RandomPrompt(20, 3), 5);
  harness.Run();
  harness.ExpectAlone(small);
  // Ends with kLength when the pool is full: all 4,096 places, and one token that needs none.
  EXPECT_TRUE(large.sink->status().ok());
  EXPECT_EQ(large.sink->choice().reason, FinishReason::kLength);
  EXPECT_EQ(large.sink->tokens().size(), 97u);
  harness.ExpectIdle();
}

TEST(BugReportCases, B13AHugePromptStopsNobody) {
  EngineConfig config = Config(64, 64, 64, 128);
  config.max_model_len = 8192;
  config.latent_pages = 160;
  int alone_steps = 0;
  {
    SchedulerHarness harness(config);
    const Handle huge = harness.Submit(RandomPrompt(6400, 2), 1);
    while (harness.Step()) ++alone_steps;
    harness.ExpectAlone(huge);
  }
  SchedulerHarness harness(config);
  SamplingParams streaming = Endless(400);
  const Handle stream = harness.Submit(RandomPrompt(10, 1), streaming);
  harness.Step();
  const Handle huge = harness.Submit(RandomPrompt(6400, 2), 1);
  Handle brief;
  int steps = 0, brief_first = -1;
  while (!huge.sink->done()) {
    const size_t before = stream.sink->tokens().size();
    ASSERT_TRUE(harness.Step());
    ++steps;
    if (!stream.sink->done()) {
      EXPECT_EQ(stream.sink->tokens().size(), before + 1) << "step " << steps;
    }
    if (steps == 10) brief = harness.Submit(RandomPrompt(20, 3), 5);
    if (steps > 10 && brief_first < 0 && !brief.sink->tokens().empty()) brief_first = steps;
  }
  EXPECT_GT(brief_first, 0);
  EXPECT_LT(brief_first, 20);
  EXPECT_LE(steps, alone_steps * 3 / 2);
  harness.Run();
  harness.ExpectAlone(stream);
  harness.ExpectAlone(huge);
  harness.ExpectAlone(brief);
}

TEST(BugReportCases, B14AbortsInEveryPhaseLeaveNothingBehind) {
  EngineConfig config = Config(64, 64, 16, 128);
  SchedulerHarness harness(config);
  const auto run_until = [&](const Handle& handle, size_t tokens) {
    while (handle.sink->tokens().size() < tokens) ASSERT_TRUE(harness.Step());
  };
  for (int repeat = 0; repeat < 50; ++repeat) {
    const uint64_t seed = static_cast<uint64_t>(repeat);
    const std::vector<int32_t> prompt = RandomPrompt(256, seed);
    std::vector<Handle> handles;
    const auto submit = [&] { return handles.emplace_back(harness.Submit(prompt, 50)); };

    Handle handle = submit();  // still queued
    harness.Cancel(handle);

    handle = submit();  // after chunk 1
    harness.Step();
    harness.Cancel(handle);
    // An unfinished prompt does not enter the cache.
    EXPECT_EQ(harness.Load().pages_cached, 0);

    handle = submit();  // while the last chunk is in flight
    for (int step = 0; step < 3; ++step) harness.Step();
    harness.Step([&] { harness.Cancel(handle); });
    EXPECT_TRUE(handle.sink->done());

    handle = submit();  // at decode step 1
    run_until(handle, 1);
    harness.Cancel(handle);

    handle = handles.emplace_back(harness.Submit(prompt, 3));  // in the same step as the natural end
    run_until(handle, 2);
    harness.Step([&] { harness.Cancel(handle); });
    EXPECT_TRUE(handle.sink->status().ok());

    handle = submit();  // twice in a row
    harness.Step();
    harness.Step([&] {
      harness.Cancel(handle);
      harness.Cancel(handle);
    });
    harness.Cancel(handle);

    harness.Run();
    for (const Handle& ended : handles) EXPECT_EQ(ended.sink->finals(), 1);
    harness.ExpectIdle();
    const Handle healthy = harness.Submit(prompt, 10);
    harness.Run();
    harness.ExpectAlone(healthy);
    harness.scheduler.FlushCache();
  }
}

TEST(BugReportCases, B15EveryAdmittedRequestCounts) {
  EngineConfig config = Config(64, 64, 16, 256);
  config.max_num_seqs = 1;
  for (bool cancel_second : {false, true}) {
    SchedulerHarness harness(config);
    SamplingParams sampling = Endless(10);
    const Handle a = harness.Submit(RandomPrompt(256, 1), sampling);
    const Handle b = harness.Submit(RandomPrompt(256, 2), sampling);
    const Handle c = harness.Submit(RandomPrompt(5, 3), sampling);
    if (cancel_second) harness.Cancel(b);
    std::vector<int32_t> waiting;
    while (harness.Step()) {
      const EngineLoad load = harness.Load();
      EXPECT_LE(load.running, 1);
      EXPECT_LE(harness.plan.ranks[0].num_sequences(), 1);
      if (waiting.empty() || waiting.back() != load.waiting) waiting.push_back(load.waiting);
    }
    EXPECT_EQ(waiting, cancel_second ? (std::vector<int32_t>{1, 0}) : (std::vector<int32_t>{2, 1, 0}));
    harness.ExpectAlone(a);
    harness.ExpectAlone(c);
    if (!cancel_second) harness.ExpectAlone(b);
  }
}

TEST(BugReportCases, B16PromptLengthAtTheLimit) {
  EngineConfig config = Config(64, 64, 16);
  config.max_model_len = 512;
  SchedulerHarness harness(config);
  const Handle full = harness.Submit(RandomPrompt(511, 1), 1);
  harness.Run();
  EXPECT_EQ(full.sink->tokens().size(), 1u);
  EXPECT_EQ(full.sink->choice().reason, FinishReason::kLength);
  const std::pair<size_t, int32_t> bad[] = {{512, 1}, {513, 1}, {500, 100}, {0, 1}};
  for (const auto& [prompt, max_new] : bad) {
    Request request;
    request.prompt_tokens = RandomPrompt(prompt, 2);
    request.sampling = Greedy(max_new);
    request.sink = std::make_shared<testing::RecordingSink>();
    const absl::Status status = CheckRequest(harness.config, request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << prompt;
    if (prompt == 0) continue;
    EXPECT_NE(status.message().find("512"), absl::string_view::npos) << status.ToString();
    EXPECT_NE(status.message().find(std::to_string(prompt)), absl::string_view::npos) << status.ToString();
  }
}

TEST(BugReportCases, B17TopKBeyondTheVocabularyIsOff) {
  SchedulerHarness harness(Config(64, 64, 16));
  const int32_t vocab = harness.config.vocab_size;
  const std::vector<int32_t> prompt = RandomPrompt(20, 1);
  std::vector<Handle> handles;
  SamplingParams sampling = Endless(12);
  sampling.seed = 7;
  for (bool together : {false, true}) {
    for (int32_t top_k : {-1, 0, 1, vocab - 1, vocab, vocab + 1, INT32_MAX}) {
      sampling.temperature = 1;
      sampling.top_k = top_k;
      handles.push_back(harness.Submit(prompt, sampling));
      if (!together) harness.Run();
    }
    sampling.temperature = 0;
    handles.push_back(harness.Submit(prompt, sampling));
    harness.Run();
  }
  const auto tokens = [&](size_t i) { return handles[i].sink->tokens(); };
  for (size_t round = 0; round < 16; round += 8) {
    EXPECT_EQ(tokens(round), tokens(round + 1));
    EXPECT_EQ(tokens(round + 1), tokens(round + 4));
    EXPECT_EQ(tokens(round + 1), tokens(round + 5));
    EXPECT_EQ(tokens(round + 1), tokens(round + 6));
    EXPECT_EQ(tokens(round + 2), tokens(round + 7));
    EXPECT_NE(tokens(round + 1), tokens(round + 7));
  }
}

TEST(BugReportCases, B18ASeededRequestIsTheSameInEveryCompany) {
  EngineConfig config = Config(64, 64, 16, 128);
  config.latent_pages = 64;
  config.max_model_len = 512;
  const std::vector<int32_t> prompt = RandomPrompt(40, 1);
  SamplingParams sampling;
  sampling.temperature = 0.8f;
  sampling.top_p = 0.95f;
  sampling.seed = 42;
  sampling.max_new_tokens = 32;
  sampling.ignore_eos = true;
  std::vector<std::vector<float>> draws;  // the uniforms that the plans carried for it
  const auto run = [&](const std::function<void(SchedulerHarness&)>& company) {
    SchedulerHarness harness(config);
    company(harness);
    const Handle handle = harness.Submit(prompt, sampling);
    std::vector<float> drawn;
    size_t seen = 0;
    while (!handle.sink->done()) {
      ASSERT_TRUE(harness.Step());
      if (handle.sink->tokens().size() == seen) continue;
      seen = handle.sink->tokens().size();
      const float uniform = UniformAt(42, 0, static_cast<int64_t>(seen) - 1);
      const auto& rows = harness.plan.ranks[0].sample_rows;
      if (std::any_of(rows.begin(), rows.end(), [&](const SampleRow& row) { return row.uniform == uniform; })) {
        drawn.push_back(uniform);
      }
    }
    harness.ExpectAlone(handle);
    draws.push_back(drawn);
    harness.Run();
  };
  run([](SchedulerHarness&) {});
  for (uint64_t seed : {0, 1}) {
    run([&](SchedulerHarness& harness) {
      for (uint64_t i = 0; i < 7; ++i) {
        SamplingParams other = sampling;
        other.seed = seed == 0 ? i * 977 : i;
        harness.Submit(RandomPrompt(10 + i * 3, i), other);
      }
    });
  }
  run([&](SchedulerHarness& harness) {
    for (uint64_t i = 0; i < 100; ++i) harness.Submit(RandomPrompt(5 + i % 20, i), 3);
    harness.Run();
  });
  config.latent_pages = 9;  // 144 tokens: the newer of two is pushed out
  run([&](SchedulerHarness& harness) {
    SamplingParams other = sampling;
    other.max_new_tokens = 60;
    harness.Submit(RandomPrompt(40, 5), other);
  });
  for (const std::vector<float>& drawn : draws) {
    EXPECT_EQ(drawn.size(), 32u);
    EXPECT_EQ(drawn, draws[0]);
  }
}

TEST(BugReportCases, B21PresenceAndFrequencyLookAtGeneratedTokensOnly) {
  SchedulerHarness harness(Config(64, 64, 16));
  constexpr int32_t kX = 11;
  const std::vector<int32_t> prompt(20, kX);
  SamplingParams sampling = Endless(4);
  sampling.presence_penalty = 2;
  sampling.frequency_penalty = 2;
  sampling.allowed_ids = {kX};  // forces X
  const Handle handle = harness.Submit(prompt, sampling);
  std::vector<std::vector<LogitEdit>> edits;
  while (harness.Step()) {
    const RankPlan& plan = harness.plan.ranks[0];
    if (!plan.sample_rows.empty()) edits.push_back(plan.logit_edits);
  }
  harness.ExpectAlone(handle);
  ASSERT_EQ(edits.size(), 4u);
  EXPECT_TRUE(edits[0].empty());  // the first step's logits are exactly those without penalties
  ASSERT_EQ(edits[2].size(), 1u);
  EXPECT_EQ(edits[2][0].id, kX);
  EXPECT_EQ(edits[2][0].count, 2);  // lowered by 2 + 2 * 2
  EXPECT_EQ(edits[2][0].in_prompt, 0);

  sampling = Greedy(1);
  sampling.repetition_penalty = 2;
  harness.Submit(prompt, sampling);
  std::vector<LogitEdit> first;
  while (harness.Step()) {
    if (!harness.plan.ranks[0].sample_rows.empty()) first = harness.plan.ranks[0].logit_edits;
  }
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first[0].id, kX);
  EXPECT_EQ(first[0].in_prompt, 1);
  EXPECT_EQ(first[0].count, 0);
}

}  // namespace
}  // namespace k3
