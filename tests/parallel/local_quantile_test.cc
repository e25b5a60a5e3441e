#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/text/tokenizer.h"
#include "tests/e2e/engine_harness.h"
#include "tests/parallel/parallel_model.h"
#include "tests/testing/paths.h"
#include "tests/testing/recording_sink.h"

// The balance of experts in whole models.
namespace k3::testing {
namespace {

BalanceOptions Adaptive(int32_t groups) {
  BalanceOptions options;
  options.adaptive = true;
  options.groups = groups;
  return options;
}

EngineConfig SmallPools(bool bias_epochs) {
  EngineConfig config;
  config.max_num_seqs = 6;
  config.state_slots = 6;
  config.snapshot_slots = 8;
  config.page_size = 8;
  config.snapshot_interval = 16;
  config.latent_pages = 40;
  config.max_num_batched_tokens = 64;
  config.bias_epochs = bias_epochs;
  return config;
}

StepMode Mode(const BalanceOptions& options) {
  StepMode mode;
  mode.balance = options;
  return mode;
}

TestRequest Ask(std::vector<int32_t> prompt, int32_t max_new_tokens) {
  TestRequest request;
  request.prompt = std::move(prompt);
  request.max_new_tokens = max_new_tokens;
  return request;
}

// What of `load` [layers, groups] the busiest group has over the mean one, the mean over layers.
double MaxOverMean(const std::vector<uint64_t>& load, int32_t groups) {
  const size_t layers = load.size() / static_cast<size_t>(groups);
  double mean = 0;
  for (size_t layer = 0; layer < layers; ++layer) {
    const auto begin = load.begin() + static_cast<ptrdiff_t>(layer * static_cast<size_t>(groups));
    const double sum = static_cast<double>(std::accumulate(begin, begin + groups, uint64_t{0}));
    mean += static_cast<double>(*std::max_element(begin, begin + groups)) * groups / sum / static_cast<double>(layers);
  }
  return mean;
}

// English that the model was not trained on: the project's own pages.
std::vector<int32_t> RealText(size_t tokens) {
  const auto tokenizer = Tokenizer::Load(TinyK3());
  if (!tokenizer.ok()) return {};
  std::vector<int32_t> ids;
  for (const char* name : {"engine/README.md", "kernels/README.md", "README.md", "LICENSE", "docker/README.md",
                           "server/openai/README.md", "server/grammar/README.md"}) {
    std::ifstream file(SourcePath(name), std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    const auto part = (*tokenizer)->Encode(text.str());
    if (part.ok()) ids.insert(ids.end(), part->begin(), part->end());
  }
  ids.resize(std::min(ids.size(), tokens));
  return ids;
}

struct Reading {
  double loss = 0;  // nats a token, of the held-out part
  double max_over_mean = 0;
  double override_share = 0;
  uint64_t epochs = 0;
  double routed = 0;  // share of held-out prompts under a bias
};

// Reads the text in prompts of 256 tokens, the second half of them held out: measured.
Reading Read(TestModel& model, const std::vector<int32_t>& text, const BalanceOptions& options) {
  constexpr size_t kPrompt = 256;
  EngineConfig config;
  config.max_num_seqs = 2;
  config.state_slots = 2;
  config.snapshot_slots = 0;
  config.enable_prefix_caching = false;
  config.page_size = 64;
  config.latent_pages = 12;
  config.max_num_batched_tokens = 2 * kPrompt;
  config.bias_epochs = options.adaptive;
  EngineHarness harness(model, config, Mode(options));
  harness.poison = false;
  Reading reading;
  std::vector<uint64_t> load;
  bool measuring = false;
  harness.after_run = [&](const StepPlan&, StepResult* result) {
    const RankRouting& routing = result->ranks[0].routing;
    if (routing.updated == 0 || !measuring) return;
    load.resize(routing.load.size());
    for (size_t i = 0; i < load.size(); ++i) load[i] += routing.load[i];
    reading.override_share = routing.override_share;
    reading.epochs = std::max(reading.epochs, routing.newest_epoch);
  };
  size_t scored = 0, prompts = 0;
  for (size_t at = 0; at + kPrompt <= text.size(); at += kPrompt) {
    measuring = at >= text.size() / 2;
    const auto begin = text.begin() + static_cast<ptrdiff_t>(at);
    TestRequest request = Ask(std::vector<int32_t>(begin, begin + kPrompt), 1);
    request.prompt_logprobs = true;
    const RequestId id = harness.Submit(request);
    harness.RunAll();
    if (!measuring) continue;
    ++prompts;
    reading.routed += harness.outcome(id).usage.routing_epoch > 0;
    for (const float logprob : harness.outcome(id).prompt_logprobs) {
      reading.loss -= logprob;
      ++scored;
    }
  }
  reading.loss /= static_cast<double>(scored);
  reading.routed /= static_cast<double>(prompts);
  reading.max_over_mean = MaxOverMean(load, options.groups);
  return reading;
}

// Real text on eight virtual ranks: the busiest one is less busy, and the model reads as well as before.
TEST(LocalQuantileTest, HeldOutLossStaysWhileRanksGetEven) {
  TestModel model(TinyK3(), MakeCpuOps({.threads = 2}));
  const std::vector<int32_t> text = RealText(14 * 1024);
  ASSERT_GE(text.size(), 8u * 1024);
  BalanceOptions counted;
  counted.groups = 8;
  const Reading exact = Read(model, text, counted);
  const Reading balanced = Read(model, text, Adaptive(8));
  std::printf("exact: loss %.4f, max/mean %.3f; local-quantile: loss %.4f (%+.2f %%), max/mean %.3f, %.2f %% changed\n",
              exact.loss, exact.max_over_mean, balanced.loss, 100 * (balanced.loss / exact.loss - 1),
              balanced.max_over_mean, 100 * balanced.override_share);
  EXPECT_EQ(exact.override_share, 0);
  EXPECT_EQ(exact.epochs, 0u);
  EXPECT_GT(balanced.epochs, 0u);
  EXPECT_GT(balanced.routed, 0.5);
  EXPECT_LT(std::abs(balanced.loss / exact.loss - 1), 0.01);
  EXPECT_LT(balanced.max_over_mean, exact.max_over_mean - 0.02);
}

// Every answer of a busy engine, with preemptions, forks, hits and cancels, is bit for bit what its recorded epoch
// gives when it is asked for alone.
TEST(LocalQuantileTest, AnswersReplayFromTheLogBitForBit) {
  const TempDir dir;
  const std::string path = dir.path() + "/epochs.log";
  const std::unique_ptr<TestModel> model = TestModel::Micro();
  for (const bool plan_ahead : {false, true}) {
    auto log = EpochLog::Open(path);
    ASSERT_TRUE(log.ok());
    BalanceOptions options = Adaptive(4);
    options.log = log->get();
    options.control.guards = false;
    options.control.epoch_updates = 3;
    StepMode mode = Mode(options);
    mode.plan_ahead = plan_ahead;
    if (plan_ahead) mode.decode_sizes = {1, 2, 4, 6};
    EngineHarness harness(*model, SmallPools(true), mode);
    std::vector<std::pair<RequestId, TestRequest>> asked;
    const int32_t vocab = static_cast<int32_t>(model->config().vocab_size);
    for (uint64_t n = 0; n < 90; ++n) {
      TestRequest request;
      request.prompt = RandomTokens(n % 3, 40, vocab);
      const std::vector<int32_t> tail = RandomTokens(100 + n, static_cast<int32_t>(1 + n * 5 % 60), vocab);
      request.prompt.insert(request.prompt.end(), tail.begin(), tail.end());
      request.max_new_tokens = static_cast<int32_t>(4 + n * 7 % 40);
      request.temperature = n % 3 == 0 ? 0.8f : 0.0f;
      request.seed = n;
      request.choices = n % 5 == 0 ? 2 : 1;
      asked.emplace_back(harness.Submit(request), request);
      for (int step = 0; step < 6; ++step) harness.Step();
      if (n % 11 == 10) harness.Cancel(asked[asked.size() - 3].first);
    }
    harness.RunAll();
    uint64_t biased = 0, preempted = 0, cached = 0, newest = 0;
    for (const auto& [id, request] : asked) {
      const Outcome& outcome = harness.outcome(id);
      EXPECT_EQ(outcome.usage.routing_rank, outcome.admitted > 0 ? 0 : -1);
      if (outcome.admitted == 0) continue;  // cancelled before
      const uint64_t number = outcome.usage.routing_epoch;
      newest = std::max(newest, number);
      biased += number > 0;
      preempted += number > 0 && outcome.usage.preemptions > 0;
      cached += number > 0 && outcome.cached_tokens > 0;
      TestRequest alone = request;
      alone.bypass_prefix_cache = true;
      EngineConfig config = SmallPools(number > 0);
      StepMode replay;
      if (number > 0) {
        const auto epoch = EpochLog::Find(path, 0, number);
        ASSERT_TRUE(epoch.ok()) << epoch.status();
        replay.balance = Adaptive(4);
        replay.balance->fixed = std::make_shared<BiasEpoch>(*epoch);
        config.first_epoch = number;
      }
      EngineHarness single(*model, config, replay);
      const RequestId again = single.Submit(alone);
      single.RunAll();
      EXPECT_EQ(single.outcome(again).usage.routing_epoch, number);
      ExpectSameAnswer(outcome, single.outcome(again), /*prefix_ok=*/!outcome.status.ok());
    }
    std::printf("90 requests, %lu under a bias (newest epoch %lu), %lu of them preempted, %lu resumed from a prefix\n",
                biased, newest, preempted, cached);
    EXPECT_GT(biased, 20u);
    EXPECT_GT(newest, 2u);
    EXPECT_GT(preempted, 0u);
    EXPECT_GT(cached, 0u);
    const EngineLoad load = harness.Load();
    EXPECT_GT(load.routing.updates, 3u);
    EXPECT_GE(load.routing.worst_max_over_mean, 1.0);
  }
}

// A bias changes answers: what is recorded is not idle.
TEST(LocalQuantileTest, ABiasChangesTheChoiceOfExperts) {
  const std::unique_ptr<TestModel> model = TestModel::Micro();
  const int32_t vocab = static_cast<int32_t>(model->config().vocab_size);
  TestRequest request = Ask(RandomTokens(3, 60, vocab), 8);
  request.prompt_logprobs = true;
  const auto ask = [&](const BalanceOptions* options, uint64_t first_epoch) {
    EngineConfig config = SmallPools(options != nullptr && options->adaptive);
    config.first_epoch = first_epoch;
    StepMode mode;
    if (options != nullptr) mode.balance = *options;
    EngineHarness harness(*model, config, mode);
    const RequestId id = harness.Submit(request);
    harness.RunAll();
    return harness.outcome(id);
  };
  const Outcome exact = ask(nullptr, 0);
  BalanceOptions counted;
  counted.groups = 4;
  ExpectSameAnswer(ask(&counted, 0), exact);  // counting changes nothing
  EXPECT_EQ(ask(&counted, 0).prompt_logprobs, exact.prompt_logprobs);

  BiasEpoch epoch{.number = 5, .groups = 4, .delta = {}};
  for (int32_t layer = 0; layer < model->config().num_hidden_layers; ++layer) {
    if (!model->config().IsMoe(layer)) continue;
    for (const float delta : {-0.2f, 0.0f, 0.0f, 0.0f}) epoch.delta.push_back(delta);
  }
  BalanceOptions fixed = Adaptive(4);
  fixed.fixed = std::make_shared<BiasEpoch>(epoch);
  const Outcome biased = ask(&fixed, 5);
  EXPECT_EQ(biased.usage.routing_epoch, 5u);
  EXPECT_NE(biased.prompt_logprobs, exact.prompt_logprobs);
}

// With a soft cap no rank of a step is far beyond its share, and every token keeps all of its experts.
TEST(LocalQuantileTest, SoftCapEvensOutAStep) {
  const std::unique_ptr<TestModel> model = TestModel::Micro();
  const int32_t vocab = static_cast<int32_t>(model->config().vocab_size);
  double busiest[2] = {};
  uint64_t choices[2] = {}, swaps = 0;
  for (const bool capped : {false, true}) {
    BalanceOptions options = Adaptive(4);
    options.control.window = 8;  // too long for an update's bias to matter here
    if (capped) {
      options.soft_cap = 1.1;
      options.soft_cap_tau = 0.2;
    }
    EngineHarness harness(*model, SmallPools(true), Mode(options));
    harness.after_run = [&](const StepPlan&, StepResult* result) {
      const RankRouting& routing = result->ranks[0].routing;
      if (routing.updated == 0) return;
      const std::vector<uint64_t> load(routing.load.begin(), routing.load.end());
      busiest[capped] = MaxOverMean(load, 4);
      choices[capped] += std::accumulate(load.begin(), load.end(), uint64_t{0});
      swaps += routing.swaps;
    };
    for (uint64_t n = 0; n < 72; ++n) {
      harness.Submit(Ask(RandomTokens(n, 63, vocab), 1));
      harness.RunAll();
    }
  }
  std::printf("max/mean %.3f, with the cap %.3f after %lu swaps\n", busiest[0], busiest[1], swaps);
  EXPECT_GT(swaps, 0u);
  EXPECT_LT(busiest[1], busiest[0]);
  EXPECT_EQ(choices[0], choices[1]);
}

// 2 x 2 ranks: those of a group see the same tokens and come to the same epochs by themselves, while a group's epochs
// are its own; all of it with real ranks as destinations.
TEST(LocalQuantileTest, RanksOfAGroupAgreeWithoutAsking) {
  const TempDir dir;
  TestCheckpoint(WideK3Config()).Write(dir.path());
  const std::unique_ptr<RankGroup> ranks = LoadRanks(dir.path(), {.tensor = 2, .data = 2});
  BalanceOptions options = Adaptive(0);
  options.control.guards = false;
  EngineConfig config = SmallPools(true);
  config.vocab_size = ranks->vocab_size();
  config.data_parallel = 2;
  config.max_model_len = static_cast<int32_t>(config.pool_tokens());
  CacheGeometry geometry;
  geometry.pages = config.latent_pages;
  geometry.page_size = config.page_size;
  geometry.slots = config.state_slots + config.snapshot_slots;
  const StepBounds bounds{.tokens = config.max_num_batched_tokens,
                          .sequences = config.max_num_seqs,
                          .logits_rows = 8,
                          .context = config.max_model_len};
  ExecutorOptions executors;
  executors.balance = options;
  ASSERT_TRUE(ranks->MakeExecutors(bounds, geometry, executors).ok());
  auto engine = Engine::Create(config, ranks->runner());
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (uint64_t n = 0; n < 48; ++n) {
    auto request = std::make_unique<Request>();
    request->prompt_tokens = SomeTokens(n, 60, config.vocab_size);
    request->sampling.max_new_tokens = 4;
    request->sampling.temperature = 0;
    sinks.push_back(std::make_shared<RecordingSink>());
    request->sink = sinks.back();
    ASSERT_TRUE((*engine)->Submit(std::move(request)).ok());
  }
  EXPECT_TRUE((*engine)->Drain(std::chrono::minutes(10)));
  engine->reset();
  bool on[2] = {};
  for (const auto& sink : sinks) {
    EXPECT_TRUE(sink->status().ok()) << sink->status();
    on[sink->usage().routing_rank] = true;
  }
  EXPECT_TRUE(on[0] && on[1]);
  std::vector<std::shared_ptr<const BiasEpoch>> epochs;
  for (int local = 0; local < 4; ++local) {
    epochs.push_back(ranks->executor(local).balance()->control().current());
    EXPECT_EQ(epochs.back()->groups, 4);
    EXPECT_GT(epochs.back()->number, 0u) << "rank " << local;
  }
  for (int local = 0; local < 4; ++local) {
    for (int other = 0; other < local; ++other) {
      if (ranks->data_rank_of(local) != ranks->data_rank_of(other)) continue;
      EXPECT_EQ(epochs[local]->number, epochs[other]->number);
      EXPECT_EQ(epochs[local]->delta, epochs[other]->delta);
    }
  }
}

}  // namespace
}  // namespace k3::testing
