#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <utility>

#include "tests/bench/op_bench.h"
#include "tests/bench/op_cases.h"

namespace k3 {
namespace {

std::vector<int32_t> RandomPicks(int64_t tokens, int32_t experts, int32_t top_k, std::mt19937& engine) {
  std::vector<int32_t> all(static_cast<size_t>(experts)), ids;
  std::iota(all.begin(), all.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int32_t j = 0; j < top_k; ++j) {
      std::swap(all[static_cast<size_t>(j)],
                all[static_cast<size_t>(std::uniform_int_distribution<int32_t>(j, experts - 1)(engine))]);
    }
    std::vector<int32_t> picks(all.begin(), all.begin() + top_k);
    std::sort(picks.begin(), picks.end());
    ids.insert(ids.end(), picks.begin(), picks.end());
  }
  return ids;
}

struct MoeShape {
  const char* name;
  int32_t experts, top_k;
  int64_t in, inner;
  bool packed;
};

void Moe(Bench& bench, const MoeShape& shape, const std::vector<int64_t>& batches) {
  const auto name_of = [&](int64_t tokens) { return std::string(shape.name) + "/" + std::to_string(tokens); };
  if (std::none_of(batches.begin(), batches.end(), [&](int64_t tokens) { return bench.Wants(name_of(tokens)); }))
    return;
  Ops& ops = bench.ops();
  std::vector<HostExpert> host(static_cast<size_t>(shape.experts));
  uint64_t seed = 0;
  for (HostExpert& expert : host) {
    const auto fill = [&](HostTensor& w, HostTensor& scale, int64_t rows, int64_t cols) {
      w.random_seed = scale.random_seed = ++seed;
      w.random_stddev = scale.random_stddev = 0.02f;
      w.dtype = shape.packed ? DType::kU8 : DType::kBF16;
      w.shape = {rows, shape.packed ? cols / 2 : cols};
      if (!shape.packed) return;
      scale.dtype = DType::kU8;
      scale.shape = {rows, cols / 32};
    };
    fill(expert.w1, expert.w1_scale, shape.inner, shape.in);
    fill(expert.w3, expert.w3_scale, shape.inner, shape.in);
    fill(expert.w2, expert.w2_scale, shape.in, shape.inner);
  }
  const auto experts = ops.MakeExperts(0, host);
  for (int64_t tokens : batches) {
    const std::string name = name_of(tokens);
    if (!bench.Wants(name)) continue;
    Arena arena(ops);
    std::mt19937 engine(static_cast<uint32_t>(tokens));
    const int sets = tokens <= 256 ? 8 : 1;
    void* scratch = arena.Bytes(
        static_cast<int64_t>(ops.MoeScratchBytes(tokens, shape.top_k, shape.experts, shape.in, shape.inner)));
    std::vector<MoeExpertsParams> params(static_cast<size_t>(sets));
    double hit = 0;
    for (MoeExpertsParams& p : params) {
      const std::vector<int32_t> ids = RandomPicks(tokens, shape.experts, shape.top_k, engine);
      std::vector<char> seen(static_cast<size_t>(shape.experts));
      for (int32_t id : ids) seen[static_cast<size_t>(id)] = 1;
      hit += static_cast<double>(std::count(seen.begin(), seen.end(), 1)) / sets;
      p.x = arena.Matrix(tokens, shape.in);
      p.ids = arena.Array(ids);
      p.weights = arena.Array(std::vector<float>(ids.size(), 0.125f));
      p.top_k = shape.top_k;
      p.experts = experts.get();
      p.activation =
          shape.packed ? ActivationSpec{Activation::kSitu, 4, 25} : ActivationSpec{Activation::kSwiglu, 1, 0};
      p.out = arena.Matrix(tokens, shape.in);
      p.scratch = scratch;
    }
    const auto run = [&](int i) { ops.MoeExperts(params[static_cast<size_t>(i)], ops.stream()); };
    const double seconds = bench.Time(sets, run);
    const double bytes = hit * static_cast<double>(experts->bytes) / shape.experts;
    const double flops = static_cast<double>(tokens * shape.top_k * shape.in * shape.inner) * 6;
    if (shape.packed) {
      tokens <= 256 ? bench.Report(name, bytes / seconds * 1e-12, "TB/s", seconds, bytes)
                    : bench.Report(name, flops / seconds * 1e-12, "TFLOP/s", seconds, 0);
    } else {
      bench.Report(name, seconds * (tokens <= 256 ? 1e6 : 1e3), tokens <= 256 ? "us" : "ms", seconds,
                   tokens <= 256 ? bytes : 0);
      if (tokens > 256) {
        const double sustained = bench.Time(sets, run, kSustained);
        bench.Report(name + "/sustained", sustained * 1e3, "ms", sustained, 0);
      }
    }
    std::printf("  %.1f experts hit, %.0f TFLOP/s\n", hit, flops / seconds * 1e-12);
  }
}

}  // namespace

void MoeCases(Bench& bench) {
  Moe(bench, {"moe_bf16/kl", 256, 8, 2304, 1024, false}, {1, 8, 64, 256, 8192});
  Moe(bench, {"moe_mxfp4/k3ep8", 112, 16, 3584, 3072, true}, {64, 8192});
}

}  // namespace k3
