#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/bench/op_bench.h"
#include "tests/bench/op_cases.h"

namespace k3 {
namespace {

void Mla(Bench& bench, const std::string& name, int32_t heads, const std::vector<int32_t>& contexts, int32_t tokens,
         const char* unit) {
  if (!bench.Wants(name)) return;
  Ops& ops = bench.ops();
  Arena arena(ops);
  const auto batch = static_cast<int32_t>(contexts.size());
  const int32_t longest = *std::max_element(contexts.begin(), contexts.end());
  double bytes = 0, pairs = 0;  // pairs of a query and a key
  int32_t pages = 0;
  for (const int32_t context : contexts) {
    bytes += (context + tokens) * 576.0 * 2;
    pairs += tokens * (context + (tokens + 1) / 2.0);
    pages += (context + tokens + 63) / 64;
  }
  const int sets = Sets(bytes);
  const MatrixView lines = arena.Matrix(int64_t{sets} * pages * 64, 576);
  HostTensor kv_b;
  kv_b.dtype = DType::kBF16;
  kv_b.shape = {heads * 256, 512};
  kv_b.random_stddev = 0.05f;
  const auto projection = ops.MakeLatentProjection(kv_b, heads, 128, 128);
  const int64_t total = int64_t{batch} * tokens;
  void* scratch =
      arena.Bytes(static_cast<int64_t>(ops.MlaScratchBytes(total, batch, heads, 512, 64, 128, 128, longest + tokens)));
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<MlaAttentionParams> params(static_cast<size_t>(sets));
  for (int i = 0; i < sets; ++i) {
    batches.push_back(
        std::make_unique<Batch>(arena, std::vector<int32_t>(contexts.size(), tokens), contexts, 0, 64, i * pages));
    MlaAttentionParams& p = params[static_cast<size_t>(i)];
    p.batch = &batches.back()->view;
    p.heads = heads;
    p.nope_dim = p.value_dim = 128;
    p.rope_dim = 64;
    p.latent_dim = 512;
    p.q = arena.Matrix(total, heads * 192);
    p.projection = projection.get();
    p.scale = 1 / std::sqrt(192.0f);
    p.pages = {lines.data, DType::kBF16, 64 * 576 * 2, 64};
    p.out = arena.Matrix(total, heads * 128);
    p.scratch = scratch;
  }
  const double seconds =
      bench.Time(sets, [&](int i) { ops.MlaAttention(params[static_cast<size_t>(i)], ops.stream()); });
  if (std::strcmp(unit, "us") == 0) {
    bench.Report(name, seconds * 1e6, unit, seconds, bytes);
  } else if (std::strcmp(unit, "TB/s") == 0) {
    bench.Report(name, bytes / seconds * 1e-12, unit, seconds, bytes);
  } else {
    // Causal attention with expanded keys (192) and values (128).
    bench.Report(name, pairs * heads * 2 * (192 + 128) / seconds * 1e-12, unit, seconds, 0);
  }
}

}  // namespace

void MlaCases(Bench& bench) {
  Mla(bench, "mla_decode/h32/b32/32768", 32, std::vector<int32_t>(32, 32767), 1, "TB/s");
  Mla(bench, "mla_decode/h32/b1/8192", 32, {8191}, 1, "us");
  Mla(bench, "mla_decode/h32/b1/131072", 32, {131071}, 1, "us");
  // Not goals: contexts of very different lengths, more sequences than splits.
  std::vector<int32_t> uneven(32, 2047);
  uneven[9] = 131071;
  Mla(bench, "mla_decode_uneven/h32/1x131072,31x2048", 32, uneven, 1, "TB/s");
  Mla(bench, "mla_decode/h32/b100/4096", 32, std::vector<int32_t>(100, 4095), 1, "TB/s");
  Mla(bench, "mla_prefill_tflops/h32/8192", 32, {0}, 8192, "TFLOP/s");
  Mla(bench, "mla_prefill_tflops/h96/8192", 96, {0}, 8192, "TFLOP/s");
}

}  // namespace k3
