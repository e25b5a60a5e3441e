// Whole models on the GPU through the path that `serve` runs (engine, scheduler, executor): the kl48b/* rows of the
// performance goals, the load rate from page cache, a K3-shaped slice with MXFP4 experts, one million tokens through
// tiny-k3, and batch invariance. Weights are random where no checkpoint is needed.
//   cuda_model_bench [--only decode,long,prefill,engine,hit,profile,invariant,load,slice,million,million48] [--json
//   FILE]
//                    [--scratch DIR] [--graphs on|off]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/model/sequence_runner.h"
#include "engine/model/tensor_table.h"
#include "engine/model/weights_loader.h"
#include "kernels/cuda/convert.h"
#include "kernels/cuda/device.h"
#include "kernels/profiled_ops.h"
#include "tests/bench/device_ceilings.h"
#include "tests/bench/model_steps.h"
#include "tests/bench/result_file.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

using bench::CheckResult;
using bench::kPageSize;
using bench::MakeGeometry;
using bench::MakePlan;
using bench::OrDie;
using bench::SecondsSince;
using bench::WallClock;

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

class Report {
 public:
  explicit Report(Ops& ops) : ceilings_(bench::MeasureCeilings(ops)) {
    std::printf("copy %.2f TB/s, bf16 product 8192^3 %.0f TFLOP/s\n", ceilings_.copy * 1e-12, ceilings_.gemm * 1e-12);
  }
  // `floor_seconds` 0: none.
  void Add(const std::string& name, double value, const std::string& unit, double seconds = 0, double floor_bytes = 0) {
    bench::Result result;
    result.name = name;
    result.value = value;
    result.unit = unit;
    if (floor_bytes > 0) result.floor_ratio = seconds / (floor_bytes / ceilings_.copy);
    result.copy_TBps = ceilings_.copy * 1e-12;
    result.gemm_TFLOPs = ceilings_.gemm * 1e-12;
    std::printf("%-44s %12.4f %-7s", name.c_str(), value, unit.c_str());
    if (result.floor_ratio.has_value()) std::printf(" %6.2f x floor", *result.floor_ratio);
    std::printf("\n");
    std::fflush(stdout);
    results_.push_back(std::move(result));
  }
  const std::vector<bench::Result>& results() const { return results_; }

 private:
  bench::Ceilings ceilings_;
  std::vector<bench::Result> results_;
};

// A model with its executor, as serve makes them.
struct Served {
  std::unique_ptr<LoadedModel> loaded;
  std::unique_ptr<Model> model;
  std::unique_ptr<Executor> executor;

  Served(Ops& ops, const std::string& dir, const ModelConfig& config, std::optional<uint64_t> seed, int threads) {
    LoadOptions options;
    options.print_progress = false;
    options.threads = threads;
    options.random_seed = seed;
    const auto start = WallClock::now();
    loaded = OrDie(LoadWeights(dir, config, ops, options));
    std::printf("%.2f GB of weights in %.2f s, %.1f GB of memory free\n", loaded->weights.bytes * 1e-9,
                SecondsSince(start), ops.FreeMemory() * 1e-9);
    model = std::make_unique<Model>(loaded->config, loaded->weights, ops);
  }

  void MakeExecutor(Ops& ops, const StepBounds& bounds, int32_t pages, int32_t slots, ExecutorOptions options) {
    executor.reset();
    const CacheGeometry geometry = MakeGeometry(ops, pages, slots);
    executor = OrDie(Executor::Create(*model, ops, bounds, geometry, std::move(options)));
    const WarmUpReport report = OrDie(executor->WarmUp());
    std::printf("warm-up %.2f s, %d graphs with %ld operations, %ld MiB\n", report.seconds, report.graphs,
                static_cast<long>(report.nodes), static_cast<long>(report.bytes >> 20));
  }

  // Caches as if long texts had gone before: numbers of the size that norms and decays leave.
  void FillCaches(Ops& ops) {
    CacheStorage& cache = executor->cache();
    const auto queue = static_cast<cudaStream_t>(ops.stream());
    const CacheGeometry& geometry = cache.geometry();
    if (geometry.page_dtype == DType::kBF16) {
      cuda::FillNormal(cache.PageData(PageId{0}), DType::kBF16, geometry.pages * cache.page_bytes() / 2, 1.0f, 5,
                       queue);
    }
    for (int32_t slot = 0; slot < geometry.slots; ++slot) {
      cache.ZeroSlot(StateSlot{slot});
    }
    ops.Synchronize(ops.stream());
  }
};

struct StepTime {
  double seconds = 0;  // of the wall clock a step
  double busy_ms = 0;  // of the device a step
};

// Steady decode with two steps in flight, each fed by the one before.
StepTime TimeDecode(Executor& executor, int32_t sequences, int32_t context, int32_t pool_pages, double budget_seconds) {
  StepPlan plans[3];
  StepResult result;
  plans[0] = MakePlan({sequences}, 1, context, pool_pages, false);
  OrDie(executor.Run(plans[0], &result));
  CheckResult(result);
  int steps = 20;
  StepTime time;
  for (int round = 0; round < 2; ++round) {  // the first one warms up and tells how many fit the budget
    const StepTimes before = executor.times();
    const auto start = WallClock::now();
    for (int i = 0; i < steps; ++i) {
      // The position stays: the cost of a step at this context is wanted.
      plans[i % 3] = MakePlan({sequences}, 1, context, pool_pages, true);
      OrDie(executor.Submit(plans[i % 3]));
      if (i > 0) OrDie(executor.Wait(&result));
    }
    OrDie(executor.Wait(&result));
    CheckResult(result);
    time.seconds = SecondsSince(start) / steps;
    time.busy_ms = (executor.times().busy_ms - before.busy_ms) / steps;
    steps = std::clamp(static_cast<int>(budget_seconds / time.seconds), 20, 300);
  }
  return time;
}

// --- requests through the engine ---

class Sink final : public TokenSink {
 public:
  void OnToken(int32_t, int32_t token, const TokenLogprob* logprob) override {
    std::lock_guard lock(mutex_);
    if (tokens_.empty()) first_ = WallClock::now();
    tokens_.push_back(token);
    if (logprob != nullptr) logprobs_.push_back(logprob->logprob);
    if (on_token_) on_token_(tokens_.size());
  }
  void OnChoiceFinished(int32_t, FinishReason, int32_t) override {}
  void OnFinished(const absl::Status& status, const RequestUsage& usage) override {
    std::lock_guard lock(mutex_);
    status_ = status;
    cached_ = usage.cached_tokens;
    done_ = true;
    wake_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return done_; });
    OrDie(status_);
  }
  std::function<void(size_t)> on_token_;  // on the engine's thread
  WallClock::time_point first_;
  std::vector<int32_t> tokens_;
  std::vector<float> logprobs_;
  int32_t cached_ = 0;

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  absl::Status status_;
  bool done_ = false;
};

std::vector<int32_t> RandomPrompt(int32_t length, uint64_t seed, int32_t vocab) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
  return prompt;
}

std::shared_ptr<Sink> Send(Engine& engine, std::vector<int32_t> prompt, int32_t new_tokens, bool logprobs = false,
                           std::function<void(size_t)> on_token = {}) {
  auto sink = std::make_shared<Sink>();
  sink->on_token_ = std::move(on_token);
  auto request = std::make_unique<Request>();
  request->prompt_tokens = std::move(prompt);
  request->sampling.max_new_tokens = new_tokens;
  request->sampling.ignore_eos = true;
  request->sampling.seed = 7;
  request->sampling.top_logprobs = logprobs ? 0 : -1;
  request->sink = sink;
  OrDie(engine.Submit(std::move(request)).status());
  return sink;
}

EngineConfig MakeEngineConfig(const Served& served, int32_t max_seqs, int32_t step_tokens, int32_t live_slots) {
  const CacheGeometry& geometry = served.executor->cache().geometry();
  EngineConfig config;
  config.vocab_size = static_cast<int32_t>(served.loaded->config.vocab_size);
  config.max_model_len = static_cast<int32_t>(served.executor->workspace().bounds().context);
  config.max_num_seqs = max_seqs;
  config.max_num_batched_tokens = step_tokens;
  config.max_queue = 4096;
  config.page_size = kPageSize;
  config.latent_pages = geometry.pages;
  config.state_slots = live_slots;
  config.snapshot_slots = geometry.slots - live_slots;
  config.snapshot_interval = 8192;
  config.prefill_alignment = 64;  // as serve --batch-invariant does
  config.short_tail = 8;
  return config;
}

void HostWait(Served& served, Report& report, int32_t requests) {
  auto engine = OrDie(Engine::Create(MakeEngineConfig(served, 256, 8192, 256), *served.executor));
  StepTimes from, to;
  std::vector<std::shared_ptr<Sink>> sinks;
  const int32_t vocab = static_cast<int32_t>(served.loaded->config.vocab_size);
  for (int32_t i = 0; i < requests; ++i) {
    std::function<void(size_t)> mark;
    if (i + 1 == requests) {  // the last to start: all run between its 16th and its 80th token
      mark = [&](size_t count) {
        if (count == 16) from = served.executor->times();
        if (count == 80) to = served.executor->times();
      };
    }
    sinks.push_back(Send(*engine, RandomPrompt(20, static_cast<uint64_t>(i), vocab), 96, false, std::move(mark)));
  }
  for (const auto& sink : sinks) sink->Wait();
  const double steps = static_cast<double>(to.steps - from.steps);
  const std::string name = "kl48b/host_wait/b" + std::to_string(requests);
  report.Add(name, (to.idle_ms - from.idle_ms) / steps, "ms");
  report.Add(name + "/step", (to.busy_ms - from.busy_ms) / steps, "ms");
}

void PrefixHit(Served& served, Report& report) {
  auto engine = OrDie(Engine::Create(MakeEngineConfig(served, 8, 8192, 8), *served.executor));
  const int32_t vocab = static_cast<int32_t>(served.loaded->config.vocab_size);
  const std::vector<int32_t> prompt = RandomPrompt(32769, 99, vocab);
  const auto miss_start = WallClock::now();
  Send(*engine, prompt, 1)->Wait();
  const double miss = SecondsSince(miss_start);
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) {
    const auto start = WallClock::now();
    const auto sink = Send(*engine, prompt, 1);
    sink->Wait();
    if (sink->cached_ != 32768) throw std::runtime_error("no prefix hit: " + std::to_string(sink->cached_));
    times.push_back(std::chrono::duration<double>(sink->first_ - start).count());
  }
  report.Add("kl48b/prefix_hit_ttft/32768", Median(times) * 1e3, "ms");
  report.Add("kl48b/prefix_miss_ttft/32768", miss * 1e3, "ms");
}

// One request alone and among 63 others: equal tokens and equal bits of log-probability.
void Invariant(Served& served, Report& report, const std::string& name) {
  const int32_t vocab = static_cast<int32_t>(served.loaded->config.vocab_size);
  const std::vector<int32_t> prompt = RandomPrompt(300, 4242, vocab);
  std::shared_ptr<Sink> alone;
  {
    auto engine = OrDie(Engine::Create(MakeEngineConfig(served, 64, 4096, 64), *served.executor));
    alone = Send(*engine, prompt, 40, true);
    alone->Wait();
  }
  auto engine = OrDie(Engine::Create(MakeEngineConfig(served, 64, 4096, 64), *served.executor));
  std::vector<std::shared_ptr<Sink>> sinks;
  for (int32_t i = 0; i < 64; ++i) {
    sinks.push_back(i == 31 ? Send(*engine, prompt, 40, true)
                            : Send(*engine, RandomPrompt(10 + 11 * i, static_cast<uint64_t>(i), vocab), 30 + i));
  }
  for (const auto& sink : sinks) sink->Wait();
  const Sink& among = *sinks[31];
  size_t equal = 0;
  while (equal < 40 && among.tokens_[equal] == alone->tokens_[equal] &&
         std::memcmp(&among.logprobs_[equal], &alone->logprobs_[equal], sizeof(float)) == 0) {
    ++equal;
  }
  report.Add(name, static_cast<double>(equal), "of 40 tokens equal");
}

// --- parts ---

class ModelBench {
 public:
  ModelBench(ProfiledOps& ops, Report& report, std::set<std::string> only, std::string scratch, bool graphs)
      : ops_(ops),
        report_(report),
        only_(std::move(only)),
        scratch_(std::move(scratch)),
        graphs_(graphs),
        profile_(&ops) {}

  bool Wants(const std::string& part) const { return only_.empty() || only_.count(part) > 0; }
  // What one part throws keeps the others from nothing, unless the device is lost.
  void Part(const std::string& name, const std::function<void()>& run) {
    const auto start = WallClock::now();
    try {
      run();
      std::printf("# %s took %.1f s\n", name.c_str(), SecondsSince(start));
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", name.c_str(), error.what());
      ++failures_;
    }
    std::fflush(stdout);
  }
  int failures() const { return failures_; }

  bool WantsAny(std::initializer_list<const char*> parts) const {
    return std::any_of(parts.begin(), parts.end(), [this](const char* part) { return Wants(part); });
  }

  void KimiLinear() {
    const std::string dir = std::string(K3_SOURCE_DIR) + "/configs/models/kimi-linear-48b";
    const ModelConfig config = OrDie(LoadModelConfig(dir));
    Served served(ops_, dir, config, 1, 8);
    const StepBounds bounds{.tokens = 8192, .sequences = 256, .logits_rows = 256, .context = 1 << 20};
    // 256 sequences of 8,192 tokens; a context of 1M tokens fits into the same pages.
    const int32_t pages = 256 * (8192 / kPageSize + 1), slots = 256 + 8;
    ExecutorOptions options;
    if (graphs_) options.decode_sizes = Executor::DecodeSizes(256);
    options.profile = profile_;
    served.MakeExecutor(ops_, bounds, pages, slots, std::move(options));
    served.FillCaches(ops_);
    Executor& executor = *served.executor;
    std::printf("%.1f GB of memory free\n", ops_.FreeMemory() * 1e-9);

    if (Wants("decode"))
      Part("decode", [&] {
        // Published floors of the goals, in milliseconds at their copy speed of 4.23 TB/s.
        const std::pair<int32_t, double> cases[] = {{1, 1.5e-3}, {64, 22.4e-3}, {256, 32.1e-3}};
        for (const auto& [batch, floor] : cases) {
          const StepTime time = TimeDecode(executor, batch, 8191, pages, 1.5);
          const std::string name = "kl48b/decode_step/b" + std::to_string(batch) + "/8192";
          report_.Add(name, time.seconds * 1e3, "ms", time.seconds, floor * 4.23e12);
          report_.Add(name + "/device", time.busy_ms, "ms");
        }
      });
    if (Wants("long"))
      Part("long", [&] {
        const StepTime near = TimeDecode(executor, 1, 4095, pages, 1),
                       far = TimeDecode(executor, 1, (1 << 20) - 2, pages, 1);
        report_.Add("kl48b/decode_step/b1/1048576_minus_4096", (far.seconds - near.seconds) * 1e3, "ms",
                    far.seconds - near.seconds, 2.0e-3 * 4.23e12);
      });
    if (Wants("prefill")) Part("prefill", [&] { TimePrefill(executor, 8192, pages, "kl48b"); });
    if (Wants("engine")) {
      Part("host wait b1", [&] { HostWait(served, report_, 1); });
      Part("host wait b256", [&] { HostWait(served, report_, 256); });
    }
    if (Wants("hit")) Part("prefix hit", [&] { PrefixHit(served, report_); });
    if (Wants("profile")) {
      Profile(served, pages, "decode b1 at 8192", 1, 1, 8191);
      Profile(served, pages, "decode b64 at 8192", 64, 1, 8191);
      Profile(served, pages, "decode b256 at 8192", 256, 1, 8191);
      Profile(served, pages, "prefill 8192", 1, 8192, 0);
    }
    if (Wants("invariant")) FixedTiles(served, "kl48b/batch_invariant");
  }

  // The same weights under ops that fix tiles and splits, and what that costs.
  void FixedTiles(Served& served, const std::string& name) {
    served.executor.reset();
    const std::unique_ptr<Ops> fixed = MakeCudaOps({.batch_invariant = true});
    served.model = std::make_unique<Model>(served.loaded->config, served.loaded->weights, *fixed);
    ExecutorOptions options;
    options.decode_sizes = {1, 8, 64};
    const int32_t pages = 64 * (8192 / kPageSize + 4);
    served.MakeExecutor(*fixed, {.tokens = 4096, .sequences = 64, .logits_rows = 64, .context = 8192}, pages, 72,
                        std::move(options));
    Invariant(served, report_, name);
    served.FillCaches(*fixed);
    for (int32_t batch : {1, 64}) {
      const StepTime time = TimeDecode(*served.executor, batch, 4095, pages, 0.5);
      report_.Add(name + "/decode_step/b" + std::to_string(batch) + "/4096", time.seconds * 1e3, "ms");
    }
    TimePrefill(*served.executor, 4096, pages, name);
    served.executor.reset();
  }

  void TimePrefill(Executor& executor, int32_t tokens, int32_t pages, const std::string& name) {
    std::vector<double> seconds;
    StepResult result;
    for (int i = 0; i < 6; ++i) {
      StepPlan plan = MakePlan({1}, tokens, 0, pages, false);
      plan.ranks[0].zero_slots.push_back(StateSlot{0});
      const auto start = WallClock::now();
      OrDie(executor.Run(plan, &result));
      CheckResult(result);
      if (i > 0) seconds.push_back(SecondsSince(start));
    }
    report_.Add(name + "/prefill/" + std::to_string(tokens), tokens / Median(seconds), "tok/s");
  }

  // Where the time of steps goes, by op; launched one by one.
  void Profile(Served& served, int32_t pages, const char* title, int32_t sequences, int32_t tokens, int32_t context) {
    StepResult result;
    StepPlan plan = MakePlan({sequences}, tokens, context, pages, false);
    OrDie(served.executor->Run(plan, &result));
    profile_->Start(5);
    for (int i = 0; i < 5; ++i) OrDie(served.executor->Run(plan, &result));
    std::printf("\n%s: %s", title, profile_->Result().Text().c_str());
    std::fflush(stdout);
  }

  // Reading 32 GB of weights that lie in the page cache.
  void Load() {
    const std::string dir = std::string(K3_SOURCE_DIR) + "/configs/models/kimi-linear-48b";
    ModelConfig config = OrDie(LoadModelConfig(dir));
    for (config.num_experts = 8; CheckpointBytes(config) < 32e9;) config.num_experts += 4;
    const std::string target = ScratchFolder(36e9) + "/k3_load_bench";
    std::filesystem::remove_all(target);
    std::filesystem::create_directories(target);
    auto start = WallClock::now();
    WriteCheckpoint(config, target);
    std::printf("wrote %.2f GB to %s in %.1f s\n", CheckpointBytes(config) * 1e-9, target.c_str(), SecondsSince(start));
    for (int run = 0; run < 2; ++run) {
      LoadOptions options;
      options.print_progress = false;
      options.threads = static_cast<int>(std::thread::hardware_concurrency());
      start = WallClock::now();
      const auto loaded = OrDie(LoadWeights(target, config, ops_, options));
      const double seconds = SecondsSince(start);
      const double rate = CheckpointBytes(config) / seconds * 1e-9;
      report_.Add(run == 0 ? "load/page_cache/first" : "load/page_cache", rate, "GB/s");
    }
    std::filesystem::remove_all(target);
  }

  // 13 layers of Kimi K3's shape, so that one residual block closes, with as many experts as fit.
  void Slice() {
    const std::string dir = std::string(K3_SOURCE_DIR) + "/configs/models/kimi-k3";
    ModelConfig config = OrDie(LoadModelConfig(dir));
    config.num_hidden_layers = 13;
    config.layers.resize(13);
    const int32_t all = config.num_experts;
    const auto bytes = [&] {
      double total = CheckpointBytes(config);
      return total;
    };
    const double room = static_cast<double>(ops_.FreeMemory()) - 24e9;
    for (config.num_experts = config.num_experts_per_token; config.num_experts + 8 <= all;) {
      config.num_experts += 8;
      if (bytes() > room) {
        config.num_experts -= 8;
        break;
      }
    }
    std::printf("K3 slice: %d of %d experts a layer\n", config.num_experts, all);
    Served served(ops_, dir, config, 1, 8);
    ExecutorOptions options;
    options.decode_sizes = {1, 8, 64};
    const int32_t pages = 64 * (4096 / kPageSize + 1);
    served.MakeExecutor(ops_, {.tokens = 4096, .sequences = 64, .logits_rows = 64, .context = 16384}, pages, 64,
                        std::move(options));
    served.FillCaches(ops_);
    const std::string name = "k3_slice13/";
    report_.Add(name + "experts", config.num_experts, "of " + std::to_string(all));
    for (int32_t batch : {1, 64}) {
      const StepTime time = TimeDecode(*served.executor, batch, 4095, pages, 1);
      report_.Add(name + "decode_step/b" + std::to_string(batch) + "/4096", time.seconds * 1e3, "ms");
    }
    TimePrefill(*served.executor, 4096, pages, "k3_slice13");
    FixedTiles(served, "k3_slice13/batch_invariant");
  }

  // One million tokens through a model, random weights where there is a seed; every chunk's last logits are finite.
  void Million(const std::string& dir, const std::string& name, std::optional<uint64_t> seed) {
    const ModelConfig config = OrDie(LoadModelConfig(dir));
    Served served(ops_, dir, config, seed, 4);
    const int64_t length = 1 << 20, chunk = 8192;
    SequenceRunner runner(*served.model, ops_, length, chunk);
    std::mt19937_64 random(3);
    const auto start = WallClock::now();
    int64_t finite = 0;
    while (runner.length() < length) {
      std::vector<int32_t> tokens(static_cast<size_t>(chunk));
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint64_t>(config.vocab_size));
      const int32_t row = static_cast<int32_t>(chunk) - 1;
      const std::vector<float> logits = runner.Append(tokens, std::span(&row, 1));
      const bool all = std::all_of(logits.begin(), logits.end(), [](float value) { return std::isfinite(value); });
      if (!all) throw std::runtime_error("non-finite logits at position " + std::to_string(runner.length() - 1));
      finite += chunk;
    }
    const double seconds = SecondsSince(start);
    report_.Add(name + "/finite_tokens", static_cast<double>(finite), "tokens");
    report_.Add(name + "/prefill/1048576", static_cast<double>(length) / seconds, "tok/s");
    report_.Add(name + "/prefill/1048576/seconds", seconds, "s");
  }

  void TinyInvariant() {
    const std::string dir = testing::TinyK3();
    const ModelConfig config = OrDie(LoadModelConfig(dir));
    const std::unique_ptr<Ops> fixed = MakeCudaOps({.batch_invariant = true});
    Served served(*fixed, dir, config, std::nullopt, 4);
    ExecutorOptions options;
    options.decode_sizes = Executor::DecodeSizes(64);
    served.MakeExecutor(*fixed, {.tokens = 4096, .sequences = 64, .logits_rows = 64, .context = 8192}, 64 * 20, 72,
                        std::move(options));
    Invariant(served, report_, "tiny-k3/batch_invariant");
    served.executor.reset();
  }

 private:
  static double TensorBytes(const TensorSpec& spec, bool packed) {
    const double elements = static_cast<double>(spec.elements());
    if (spec.form == TensorForm::kExpert && packed) return elements / 2 + elements / kMxfp4BlockSize;
    return elements * static_cast<double>(SizeOf(spec.released));
  }
  static double CheckpointBytes(const ModelConfig& config) {
    double total = 0;
    const auto add = [&](const std::vector<TensorSpec>& specs, double times) {
      for (const TensorSpec& spec : specs) total += times * TensorBytes(spec, config.mxfp4_experts);
    };
    add(ModelTensors(config), 1);
    for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      add(LayerTensors(config, layer), 1);
      if (config.IsMoe(layer)) add(ExpertTensors(config, layer, 0), config.num_experts);
    }
    return total;
  }

  // A folder on a file system with so much room: memory first.
  std::string ScratchFolder(double bytes) const {
    if (!scratch_.empty()) return scratch_;
    for (const char* folder : {"/dev/shm", "/tmp"}) {
      std::error_code error;
      const auto space = std::filesystem::space(folder, error);
      if (!error && static_cast<double>(space.available) > bytes) return folder;
    }
    throw std::runtime_error("no folder has room for a checkpoint; name one with --scratch");
  }

  // One shard a layer and one for the model, written side by side; plain tensors of random numbers.
  static void WriteCheckpoint(const ModelConfig& config, const std::string& dir) {
    std::vector<std::vector<TensorSpec>> shards;
    shards.push_back(ModelTensors(config));
    for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      shards.push_back(LayerTensors(config, layer));
      for (int32_t e = 0; config.IsMoe(layer) && e < config.num_experts; ++e) {
        for (TensorSpec& spec : ExpertTensors(config, layer, e)) shards.back().push_back(std::move(spec));
      }
    }
    // bf16 numbers of ordinary size, whatever a tensor's type.
    std::vector<uint16_t> noise(size_t{4} << 20);
    std::mt19937 random(1);
    for (uint16_t& value : noise) value = static_cast<uint16_t>((random() & 0x80ff) | 0x3c00);
    const int count = static_cast<int>(shards.size());
    std::string map;
    for (int i = 0; i < count; ++i) {
      for (const TensorSpec& spec : shards[static_cast<size_t>(i)]) {
        map += (map.empty() ? "" : ",") + ("\"" + spec.name + "\":\"" + testing::ShardName(i, count) + "\"");
      }
    }
    std::ofstream(dir + "/config.json") << testing::ConfigJson(config);
    std::ofstream(dir + "/model.safetensors.index.json") << "{\"weight_map\":{" << map << "}}";
    std::atomic<int> next{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < std::thread::hardware_concurrency(); ++t) {
      threads.emplace_back([&] {
        for (int i = next++; i < count; i = next++) {
          std::string header;
          uint64_t end = 0;
          for (const TensorSpec& spec : shards[static_cast<size_t>(i)]) {
            const uint64_t bytes = static_cast<uint64_t>(TensorBytes(spec, false));
            std::string shape;
            for (int64_t d : spec.shape) shape += (shape.empty() ? "" : ",") + std::to_string(d);
            header += (header.empty() ? "" : ",") +
                      ("\"" + spec.name + "\":{\"dtype\":\"" + Name(spec.released) + "\",\"shape\":[" + shape +
                       "],\"data_offsets\":[" + std::to_string(end) + "," + std::to_string(end + bytes) + "]}");
            end += bytes;
          }
          header = "{" + header + "}";
          header.resize((header.size() + 7) / 8 * 8, ' ');
          std::ofstream file(dir + "/" + testing::ShardName(i, count), std::ios::binary);
          const uint64_t length = header.size();
          file.write(reinterpret_cast<const char*>(&length), 8).write(header.data(), static_cast<int64_t>(length));
          const uint64_t piece = noise.size() * 2;
          for (uint64_t done = 0; done < end; done += piece) {
            file.write(reinterpret_cast<const char*>(noise.data()), static_cast<int64_t>(std::min(piece, end - done)));
          }
          if (!file.flush()) throw std::runtime_error("cannot write to " + dir);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  Ops& ops_;
  Report& report_;
  const std::set<std::string> only_;
  const std::string scratch_;
  const bool graphs_;
  ProfiledOps* const profile_;  // ops_
  int failures_ = 0;
};

int Main(int argc, char** argv) {
  std::string json, scratch;
  std::set<std::string> only;
  bool graphs = true;
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--json") json = value;
    if (flag == "--scratch") scratch = value;
    if (flag == "--graphs") graphs = value != "off";
    if (flag == "--only") {
      for (size_t at = 0; at <= value.size();) {
        const size_t comma = std::min(value.find(',', at), value.size());
        only.insert(value.substr(at, comma - at));
        at = comma + 1;
      }
    }
  }
  ProfiledOps ops(MakeCudaOps());
  Report report(ops);
  ModelBench bench(ops, report, only, scratch, graphs);
  const auto part = [&](const char* name, const std::function<void()>& run) {
    bench.Part(name, run);
    bench::WriteResults(json, report.results(), ops.device_name(), argc, argv);
  };
  if (bench.Wants("invariant")) part("tiny-k3 batch invariance", [&] { bench.TinyInvariant(); });
  if (bench.WantsAny({"decode", "long", "prefill", "engine", "hit", "invariant", "profile"})) {
    part("kimi-linear-48b", [&] { bench.KimiLinear(); });
  }
  if (bench.Wants("load")) part("load", [&] { bench.Load(); });
  if (bench.Wants("slice")) part("K3 slice", [&] { bench.Slice(); });
  if (bench.Wants("million")) part("1M tokens", [&] { bench.Million(testing::TinyK3(), "tiny-k3", std::nullopt); });
  // Minutes: only when it is named.
  if (only.count("million48") > 0) {
    const std::string dir = std::string(K3_SOURCE_DIR) + "/configs/models/kimi-linear-48b";
    part("1M tokens, 48B shape", [&] { bench.Million(dir, "kl48b", 1); });
  }
  return bench.failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) { return k3::Main(argc, argv); }
