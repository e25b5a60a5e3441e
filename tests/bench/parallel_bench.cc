// Several ranks: what reaching the experts costs, whole models over layouts, and a long run under random load.
//   parallel_bench [--device cpu|cuda] [--ranks 2,4,8] [--only comm,model,soak] [--model DIR] [--layouts 1x1,2x1,1x2]
//                  [--steps N] [--context N] [--batches 1,64] [--prefill N] [--json FILE]
// On the CPU the ranks are threads, virtual ranks: volumes are counted, times say little. Weights are random (--model
// names the shape).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/model/expert_parallel.h"
#include "engine/rank_group.h"
#include "engine/self_check.h"
#include "server/nccl_world.h"
#include "tests/bench/model_steps.h"
#include "tests/bench/result_file.h"
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

struct Settings {
  bool cuda = false;
  std::vector<int> ranks = {2};
  std::set<std::string> only = {"comm", "model", "soak"};
  std::string model;
  std::vector<std::pair<int, int>> layouts;
  int64_t steps = 10000;
  int32_t context = 8192;
  std::vector<int32_t> batches = {1, 64};
  int32_t prefill = 8192;
  std::string json;
};

class Report {
 public:
  void Add(const std::string& name, double value, const std::string& unit) {
    bench::Result result;
    result.name = name;
    result.value = value;
    result.unit = unit;
    std::printf("%-56s %14.4f %s\n", name.c_str(), value, unit.c_str());
    std::fflush(stdout);
    results.push_back(std::move(result));
  }
  std::vector<bench::Result> results;
};

std::unique_ptr<RankGroup> Open(const Settings& settings, int tensor, int data) {
  RankGroup::Options options;
  options.layout = {.tensor = tensor, .data = data};
  if (settings.cuda) {
    options.make_ops = [](int local) { return MakeCudaOps({.device = local}); };
    if (tensor * data > 1) options.make_world = NcclWorld(tensor * data, /*fixed_sums=*/false);
  } else {
    options.make_ops = [](int) { return MakeCpuOps({.threads = 1}); };
  }
  return OrDie(RankGroup::Create(std::move(options)));
}

// --- dispatch and combine alone ---

constexpr int32_t kExperts = 896;
constexpr int32_t kTopK = 16;

// Dispatch and combine as a layer does them, of K3's experts over `comm`, without the experts. Every token chooses
// kTopK experts at random, as even routing would.
class Exchange {
 public:
  Exchange(Ops& ops, Communicator& comm, int64_t rows, int32_t width, ExpertTransport transport)
      : config_(Shape(width)),
        parallel_{nullptr, &comm, transport},
        workspace_(config_, {.tokens = rows, .sequences = 1, .logits_rows = 1, .context = kPageSize}, ops,
                   WorkspaceRanks::Of({.data = comm.size()}, transport)),
        cache_(config_, {.pages = 1, .page_size = kPageSize, .slots = 1}, ops),
        context_{
            config_, ops, ops.stream(), batch_, workspace_, cache_, parallel_, /*probe=*/nullptr, /*balance=*/nullptr,
            rows},
        rows_(rows) {
    std::mt19937 random(static_cast<uint32_t>(comm.rank()) + 1);
    std::vector<int32_t> ids;
    const std::vector<float> weights(static_cast<size_t>(rows * kTopK), 1.0f / kTopK);
    for (int64_t t = 0; t < rows; ++t) {
      std::set<int32_t> picks;
      while (picks.size() < kTopK) picks.insert(static_cast<int32_t>(random() % kExperts));
      ids.insert(ids.end(), picks.begin(), picks.end());
    }
    for (const MatrixView& m : {workspace_.expert_in, workspace_.gathered_out}) {
      ops.Fill(m.data, 0, static_cast<size_t>(m.rows * m.ld) * SizeOf(m.dtype), ops.stream());
    }
    ops.CopyToDevice(workspace_.expert_ids, ids.data(), ids.size() * 4, ops.stream());
    ops.CopyToDevice(workspace_.expert_weights, weights.data(), weights.size() * 4, ops.stream());
    ops.Synchronize(ops.stream());
  }
  void Run() {
    Dispatch(context_, workspace_.expert_in.Rows(0, rows_), rows_);
    Combine(context_, rows_, workspace_.expert_out.Rows(0, rows_));
  }

 private:
  // Small in everything but what travels.
  static ModelConfig Shape(int32_t width) {
    ModelConfig config = OrDie(LoadModelConfig(testing::SourcePath("configs/models/tiny-k3")));
    config.num_experts = kExperts;
    config.num_experts_per_token = kTopK;
    config.routed_expert_hidden_size = width;
    config.moe_intermediate_size = 32;
    return config;
  }
  const ModelConfig config_;
  const ParallelContext parallel_;
  Workspace workspace_;
  CacheStorage cache_;
  const SequenceBatch batch_;
  const LayerContext context_;
  const int64_t rows_;
};

// Seconds of one `work`, repeated inside captured work where the device can.
double TimeWork(Ops& ops, int inner, int outer, const std::function<void()>& work) {
  work();
  ops.Synchronize(ops.stream());
  std::unique_ptr<CapturedWork> captured;
  const auto repeat = [&] {
    for (int i = 0; i < inner; ++i) work();
  };
  if (ops.can_capture()) captured = ops.Capture(repeat, ops.stream());
  const auto launch = [&] { captured != nullptr ? ops.Launch(*captured, ops.stream()) : repeat(); };
  launch();
  ops.Synchronize(ops.stream());
  std::vector<double> times;
  const Event from = ops.MakeEvent(), to = ops.MakeEvent();
  for (int i = 0; i < outer; ++i) {
    const auto start = WallClock::now();
    ops.RecordEvent(from, ops.stream());
    launch();
    ops.RecordEvent(to, ops.stream());
    ops.WaitEvent(to);
    ops.Synchronize(ops.stream());
    const double device = ops.Milliseconds(from, to) * 1e-3;
    times.push_back((device > 0 ? device : SecondsSince(start)) / inner);
  }
  ops.FreeEvent(from);
  ops.FreeEvent(to);
  std::nth_element(times.begin(), times.begin() + outer / 2, times.end());
  return times[static_cast<size_t>(outer / 2)];
}

// Ranks that a token's kTopK experts of kExperts live on, of `ranks` with equal shares: spec B.2's first table.
double DistinctRanks(int ranks) {
  double none = 1;  // of the experts on one rank
  const double share = static_cast<double>(kExperts) / ranks;
  for (int i = 0; i < kTopK; ++i) none *= (kExperts - share - i) / (kExperts - i);
  return ranks * (1 - none);
}

// Bytes and time of both transports over `ranks` ranks, beside what spec B.2 says that must be sent: a token's row once
// to every other rank with an expert of it, and the same back.
void BenchComm(const Settings& settings, int ranks_count, Report& report) {
  constexpr int32_t kLatent = 3584, kHidden = 7168;
  const auto ranks = Open(settings, 1, ranks_count);
  const std::string tag = absl::StrCat(settings.cuda ? "" : "cpu/", "comm/ep", ranks_count);
  const double others = ranks_count - 1, element = settings.cuda ? 2 : 4;
  double pair_bandwidth = 0;
  OrDie(ranks->ForEach([&](int local) -> absl::Status {
    Ops& ops = ranks->ops(local);
    Communicator& comm = ranks->world(local);
    const size_t bytes = settings.cuda ? size_t{256} << 20 : size_t{8} << 20 >> (ranks_count > 8 ? 4 : 0);
    void* from = ops.Allocate(bytes * static_cast<size_t>(comm.size()));
    void* to = ops.Allocate(bytes * static_cast<size_t>(comm.size()));
    const double seconds = TimeWork(ops, 4, 5, [&] { comm.AllToAll(from, to, bytes, ops.stream()); });
    if (local == 0) pair_bandwidth = static_cast<double>(bytes) * others / seconds;
    ops.Free(from);
    ops.Free(to);
    return absl::OkStatus();
  }));
  if (settings.cuda) report.Add(absl::StrCat(tag, "/bandwidth_out"), pair_bandwidth * 1e-9, "GB/s");
  const double distinct = DistinctRanks(ranks_count);
  report.Add(absl::StrCat(tag, "/distinct_ranks_of_a_token"), distinct, "ranks");
  const std::vector<int64_t> batches = settings.cuda      ? std::vector<int64_t>{64, 8192}
                                       : ranks_count > 16 ? std::vector<int64_t>{8}
                                                          : std::vector<int64_t>{64};
  for (const int64_t rows : batches) {
    double all_gather_bytes = 0;
    for (const ExpertTransport transport : {ExpertTransport::kAllGather, ExpertTransport::kAllToAll}) {
      const bool gather = transport == ExpertTransport::kAllGather;
      double payload[2] = {};
      for (const int32_t width : {kLatent, kHidden}) {
        if (width == kHidden && ranks_count > 8) continue;
        std::vector<double> sent(static_cast<size_t>(ranks_count));
        double seconds = 0;
        OrDie(ranks->ForEach([&](int local) -> absl::Status {
          Ops& ops = ranks->ops(local);
          Communicator& comm = ranks->world(local);
          Exchange exchange(ops, comm, rows, width, transport);
          const uint64_t before = comm.bytes_sent();
          exchange.Run();
          sent[static_cast<size_t>(local)] = static_cast<double>(comm.bytes_sent() - before);
          const double took = TimeWork(ops, settings.cuda ? 20 : 2, settings.cuda ? 15 : 5, [&] { exchange.Run(); });
          if (local == 0) seconds = took;
          return absl::OkStatus();
        }));
        double bytes = 0;  // of a rank: all are like the first, but for their tokens
        for (const double rank : sent) bytes += rank / ranks_count;
        const std::string name =
            absl::StrCat(tag, gather ? "/dispatch_combine/" : "/dispatch_combine_all_to_all/", width, "/", rows);
        report.Add(name, seconds * 1e6, "us");
        report.Add(name + "/bytes_out", bytes * 1e-6, "MB");
        if (settings.cuda) report.Add(name + "/bandwidth_share", bytes / seconds / pair_bandwidth, "of pair");
        // Ids and weights go with a row, and counts with the rows of a rank.
        const bool padded = gather || settings.cuda;
        const double copies = static_cast<double>(rows) * (padded ? others : distinct * others / ranks_count);
        const double extra = copies * kTopK * 8 + (gather ? 0 : others * 4);
        payload[width == kHidden] = bytes - extra;
        report.Add(name + "/payload_over_formula", (bytes - extra) / (2.0 * copies * width * element), "ratio");
        if (width != kLatent) continue;
        if (gather) all_gather_bytes = bytes - extra;
        if (!gather) {
          report.Add(name + "/all_gather_payload_over_this", all_gather_bytes / (bytes - extra), "ratio");
          // Spec B.2's second table, BF16 back.
          report.Add(name + "/combine_at_bf16", (bytes - extra) / element * 1e-6, "MB");
        }
      }
      if (payload[1] > 0) {
        report.Add(absl::StrCat(tag, gather ? "/latent_payload_share/" : "/latent_payload_share_all_to_all/", rows),
                   payload[0] / payload[1], "of full width");
      }
    }
  }
}

// --- whole models ---

struct Served {
  std::unique_ptr<RankGroup> ranks;
  ModelConfig config;
  int32_t pages = 0;
};

Served Serve(const Settings& settings, int tensor, int data, const StepBounds& bounds, int32_t pages, int32_t slots,
             std::vector<int32_t> decode_sizes) {
  Served served;
  served.config = OrDie(LoadModelConfig(settings.model));
  served.ranks = Open(settings, tensor, data);
  LoadOptions load;
  load.print_progress = false;
  load.random_seed = 7;
  load.threads = settings.cuda ? 4 : 1;
  const auto start = WallClock::now();
  OrDie(served.ranks->Load(settings.model, served.config, load));
  OrDie(SelfCheck(*served.ranks));
  served.pages = pages;
  const CacheGeometry geometry = MakeGeometry(served.ranks->ops(), pages, slots);
  OrDie(served.ranks->MakeExecutors(bounds, geometry, {.decode_sizes = std::move(decode_sizes)}));
  if (settings.cuda) OrDie(served.ranks->WarmUp().status());
  OrDie(served.ranks->ForEach([&](int local) -> absl::Status {
    CacheStorage& cache = served.ranks->executor(local).cache();
    for (int32_t page = 0; page < pages; ++page) cache.FillPage(PageId{page}, 0);
    for (int32_t slot = 0; slot < slots; ++slot) cache.ZeroSlot(StateSlot{slot});
    return absl::OkStatus();
  }));
  std::printf("%dx%d: loaded and warm in %.1f s\n", tensor, data, SecondsSince(start));
  return served;
}

double TimeSteps(StepRunner& runner, const std::function<StepPlan(bool)>& plan, bool pipelined, int most) {
  StepResult result;
  StepPlan plans[3] = {plan(false), {}, {}};
  OrDie(runner.Run(plans[0], &result));
  CheckResult(result);
  double seconds = 0;
  int steps = 3;
  for (int round = 0; round < 2; ++round) {
    const auto start = WallClock::now();
    for (int i = 0; i < steps; ++i) {
      plans[i % 3] = plan(pipelined);
      OrDie(runner.Submit(plans[i % 3]));
      if (!pipelined || i > 0) OrDie(runner.Wait(&result));
    }
    if (pipelined) OrDie(runner.Wait(&result));
    CheckResult(result);
    seconds = SecondsSince(start) / steps;
    steps = std::clamp(static_cast<int>(2.0 / seconds), 3, most);
  }
  return seconds;
}

void BenchModel(const Settings& settings, Report& report, const std::string& shape) {
  for (const auto& [tensor, data] : settings.layouts) {
    const int32_t largest = *std::max_element(settings.batches.begin(), settings.batches.end());
    std::vector<int32_t> sizes;
    for (int32_t batch : settings.batches) sizes.push_back((batch + data - 1) / data);
    std::sort(sizes.begin(), sizes.end());
    const StepBounds bounds{.tokens = std::max(settings.prefill, largest),
                            .sequences = (largest + data - 1) / data,
                            .logits_rows = std::min((largest + data - 1) / data, 256),
                            .context = settings.context + kPageSize};
    const int32_t pages =
        std::min<int32_t>(4096, (largest + data - 1) / data * ((settings.context + 1 + kPageSize - 1) / kPageSize));
    Served served = Serve(settings, tensor, data, bounds, std::max(pages, settings.prefill / kPageSize + 1),
                          (largest + data - 1) / data, settings.cuda ? sizes : std::vector<int32_t>{});
    const std::string tag = absl::StrCat(shape, "/tp", tensor, "dp", data);
    const bool pipelined = served.ranks->runner().max_in_flight() > 1;
    for (const int32_t batch : settings.batches) {
      std::vector<int32_t> groups;
      for (int32_t g = 0; g < data; ++g) groups.push_back(batch / data + (g < batch % data));
      const double seconds = TimeSteps(
          served.ranks->runner(),
          [&](bool from_last) { return MakePlan(groups, 1, settings.context, served.pages, from_last); }, pipelined,
          300);
      report.Add(absl::StrCat(tag, "/decode_step/b", batch, "/", settings.context), seconds * 1e3, "ms");
    }
    const double seconds = TimeSteps(
        served.ranks->runner(),
        [&](bool) { return MakePlan(std::vector<int32_t>(data, 1), settings.prefill, 0, served.pages, false); }, false,
        10);
    report.Add(absl::StrCat(tag, "/prefill/", settings.prefill), settings.prefill * data / seconds, "tok/s");
  }
}

// --- a long run ---

class CountingSink : public TokenSink {
 public:
  std::atomic<int>* open;
  std::atomic<int64_t>* tokens;
  std::atomic<int>* failed;
  void OnToken(int32_t, int32_t, const TokenLogprob*) override { ++*tokens; }
  void OnChoiceFinished(int32_t, FinishReason, int32_t) override {}
  void OnFinished(const absl::Status& status, const RequestUsage&) override {
    if (!status.ok() && !absl::IsCancelled(status)) ++*failed;
    --*open;
  }
};

class StepCounter : public EngineObserver {
 public:
  void OnStep(const StepStats&) override { ++steps; }
  std::atomic<int64_t> steps{0};
};

void Soak(const Settings& settings, Report& report, const std::string& shape) {
  for (const auto& [tensor, data] : settings.layouts) {
    if (tensor * data == 1) continue;
    EngineConfig engine;
    engine.data_parallel = data;
    engine.max_model_len = 512;
    engine.max_num_seqs = 16 * data;
    engine.max_num_batched_tokens = 512;
    engine.page_size = kPageSize;
    engine.latent_pages = 64;
    engine.state_slots = 16;
    engine.snapshot_slots = 8;
    engine.snapshot_interval = kPageSize * 2;
    const StepBounds bounds{.tokens = 512, .sequences = 16, .logits_rows = 16, .context = 512};
    Served served = Serve(settings, tensor, data, bounds, engine.latent_pages, 24,
                          settings.cuda ? std::vector<int32_t>{1, 4, 8, 16} : std::vector<int32_t>{});
    engine.vocab_size = static_cast<int32_t>(served.config.vocab_size);
    StepCounter counter;
    const auto loop = OrDie(Engine::Create(engine, served.ranks->runner(), &counter));
    std::mt19937 random(11);
    std::atomic<int> open{0}, failed{0};
    std::atomic<int64_t> tokens{0};
    int requests = 0, cancels = 0;
    std::vector<RequestId> live;
    const auto start = WallClock::now();
    int64_t seen = 0;
    auto progress = WallClock::now();
    while (counter.steps < settings.steps) {
      // Waves: sometimes nothing at all, so that whole groups and then all ranks are idle.
      const int most = static_cast<int>(random() % 3 == 0 ? 1 : 2 + random() % (20 * data));
      for (int i = 0; i < most && open < most; ++i) {
        auto request = std::make_unique<Request>();
        const int length = 1 + static_cast<int>(random() % (random() % 8 == 0 ? 300 : 40));
        for (int t = 0; t < length; ++t) request->prompt_tokens.push_back(static_cast<int32_t>(random() % 1000));
        request->sampling.max_new_tokens = 1 + static_cast<int32_t>(random() % 60);
        request->sampling.seed = random();
        auto sink = std::make_shared<CountingSink>();
        sink->open = &open;
        sink->tokens = &tokens;
        sink->failed = &failed;
        request->sink = std::move(sink);
        ++open;
        const auto id = loop->Submit(std::move(request));
        if (!id.ok()) {
          --open;
          break;
        }
        live.push_back(*id);
        ++requests;
      }
      if (!live.empty() && random() % 3 == 0) {
        loop->Cancel(live[random() % live.size()]);
        ++cancels;
      }
      if (live.size() > 200) live.erase(live.begin(), live.begin() + 100);
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 4));
      if (counter.steps != seen) {
        seen = counter.steps;
        progress = WallClock::now();
      }
      if (WallClock::now() - progress > std::chrono::seconds(60)) throw std::runtime_error("no step for 60 s");
      if (failed > 0 || !loop->Load().healthy) throw std::runtime_error("a request failed");
    }
    loop->Drain(std::chrono::seconds(30));
    const double seconds = SecondsSince(start);
    const std::string tag = absl::StrCat(shape, "/tp", tensor, "dp", data, "/soak");
    report.Add(tag + "/steps", static_cast<double>(counter.steps), "steps");
    report.Add(tag + "/requests", requests, "requests");
    report.Add(tag + "/cancels", cancels, "cancels");
    report.Add(tag + "/tokens", static_cast<double>(tokens), "tokens");
    report.Add(tag + "/seconds", seconds, "s");
  }
}

std::vector<std::string> Words(const std::string& list) { return absl::StrSplit(list, ','); }

int Run(int argc, char** argv) {
  Settings settings;
  settings.model = testing::SourcePath("configs/models/tiny-k3");
  std::string layouts = "1x1,2x1,1x2";
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--device")
      settings.cuda = value == "cuda";
    else if (flag == "--ranks") {
      settings.ranks.clear();
      for (const std::string& word : Words(value)) settings.ranks.push_back(std::atoi(word.c_str()));
    } else if (flag == "--only")
      settings.only = absl::StrSplit(value, ',');
    else if (flag == "--model")
      settings.model = value;
    else if (flag == "--layouts")
      layouts = value;
    else if (flag == "--steps")
      settings.steps = std::atoll(value.c_str());
    else if (flag == "--context")
      settings.context = std::atoi(value.c_str());
    else if (flag == "--prefill")
      settings.prefill = std::atoi(value.c_str());
    else if (flag == "--json")
      settings.json = value;
    else if (flag == "--batches") {
      settings.batches.clear();
      for (const std::string& word : Words(value)) settings.batches.push_back(std::atoi(word.c_str()));
    } else {
      std::fprintf(stderr, "unknown flag %s\n", flag.c_str());
      return 2;
    }
  }
  for (const std::string& word : Words(layouts)) {
    const std::vector<std::string> sides = absl::StrSplit(word, 'x');
    settings.layouts.emplace_back(std::atoi(sides.at(0).c_str()), std::atoi(sides.at(1).c_str()));
  }
  std::string shape = settings.model.substr(settings.model.rfind('/') + 1);
  if (shape == "kimi-linear-48b") shape = "kl48b";
  if (!settings.cuda) shape = "cpu/" + shape;
  Report report;
  std::string device = bench::CpuName();
  if (settings.cuda)
    device = absl::StrCat(*std::max_element(settings.ranks.begin(), settings.ranks.end()), " x ",
                          MakeCudaOps({})->device_name());
  if (settings.only.count("comm") > 0) {
    for (const int ranks : settings.ranks) BenchComm(settings, ranks, report);
  }
  if (settings.only.count("model") > 0) BenchModel(settings, report, shape);
  if (settings.only.count("soak") > 0) Soak(settings, report, shape);
  bench::WriteResults(settings.json, report.results, device, argc, argv);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  try {
    return k3::Run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
