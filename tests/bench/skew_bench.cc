// Planted skew: one rank's experts are made popular, and prompts are computed with experts chosen exactly and with the
// balance of --moe-routing local-quantile. What counts is the time of the experts' products on the slowest rank.
//   skew_bench [--device cpu|cuda] [--ranks N] [--model DIR] [--tokens N] [--skew 1.4] [--settle N] [--steps N] [--json
//   FILE]
// Weights are random; the ranks are data-parallel groups with experts over all of them, on the CPU as threads. The
// guard is off: a planted skew changes far more choices than it allows.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/rank_group.h"
#include "kernels/profiled_ops.h"
#include "server/nccl_world.h"
#include "tests/bench/result_file.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

constexpr int32_t kPageSize = 64;

struct Settings {
  bool cuda = false;
  int32_t ranks = 2;
  std::string model = testing::TinyK3();
  int32_t tokens = 2048;
  double skew = 1.4;
  int32_t settle = 24;  // steps before the measured ones: suppressing one rank moves every cutoff, so it takes several
  int32_t steps = 10;
  std::string json;
};

void OrDie(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}
template <typename T>
T OrDie(absl::StatusOr<T> value) {
  OrDie(value.status());
  return *std::move(value);
}

// The busiest rank's choices over the mean rank's, and the planted one's: means over layers, of all source ranks.
struct Load {
  double max_over_mean = 0;
  double planted = 0;
};
Load LoadOf(const StepResult& result, int32_t groups) {
  std::vector<uint64_t> sum(result.ranks[0].routing.load.size());
  for (const RankResult& rank : result.ranks) {
    for (size_t i = 0; i < rank.routing.load.size(); ++i) sum[i] += rank.routing.load[i];
  }
  Load load;
  const size_t layers = sum.size() / static_cast<size_t>(groups);
  for (size_t layer = 0; layer < layers; ++layer) {
    const auto begin = sum.begin() + static_cast<ptrdiff_t>(layer * static_cast<size_t>(groups));
    const double all = static_cast<double>(std::accumulate(begin, begin + groups, uint64_t{0}));
    const double scale = groups / all / static_cast<double>(layers);
    load.max_over_mean += static_cast<double>(*std::max_element(begin, begin + groups)) * scale;
    load.planted += static_cast<double>(begin[0]) * scale;
  }
  return load;
}

class Run {
 public:
  Run(const Settings& settings, bool adaptive) : settings_(settings) {
    config_ = OrDie(LoadModelConfig(settings.model));
    RankGroup::Options options;
    options.layout = {.tensor = 1, .data = settings.ranks};
    profiles_.resize(static_cast<size_t>(settings.ranks));
    options.make_ops = [this](int local) -> std::unique_ptr<Ops> {
      std::unique_ptr<Ops> ops = settings_.cuda ? MakeCudaOps({.device = local}) : MakeCpuOps({.threads = 1});
      auto profiled = std::make_unique<ProfiledOps>(std::move(ops));
      profiles_[static_cast<size_t>(local)] = profiled.get();
      return profiled;
    };
    if (settings.cuda && settings.ranks > 1) options.make_world = NcclWorld(settings.ranks, /*fixed_sums=*/false);
    ranks_ = OrDie(RankGroup::Create(std::move(options)));
    LoadOptions load;
    load.print_progress = false;
    load.random_seed = 7;
    load.threads = settings.cuda ? 4 : 1;
    OrDie(ranks_->Load(settings.model, config_, load));
    BalanceOptions balance;
    balance.adaptive = adaptive;
    balance.control.guards = false;
    OrDie(ExpertBalance::Check(config_, balance, settings.ranks, !settings.cuda));
    const DType act = ranks_->ops().activation_dtype();
    CacheGeometry geometry;
    geometry.pages = settings.tokens / kPageSize + 1;
    geometry.page_size = kPageSize;
    geometry.page_dtype = geometry.conv_dtype = act;
    geometry.slots = 1;
    const StepBounds bounds{.tokens = settings.tokens, .sequences = 1, .logits_rows = 1, .context = settings.tokens};
    ExecutorOptions executors;
    executors.balance = balance;
    OrDie(ranks_->MakeExecutors(bounds, geometry, executors));
  }

  // Raises the selection bias of the first rank's experts, in every layer, by `more`.
  void Plant(float more) {
    OrDie(ranks_->ForEach([&](int local) -> absl::Status {
      Ops& ops = ranks_->ops(local);
      for (const LayerWeights& layer : ranks_->loaded(local).weights.layers) {
        if (layer.moe == nullptr) continue;
        if (layer.moe->router_bias == nullptr) return absl::FailedPreconditionError("the router has no bias");
        std::vector<float> bias(static_cast<size_t>(config_.num_experts));
        auto* device = const_cast<float*>(layer.moe->router_bias);
        ops.CopyToHost(bias.data(), device, bias.size() * sizeof(float), ops.stream());
        ops.Synchronize(ops.stream());
        for (int32_t e = 0; e < config_.num_experts; ++e) {
          if (GroupOfExpert(e, config_.num_experts, settings_.ranks) == 0) bias[static_cast<size_t>(e)] += more;
        }
        ops.CopyToDevice(device, bias.data(), bias.size() * sizeof(float), ops.stream());
        ops.Synchronize(ops.stream());
      }
      return absl::OkStatus();
    }));
  }

  // A prompt on every rank, with other tokens each time, under each rank's newest epoch.
  const StepResult& Prefill() {
    StepPlan step;
    for (int32_t g = 0; g < settings_.ranks; ++g) {
      RankPlan& plan = step.ranks.emplace_back();
      plan.zero_slots = {StateSlot{0}};
      plan.page_table_stride = settings_.tokens / kPageSize + 1;
      plan.page_table.resize(static_cast<size_t>(plan.page_table_stride));
      std::iota(plan.page_table.begin(), plan.page_table.end(), 0);
      plan.token_begin = {0, settings_.tokens};
      plan.context = {0};
      plan.state_slot = {0};
      for (int32_t t = 0; t < settings_.tokens; ++t) {
        const uint32_t mixed =
            (static_cast<uint32_t>(t) + 1) * 2654435761u + 40503u * (made_ * 64u + static_cast<uint32_t>(g));
        plan.tokens.push_back(static_cast<int32_t>((mixed >> 8) % static_cast<uint32_t>(config_.vocab_size)));
        plan.sequence_of_token.push_back(0);
        plan.position.push_back(t);
      }
      plan.logits_row = {settings_.tokens - 1};
      plan.sample_rows.resize(1);
      const uint64_t newest = made_ > 0 ? result_.ranks[static_cast<size_t>(g)].routing.newest_epoch : 0;
      const int32_t slot = newest == 0 ? 0 : 1 + static_cast<int32_t>(made_ % 2);
      if (newest > 0) plan.epoch_uploads.push_back({newest, slot});
      plan.epoch_slot = {slot};
    }
    ++made_;
    OrDie(ranks_->runner().Run(step, &result_));
    for (const RankResult& rank : result_.ranks) {
      if (rank.status[0] != SampleStatus::kOk) throw std::runtime_error("a step gave non-finite logits");
      if (rank.routing.updated == 0)
        throw std::runtime_error("a prompt's step was not counted: more --tokens are needed");
    }
    return result_;
  }

  struct Figures {
    double slowest_ms = 0;  // of a step, the rank that takes longest for its experts
    double mean_ms = 0;
    double step_ms = 0;
    Load load;
    double override_share = 0;
  };
  Figures Measure() {
    for (int32_t i = 0; i < settings_.settle; ++i) Prefill();
    Figures figures;
    for (ProfiledOps* profile : profiles_) profile->Start(settings_.steps);
    for (int32_t i = 0; i < settings_.steps; ++i) {
      const StepResult& result = Prefill();
      const Load load = LoadOf(result, settings_.ranks);
      figures.load.max_over_mean += load.max_over_mean / settings_.steps;
      figures.load.planted += load.planted / settings_.steps;
      figures.override_share = result.ranks[0].routing.override_share;
      OrDie(ranks_->ForEach([&](int local) -> absl::Status {
        profiles_[static_cast<size_t>(local)]->EndStep();
        return absl::OkStatus();
      }));
    }
    for (const ProfiledOps* profile : profiles_) {
      const ProfileTable table = profile->Result();
      double ms = 0;
      for (const ProfileLine& line : table.lines) {
        if (line.name.rfind("MoeExperts", 0) == 0) ms += line.milliseconds / settings_.steps;
      }
      figures.slowest_ms = std::max(figures.slowest_ms, ms);
      figures.mean_ms += ms / settings_.ranks;
      figures.step_ms = std::max(figures.step_ms, table.milliseconds / settings_.steps);
    }
    return figures;
  }
  std::string machine() const {
    return settings_.cuda ? absl::StrCat(settings_.ranks, " x ", ranks_->ops().device_name()) : bench::CpuName();
  }

 private:
  const Settings& settings_;
  ModelConfig config_;
  std::vector<ProfiledOps*> profiles_;
  std::unique_ptr<RankGroup> ranks_;
  StepResult result_;
  uint32_t made_ = 0;
};

int Main(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--device") {
      settings.cuda = value == "cuda";
    } else if (flag == "--ranks") {
      settings.ranks = std::atoi(value.c_str());
    } else if (flag == "--model") {
      settings.model = value;
    } else if (flag == "--tokens") {
      settings.tokens = std::atoi(value.c_str());
    } else if (flag == "--skew") {
      settings.skew = std::atof(value.c_str());
    } else if (flag == "--settle") {
      settings.settle = std::atoi(value.c_str());
    } else if (flag == "--steps") {
      settings.steps = std::atoi(value.c_str());
    } else if (flag == "--json") {
      settings.json = value;
    } else {
      std::fprintf(stderr, "unknown flag %s\n", flag.c_str());
      return 2;
    }
  }
  if (settings.ranks < 2 || settings.tokens < kPageSize || settings.steps < 1 || settings.skew <= 1) {
    std::fprintf(stderr, "at least 2 ranks, %d tokens, 1 step and a skew above 1 are needed\n", kPageSize);
    return 2;
  }
  std::vector<bench::Result> results;
  const auto add = [&](const std::string& name, double value, const char* unit) {
    bench::Result result;
    result.name = absl::StrCat("skew/", settings.cuda ? "" : "virtual_", "ranks", settings.ranks, "/", name);
    result.value = value;
    result.unit = unit;
    std::printf("%-56s %12.4f %s\n", result.name.c_str(), value, unit);
    results.push_back(std::move(result));
  };
  float planted = 0;
  double slowest[2] = {};
  std::string machine;
  for (const bool adaptive : {false, true}) {
    Run run(settings, adaptive);
    machine = run.machine();
    if (!adaptive) {
      // As much as it takes for the wanted skew: routing is exact, so a step tells.
      float low = 0, high = 1;
      for (int round = 0; round < 12; ++round) {
        const float middle = (low + high) / 2;
        run.Plant(middle - planted);
        planted = middle;
        (LoadOf(run.Prefill(), settings.ranks).planted < settings.skew ? low : high) = middle;
      }
      add("planted_bias", planted, "of selection");
    } else {
      run.Plant(planted);
    }
    const Run::Figures figures = run.Measure();
    const std::string mode = adaptive ? "local_quantile" : "exact";
    add(mode + "/load_max_over_mean", figures.load.max_over_mean, "ratio");
    add(mode + "/moe_slowest_rank", figures.slowest_ms, "ms a step");
    add(mode + "/moe_mean_rank", figures.mean_ms, "ms a step");
    add(mode + "/step", figures.step_ms, "ms");
    add(mode + "/choices_changed", 100 * figures.override_share, "%");
    slowest[adaptive] = figures.slowest_ms;
  }
  add("moe_slowest_rank_saved", 100 * (1 - slowest[1] / slowest[0]), "%");
  bench::WriteResults(settings.json, results, machine, argc, argv);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  try {
    return k3::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "skew_bench: %s\n", error.what());
    return 1;
  }
}
