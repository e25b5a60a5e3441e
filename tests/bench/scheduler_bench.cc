// Host cost of a step: plan plus commit, the sinks' calls included, without any model.
//   cpu/scheduler_step/256           256 running decodes, contexts around 2,000 tokens, caching on
//   cpu/scheduler_step/256_waiting   the same while 100,000 requests wait
//   cpu/scheduler_step/256_sampling  the same as the first with penalties, bias and stop tokens on every request, whose
//                                    answers have 500 distinct tokens each
// Prints microseconds of the thread's own processor time per step, so that neighbours on the machine do not count.
// Pages fill and are published as in service. The stand-in for the model takes part, with about one microsecond. Usage:
// scheduler_bench [--json FILE]

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/scheduler.h"
#include "kernels/core/check.h"
#include "tests/bench/result_file.h"

namespace k3 {
namespace {

constexpr int32_t kVocab = 163840;
constexpr int32_t kAnswers = kVocab - 2;  // no stop token among them
constexpr int32_t kSequences = 256;

class CountingSink : public TokenSink {
 public:
  void OnToken(int32_t, int32_t, const TokenLogprob*) override { ++tokens; }
  void OnChoiceFinished(int32_t, FinishReason, int32_t) override {}
  void OnFinished(const absl::Status&, const RequestUsage&) override {}
  int64_t tokens = 0;
};

EngineConfig ServerConfig() {
  EngineConfig config;
  config.vocab_size = kVocab;
  config.eos_token_ids = {kVocab - 1};
  config.max_model_len = 1 << 20;
  config.max_num_seqs = 256;
  config.max_num_batched_tokens = 8192;
  config.max_queue = 1 << 20;
  config.latent_pages = 1 << 17;
  config.state_slots = 256;
  config.snapshot_slots = 512;
  config.page_bytes = 27 << 16;
  config.state_bytes = int64_t{414} << 20;
  return config;
}

// What a model would answer: any token but the stop tokens.
void Answer(const StepPlan& plan, int32_t vocabulary, StepResult* result) {
  result->ranks.resize(plan.ranks.size());
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const size_t rows = plan.ranks[r].sample_rows.size();
    RankResult& rank = result->ranks[r];
    rank.token.resize(rows);
    rank.status.resize(rows);
    rank.logprob.resize(rows);
    for (size_t i = 0; i < rows; ++i) {
      rank.token[i] = static_cast<int32_t>((i * 7919 + plan.ranks[r].position[0] * 104729) % vocabulary);
      rank.status[i] = SampleStatus::kOk;
    }
  }
}

double ThreadMicroseconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

// Median over five runs of 2,000 steps.
double StepMicroseconds(int32_t waiting, bool sampling) {
  EngineConfig config = ServerConfig();
  K3_CHECK(config.Resolve().ok());
  Scheduler scheduler(config);
  const auto sink = std::make_shared<CountingSink>();
  Clock::time_point now{};
  RequestId id = 1;
  const auto submit = [&](size_t prompt) {
    auto request = std::make_unique<Request>();
    request->prompt_tokens.resize(prompt);
    for (size_t i = 0; i < prompt; ++i) request->prompt_tokens[i] = static_cast<int32_t>((id * 31 + i) % kAnswers);
    request->sampling.max_new_tokens = 1 << 18;
    if (sampling) {
      request->sampling.presence_penalty = 0.5f;
      request->sampling.frequency_penalty = 0.5f;
      request->sampling.logit_bias = {{1, 1.0f}, {2, -1.0f}};
      request->sampling.stop_token_ids = {kVocab - 2};
      request->sampling.min_new_tokens = 1 << 18;
    }
    request->session_id = id % 3 == 0 ? std::string() : "session-" + std::to_string(id % 1000);
    request->sink = sink;
    scheduler.Submit(id++, std::move(request), now);
  };
  for (int32_t i = 0; i < kSequences; ++i) submit(1500 + static_cast<size_t>(i) * 4);
  StepPlan plan;
  StepResult result;
  const auto step = [&] {
    scheduler.PlanStep(now, &plan);
    Answer(plan, sampling ? 500 : kAnswers, &result);
    scheduler.CommitStep(plan, result, now);
    now += std::chrono::milliseconds(20);
  };
  while (plan.ranks.empty() || plan.ranks[0].num_tokens() != kSequences) step();
  for (int32_t i = 0; i < waiting; ++i) submit(20);
  for (int i = 0; i < 200; ++i) step();
  std::vector<double> runs;
  for (int run = 0; run < 5; ++run) {
    constexpr int kSteps = 2000;
    const double begin = ThreadMicroseconds();
    for (int i = 0; i < kSteps; ++i) step();
    runs.push_back((ThreadMicroseconds() - begin) / kSteps);
    K3_CHECK(plan.ranks[0].num_tokens() == kSequences);
  }
  std::sort(runs.begin(), runs.end());
  return runs[runs.size() / 2];
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  std::string json;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
  }
  struct Workload {
    const char* name;
    int32_t waiting;
    bool sampling;
  };
  std::vector<k3::bench::Result> results;
  for (const Workload& workload :
       {Workload{"cpu/scheduler_step/256", 0, false}, Workload{"cpu/scheduler_step/256_waiting", 100000, false},
        Workload{"cpu/scheduler_step/256_sampling", 0, true}}) {
    results.push_back({workload.name, k3::StepMicroseconds(workload.waiting, workload.sampling), "us", {}, {}, {}});
    std::printf("%-34s %8.1f us\n", workload.name, results.back().value);
  }
  k3::bench::WriteResults(json, results, k3::bench::CpuName(), argc, argv);
}
