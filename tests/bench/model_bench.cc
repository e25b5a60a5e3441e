// Whole-model speed through the executor, the path that `serve` runs: decode of 1 and 16 sequences, prefill of 512
// tokens, greedy sampling included. Usage: model_bench [--model DIR] [--threads N] [--json FILE]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>

#include "engine/executor.h"
#include "engine/model/weights_loader.h"
#include "tests/bench/result_file.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

constexpr int32_t kContext = 1024;
constexpr int32_t kPageSize = 64;
constexpr int32_t kPagesPerSequence = kContext / kPageSize;
constexpr int32_t kMaxSequences = 16;

// A step in which each of `sequences` sequences computes `tokens` tokens behind `context` earlier ones.
StepPlan MakePlan(int32_t sequences, int32_t tokens, int32_t context) {
  StepPlan step;
  step.ranks.resize(1);
  RankPlan& plan = step.ranks[0];
  plan.page_table_stride = kPagesPerSequence;
  for (int32_t s = 0; s < sequences; ++s) {
    plan.token_begin.push_back(s * tokens);
    plan.context.push_back(context);
    plan.state_slot.push_back(s);
    for (int32_t p = 0; p < kPagesPerSequence; ++p) plan.page_table.push_back(s * kPagesPerSequence + p);
    for (int32_t t = 0; t < tokens; ++t) {
      plan.tokens.push_back(100 + (s * 31 + (context + t) * 7) % 3000);
      plan.sequence_of_token.push_back(s);
      plan.position.push_back(context + t);
    }
    if (context == 0) plan.zero_slots.push_back(StateSlot{s});
    plan.logits_row.push_back((s + 1) * tokens - 1);
    plan.sample_rows.push_back(SampleRow{});
  }
  plan.token_begin.push_back(sequences * tokens);
  return step;
}

double Seconds(Executor& executor, const StepPlan& plan) {
  StepResult result;
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status status = executor.Run(plan, &result);
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Median tokens per second of decode steps at contexts 256, 257, ...
double DecodeRate(Executor& executor, int32_t sequences) {
  Seconds(executor, MakePlan(sequences, 256, 0));
  std::vector<double> seconds;
  for (int32_t context = 256; context < 256 + 400; ++context) {
    seconds.push_back(Seconds(executor, MakePlan(sequences, 1, context)));
  }
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return sequences / seconds[seconds.size() / 2];
}

double PrefillRate(Executor& executor) {
  std::vector<double> seconds;
  for (int i = 0; i < 15; ++i) seconds.push_back(Seconds(executor, MakePlan(1, 512, 0)));
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return 512 / seconds[seconds.size() / 2];
}

int Main(int argc, char** argv) {
  std::string model_dir = testing::TinyK3(), json;
  int threads = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--model") == 0) model_dir = argv[i + 1];
    if (std::strcmp(argv[i], "--threads") == 0) threads = std::stoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
  }
  const std::unique_ptr<Ops> ops = MakeCpuOps({.threads = threads});
  const auto config = LoadModelConfig(model_dir);
  if (!config.ok()) throw std::runtime_error(std::string(config.status().message()));
  const auto loaded = LoadWeights(model_dir, *config, *ops, {.progress = nullptr, .print_progress = false});
  if (!loaded.ok()) throw std::runtime_error(std::string(loaded.status().message()));
  const Model model((*loaded)->config, (*loaded)->weights, *ops);
  const StepBounds bounds{
      .tokens = kMaxSequences * 256, .sequences = kMaxSequences, .logits_rows = kMaxSequences, .context = kContext};
  CacheGeometry geometry;
  geometry.pages = kMaxSequences * kPagesPerSequence;
  geometry.page_size = kPageSize;
  geometry.slots = kMaxSequences;
  const auto executor = Executor::Create(model, *ops, bounds, geometry);
  if (!executor.ok()) throw std::runtime_error(std::string(executor.status().message()));

  std::vector<bench::Result> results;
  results.push_back({.name = "cpu/tiny-k3/decode/1", .value = DecodeRate(**executor, 1), .unit = "tok/s"});
  results.push_back({.name = "cpu/tiny-k3/decode/16", .value = DecodeRate(**executor, 16), .unit = "tok/s"});
  results.push_back({.name = "cpu/tiny-k3/prefill/512", .value = PrefillRate(**executor), .unit = "tok/s"});
  for (const bench::Result& r : results) std::printf("%-28s %10.0f %s\n", r.name.c_str(), r.value, r.unit.c_str());
  bench::WriteResults(json, results, bench::CpuName(), argc, argv);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) { return k3::Main(argc, argv); }
