#include "tests/testing/scheduler_harness.h"

#include <algorithm>
#include <random>
#include <utility>

#include "kernels/core/check.h"

namespace k3::testing {
namespace {

EngineConfig Resolved(EngineConfig config) {
  const absl::Status status = config.Resolve();
  EXPECT_TRUE(status.ok()) << status.ToString();
  return config;
}

}  // namespace

EngineConfig SchedulerHarness::SmallConfig() {
  EngineConfig config;
  config.vocab_size = kVocab;
  config.eos_token_ids = {kEos};
  config.max_model_len = 4096;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = 128;
  config.prefill_chunk = 64;
  config.max_queue = 1 << 20;
  config.page_size = 16;
  config.latent_pages = 256;
  config.state_slots = 8;
  config.snapshot_slots = 16;
  config.page_bytes = 16 * 100;
  config.state_bytes = 20000;
  config.snapshot_interval = 64;
  config.layout_tag = 77;
  return config;
}

SchedulerHarness::SchedulerHarness(EngineConfig settings)
    : config(Resolved(std::move(settings))), model(config.vocab_size), runner(model, config), scheduler(config) {}

SchedulerHarness::Handle SchedulerHarness::Submit(std::vector<int32_t> prompt, const SamplingParams& sampling,
                                                  const std::function<void(Request&)>& change) {
  auto request = std::make_unique<Request>();
  request->prompt_tokens = std::move(prompt);
  request->sampling = sampling;
  if (change) change(*request);
  Handle handle;
  handle.id = next_id_++;
  handle.choices = request->num_choices;
  handle.sink = std::make_shared<RecordingSink>(handle.choices);
  handle.prompt = request->prompt_tokens;
  handle.sampling = request->sampling;
  if (request->sink == nullptr) request->sink = handle.sink;
  const absl::Status status = CheckRequest(config, *request);
  EXPECT_TRUE(status.ok()) << status.ToString();
  scheduler.Submit(handle.id, std::move(request), now);
  return handle;
}

SchedulerHarness::Handle SchedulerHarness::Submit(std::vector<int32_t> prompt, int32_t max_new_tokens,
                                                  const std::function<void(Request&)>& change) {
  return Submit(std::move(prompt), Greedy(max_new_tokens), change);
}

bool SchedulerHarness::Step(const std::function<void()>& in_flight) {
  if (open_.has_value() && !scheduler.CanPlanAhead()) Commit();
  PoisonFree();
  if (!scheduler.PlanStep(now, &plan)) {
    scheduler.CheckInvariants();
    if (!open_.has_value()) return false;
    Commit();
    return true;
  }
  CheckWrites();
  steps_ahead += open_.has_value();
  StepPlan resolved = plan;
  ResolveTokens(&resolved);
  const absl::Status status = runner.Run(resolved, &result);
  K3_CHECK(status.ok());
  if (in_flight) in_flight();
  now += step_time;
  if (open_.has_value()) Commit();
  open_ = plan;
  open_result_ = result;
  if (!plan_ahead || !scheduler.CanPlanAhead()) Commit();
  return true;
}

void SchedulerHarness::ResolveTokens(StepPlan* step) const {
  for (size_t r = 0; r < step->ranks.size(); ++r) {
    for (int32_t& token : step->ranks[r].tokens) {
      if (token >= 0) continue;
      K3_CHECK(open_.has_value());
      // A row without a token has failed; its sequence ends with the commit, whatever is computed for it here.
      token = std::max(0, open_result_.ranks[r].token.at(static_cast<size_t>(RowOfToken(token))));
    }
  }
}

void SchedulerHarness::Commit() {
  const StepPlan committed = *std::exchange(open_, std::nullopt);
  scheduler.CommitStep(committed, open_result_, now);
  std::vector<Scheduler::Scrub> scrub;
  if (scheduler.TakeScrub(&scrub)) {
    for (size_t rank = 0; rank < scrub.size(); ++rank) {
      runner.Scrub(static_cast<int32_t>(rank), scrub[rank].pages, scrub[rank].slots);
    }
  }
  scheduler.CheckInvariants();
}

void SchedulerHarness::Run(int64_t most_steps) {
  while (Step()) ASSERT_GT(--most_steps, 0) << "the scheduler does not come to an end";
  EXPECT_FALSE(scheduler.HasWork());
}

void SchedulerHarness::PoisonFree() {
  for (int32_t rank = 0; rank < scheduler.ranks(); ++rank) {
    const CacheManager& cache = scheduler.cache(rank);
    for (int32_t id = 0; id < cache.pages().total(); ++id) {
      if (cache.pages().IsFree({id})) runner.PoisonPage(rank, {id});
    }
    for (int32_t id = 0; id < cache.states().live_total() + cache.states().snapshot_total(); ++id) {
      if (cache.states().IsFree({id})) runner.PoisonSlot(rank, {id});
    }
  }
}

void SchedulerHarness::CheckWrites() {
  for (int32_t r = 0; r < scheduler.ranks(); ++r) {
    const RankPlan& rank = plan.ranks[static_cast<size_t>(r)];
    const CacheManager& cache = scheduler.cache(r);
    for (int32_t s = 0; s < rank.num_sequences(); ++s) {
      const size_t index = static_cast<size_t>(s);
      const int32_t end = rank.context[index] + rank.token_begin[index + 1] - rank.token_begin[index];
      for (int32_t page = rank.context[index] / config.page_size; page * config.page_size < end; ++page) {
        const PageId id{
            rank.page_table[index * static_cast<size_t>(rank.page_table_stride) + static_cast<size_t>(page)]};
        // Written by its single owner, never after it was published.
        K3_CHECK(cache.pages().refs(id) == 1 && !cache.cache().Contains(id));
      }
    }
  }
}

int32_t SchedulerHarness::PlannedTokens(const Handle& handle) const {
  // Sequences of a plan are known by their first tokens only, so prompts of a test that asks must differ.
  int32_t planned = 0;
  for (const RankPlan& rank : plan.ranks) {
    for (int32_t s = 0; s < rank.num_sequences(); ++s) {
      const size_t index = static_cast<size_t>(s);
      const int32_t begin = rank.token_begin[index], end = rank.token_begin[index + 1];
      bool same = true;
      for (int32_t row = begin; row < end; ++row) {
        const size_t position = static_cast<size_t>(rank.position[static_cast<size_t>(row)]);
        const std::vector<int32_t> generated = handle.sink->tokens();
        const int32_t token = rank.tokens[static_cast<size_t>(row)];
        if (position < handle.prompt.size()) {
          same &= handle.prompt[position] == token;
        } else {
          const size_t at = position - handle.prompt.size();
          same &= at < generated.size() && generated[at] == token;
        }
      }
      if (same) planned += end - begin;
    }
  }
  return planned;
}

HashModel SchedulerHarness::ModelOf(const Handle& handle) const {
  const RequestUsage usage = handle.sink->usage();
  return HashModelRunner::UnderEpoch(model, usage.routing_rank, usage.routing_epoch);
}

void SchedulerHarness::ExpectAlone(const Handle& handle) const {
  ASSERT_TRUE(handle.sink->done());
  EXPECT_TRUE(handle.sink->status().ok()) << handle.sink->status().ToString();
  for (int32_t choice = 0; choice < handle.choices; ++choice) {
    const ExpectedChoice expected =
        ExpectedTokens(ModelOf(handle), handle.prompt, handle.sampling, choice, config.eos_token_ids);
    const RecordingSink::Choice got = handle.sink->choice(choice);
    EXPECT_EQ(got.tokens, expected.tokens) << "request " << handle.id << " choice " << choice;
    EXPECT_EQ(got.reason, expected.reason) << "request " << handle.id << " choice " << choice;
    if (handle.sampling.top_logprobs >= 0) {
      EXPECT_EQ(got.logprobs, expected.logprobs);
    }
  }
}

void SchedulerHarness::ExpectIdle() const {
  const EngineLoad load = Load();
  EXPECT_EQ(load.running, 0);
  EXPECT_EQ(load.waiting, 0);
  EXPECT_EQ(load.pages_used, 0);
  EXPECT_EQ(load.state_slots_used, 0);
  EXPECT_FALSE(scheduler.HasWork());
  EXPECT_EQ(scheduler.backlog().prompt_tokens, 0);
}

EngineLoad SchedulerHarness::Load() const {
  EngineLoad load;
  scheduler.FillLoad(&load);
  return load;
}

SamplingParams Greedy(int32_t max_new_tokens) {
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.max_new_tokens = max_new_tokens;
  return sampling;
}

SamplingParams Endless(int32_t max_new_tokens) {
  SamplingParams sampling = Greedy(max_new_tokens);
  sampling.ignore_eos = true;
  return sampling;
}

std::vector<int32_t> RandomPrompt(size_t length, uint64_t seed, int32_t vocab) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> prompt(length);
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
  return prompt;
}

std::vector<int32_t> Join(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace k3::testing
