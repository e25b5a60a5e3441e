#include <gtest/gtest.h>

#include "engine/scheduler.h"
#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::Endless;
using testing::Join;
using testing::RandomPrompt;
using testing::SchedulerHarness;
using Handle = SchedulerHarness::Handle;

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

// A request that has just resumed from a snapshot ends while its step is still in flight, and somebody else needs pages
// at once: what the step reads may go then, since whoever gets it writes it in a later step.
TEST(SchedulerCacheTest, AHitThatEndsInFlightLetsItsPagesGo) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_model_len = 112;
  config.latent_pages = 7;
  SchedulerHarness harness(config);
  const std::vector<int32_t> prompt = RandomPrompt(65, 1);
  harness.Submit(prompt, 1);
  harness.Run();
  harness.plan_ahead = true;
  const Handle running = harness.Submit(RandomPrompt(3, 2), Endless(20));
  const Handle resumed =
      harness.Submit(prompt, Endless(20), [&](Request& r) { r.deadline = harness.now + harness.step_time; });
  const Handle waiting = harness.Submit(RandomPrompt(60, 3), Endless(5));
  ASSERT_TRUE(harness.Step());
  EXPECT_EQ(harness.Load().prefix_hit_tokens, 64u);
  harness.Run();
  EXPECT_EQ(resumed.sink->status().code(), absl::StatusCode::kDeadlineExceeded);
  harness.ExpectAlone(running);
  harness.ExpectAlone(waiting);
  harness.ExpectIdle();
}

}  // namespace
}  // namespace k3
