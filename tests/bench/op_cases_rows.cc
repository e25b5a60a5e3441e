#include <algorithm>
#include <cstdio>
#include <random>

#include "tests/bench/op_bench.h"
#include "tests/bench/op_cases.h"

namespace k3 {
namespace {

void AttnRes(Bench& bench, int64_t rows) {
  const std::string name = "attn_res/9x7168/" + std::to_string(rows);
  if (!bench.Wants(name)) return;
  Ops& ops = bench.ops();
  Arena arena(ops);
  const int64_t cols = 7168, sources = 9;
  const double bytes = static_cast<double>(rows * cols) * 2 * (sources + 1);
  const int sets = Sets(bytes);
  std::vector<AttnResMixParams> params(static_cast<size_t>(sets));
  const float *query = arena.Vector(cols, 0.02f), *norm = arena.Vector(cols);
  for (AttnResMixParams& p : params) {
    p.bank = arena.Matrix(sources * rows, cols).data;
    p.block_stride = rows * cols;
    p.live_block = static_cast<int32_t>(sources) - 1;
    p.rows = rows;
    p.cols = cols;
    p.query = query;
    p.mix_eps = p.norm_eps = 1e-5f;
    p.norm_weight = norm;
    p.out = arena.Matrix(rows, cols);
  }
  const double seconds = bench.Time(sets, [&](int i) { ops.AttnResMix(params[static_cast<size_t>(i)], ops.stream()); });
  bench.Report(name, seconds * 1e6, "us", seconds, bytes);
}

// Eight sites of one closed set, delta and norm included, in the form that is chosen; both forms are printed. Between
// two sites of a set the others' data are touched, as a model's sublayers would.
void AttnResSites(Bench& bench, int64_t rows, int32_t closed) {
  const std::string name = "attn_res_sites/8x" + std::to_string(closed) + "x7168/" + std::to_string(rows);
  if (!bench.Wants(name)) return;
  Ops& ops = bench.ops();
  Arena arena(ops);
  const int64_t cols = 7168, each = rows * cols;
  const int sets = Sets(static_cast<double>(each) * 2 * (closed + 1));
  std::vector<AttnResClosedParams> groups(static_cast<size_t>(sets));
  std::vector<AttnResMixParams> sites(static_cast<size_t>(sets));
  const float* norm = arena.Vector(cols);
  const MatrixView out = arena.Matrix(rows, cols);
  std::vector<const float*> queries;
  for (int i = 0; i < kAttnResSites; ++i) queries.push_back(arena.Vector(cols, 0.02f));
  for (int i = 0; i < sets; ++i) {
    AttnResClosedParams& group = groups[static_cast<size_t>(i)];
    void* bank = arena.Matrix((closed + 1) * rows, cols).data;
    group.bank = bank;
    group.block_stride = each;
    group.closed = closed;
    group.rows = rows;
    group.cols = cols;
    group.sites = kAttnResSites;
    std::copy(queries.begin(), queries.end(), group.queries);
    group.mix_eps = 1e-5f;
    group.mixes = arena.Bytes(static_cast<int64_t>(AttnResMixesBytes(rows, cols, DType::kBF16)));
    AttnResMixParams& site = sites[static_cast<size_t>(i)];
    site.bank = bank;
    site.block_stride = each;
    site.live_block = closed;
    site.rows = rows;
    site.cols = cols;
    site.delta = arena.Matrix(rows, cols, 1e-2f);
    site.mix_eps = site.norm_eps = 1e-5f;
    site.norm_weight = norm;
    site.out = out;
  }
  const auto mix = [&](int i, bool two_phases) {
    AttnResMixParams site = sites[static_cast<size_t>(i % sets)];
    site.site = i / sets;
    site.query = queries[static_cast<size_t>(site.site)];
    if (two_phases) site.mixes = groups[static_cast<size_t>(i % sets)].mixes;
    site.mixes_settled = i > 0;
    ops.AttnResMix(site, ops.stream());
  };
  constexpr Timing kManyRows = {.budget = 0.09, .rested = false};  // two dozen of these, without a rest before each
  const auto one_pass = [&](int i) { mix(i, false); };
  const double one = kAttnResSites * bench.Time(kAttnResSites * sets, one_pass, kManyRows);
  const auto phases = [&](int i) {
    if (i < sets) return ops.AttnResClosed(groups[static_cast<size_t>(i)], ops.stream());
    mix(i - sets, true);
  };
  const double two = (1 + kAttnResSites) * bench.Time((1 + kAttnResSites) * sets, phases, kManyRows);
  const bool chosen = ops.ChooseAttnResForm(rows, cols, closed, kAttnResSites) == AttnResForm::kTwoPhases;
  std::printf("  %-40s one pass %.1f us, two phases %.1f us\n", name.c_str(), one * 1e6, two * 1e6);
  const int vectors = chosen ? closed + kAttnResSites + kAttnResSites * 5 : kAttnResSites * (closed + 4);
  bench.Report(name, (chosen ? two : one) * 1e6, "us", chosen ? two : one, static_cast<double>(each) * 2 * vectors);
}

void AddRmsNorm(Bench& bench) {
  const std::string name = "add_rmsnorm/8192x7168";
  if (!bench.Wants(name)) return;
  Ops& ops = bench.ops();
  Arena arena(ops);
  const int64_t rows = 8192, cols = 7168;
  const float* weight = arena.Vector(cols);
  const MatrixView stream = arena.Matrix(rows, cols), delta = arena.Matrix(rows, cols, 1e-3f),
                   out = arena.Matrix(rows, cols);
  const double bytes = static_cast<double>(rows * cols) * 2 * 4;
  const double seconds = bench.Time(1, [&](int) { ops.AddRmsNorm({stream, delta, weight, 1e-5f, out}, ops.stream()); });
  bench.Report(name, bytes / seconds * 1e-12, "TB/s", seconds, bytes);
}

void Sample(Bench& bench, int64_t rows) {
  const std::string name = "sample_topk_topp/163840/b" + std::to_string(rows);
  if (!bench.Wants(name)) return;
  Ops& ops = bench.ops();
  Arena arena(ops);
  const int64_t vocab = 163840;
  const double bytes = static_cast<double>(rows * vocab) * 4;
  const int sets = Sets(bytes);
  std::mt19937 engine(1);
  std::vector<SampleRow> host(static_cast<size_t>(rows));
  for (SampleRow& row : host) {
    row.temperature = 0.8f;
    row.top_k = 50;
    row.top_p = 0.95f;
    row.uniform = std::uniform_real_distribution<float>(0, 0.999f)(engine);
  }
  std::vector<SampleParams> params(static_cast<size_t>(sets));
  for (SampleParams& p : params) {
    p.logits = arena.Matrix(rows, vocab, 3, DType::kF32);
    p.rows = arena.Array(host);
    p.token = static_cast<int32_t*>(arena.Bytes(rows * 4));
    p.status = static_cast<int32_t*>(arena.Bytes(rows * 4));
    p.logprob = static_cast<float*>(arena.Bytes(rows * 4));
    p.scratch = arena.Bytes(static_cast<int64_t>(ops.SampleScratchBytes(rows, vocab)));
  }
  const double seconds = bench.Time(sets, [&](int i) { ops.Sample(params[static_cast<size_t>(i)], ops.stream()); });
  bench.Report(name, seconds * 1e6, "us", seconds, bytes);
}

}  // namespace

void AttnResCases(Bench& bench) {
  for (int64_t rows : {1, 128, 8192}) AttnRes(bench, rows);
  if (bench.Wants("attn_res_sites")) std::printf("  %s\n", AttnResFormText().c_str());
  for (int64_t rows : {128, 256, 1024, 8192}) {
    for (int32_t closed : {4, 6, 8}) AttnResSites(bench, rows, closed);
  }
}

void NormCases(Bench& bench) { AddRmsNorm(bench); }

void SampleCases(Bench& bench) {
  for (int64_t rows : {128, 1}) Sample(bench, rows);
}

}  // namespace k3
