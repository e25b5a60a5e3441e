#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "kernels/kda_split.h"
#include "tests/bench/op_bench.h"
#include "tests/bench/op_cases.h"

namespace k3 {
namespace {

// `core`: as public chunked kernels have it and the goals count prefill, q, k and v come convolved and outputs leave
// before the gated norm. Otherwise the whole op as a layer runs it.
void Kda(Bench& bench, const std::string& name, int32_t heads, const std::vector<int32_t>& tokens, KdaGate gate,
         const char* unit, bool core = false) {
  if (!bench.Wants(name)) return;
  Ops& ops = bench.ops();
  Arena arena(ops);
  const int64_t total = std::accumulate(tokens.begin(), tokens.end(), int64_t{0}), width = int64_t{heads} * 128;
  const int64_t sequences = static_cast<int64_t>(tokens.size());
  const double state_bytes =
      static_cast<double>(sequences * heads) * (2 * 128 * 128 * 4 + (core ? 0 : 2 * 3 * 3 * 128 * 2));
  // q, k, v, decay and output, and the output gate.
  const double bytes =
      state_bytes + static_cast<double>(total * width) * (core ? 5 : 6) * 2 + static_cast<double>(total * heads) * 2;
  // Two at least, as the layer before in a model has other states.
  const int sets = std::max(2, Sets(bytes));
  const int64_t state_part = width * 128 * 4, stride = state_part + 3 * 3 * width * 2;
  void* slots = arena.Matrix(1, sets * sequences * stride / 4, 0.05f, DType::kF32).data;
  const float* taps = arena.Vector(3 * width * 4, 0.5f);
  const float* bias = arena.Vector(width);
  const float* a_log = arena.Vector(heads, 0.5f);
  const float* norm = arena.Vector(128);
  void* scratch = arena.Bytes(static_cast<int64_t>(ops.KdaScratchBytes(total, sequences, heads, 128, 4)));
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<KdaParams> params(static_cast<size_t>(sets));
  for (int i = 0; i < sets; ++i) {
    batches.push_back(std::make_unique<Batch>(arena, tokens, 0, static_cast<int32_t>(i * sequences), 64, 0));
    // Bit patterns of fp32 are no good bf16 inputs: convolution states start as zeros.
    for (int64_t s = 0; s < sequences; ++s) {
      ops.Fill(static_cast<char*>(slots) + (i * sequences + s) * stride + state_part, 0,
               static_cast<size_t>(stride - state_part), ops.stream());
    }
    KdaParams& p = params[static_cast<size_t>(i)];
    p.batch = &batches.back()->view;
    p.heads = heads;
    p.head_dim = 128;
    p.conv_width = 4;
    p.qkv = arena.Matrix(total, 3 * width);
    p.decay = arena.Matrix(total, width, 2);
    p.beta = arena.Matrix(total, heads);
    p.gate = arena.Matrix(total, width);
    p.conv_taps = core ? nullptr : taps;
    p.dt_bias = bias;
    p.a_log = a_log;
    p.norm_weight = core ? nullptr : norm;
    p.gate_kind = gate;
    p.gate_lower_bound = -5;
    p.norm_eps = 1e-5f;
    p.state = slots;
    p.conv_state = static_cast<char*>(slots) + state_part;
    p.slot_stride = stride;
    p.slots_settled = true;
    p.out = arena.Matrix(total, width);
    p.scratch = scratch;
  }
  const double seconds = bench.Time(sets, [&](int i) { ops.Kda(params[static_cast<size_t>(i)], ops.stream()); });
  bench.Report(name, seconds * (std::strcmp(unit, "ms") == 0 ? 1e3 : 1e6), unit, seconds, bytes);
}

}  // namespace

void KdaCases(Bench& bench) {
  const auto prefill = [&](const std::string& shape, int32_t heads, const std::vector<int32_t>& tokens) {
    const std::string row = "/h" + std::to_string(heads) + "/" + shape;
    Kda(bench, "kda_prefill" + row, heads, tokens, KdaGate::kBounded, "ms", true);
    Kda(bench, "kda_prefill_layer" + row, heads, tokens, KdaGate::kBounded, "ms");
  };
  for (const int32_t heads : {4, 12, 32, 96}) {
    std::printf("  segments of a layer of %d heads: %s\n", heads, KdaSegmentsText(heads).c_str());
  }
  prefill("1x2048", 32, {2048});
  prefill("1x8192", 32, {8192});
  prefill("1x32768", 32, {32768});
  prefill("8x1024", 32, std::vector<int32_t>(8, 1024));
  prefill("8x8192", 32, std::vector<int32_t>(8, 8192));
  prefill("64x128", 32, std::vector<int32_t>(64, 128));
  prefill("1x8192", 96, {8192});
  prefill("1x32768", 96, {32768});
  prefill("8x1024", 96, std::vector<int32_t>(8, 1024));
  prefill("mixed", 96, {1300, 547, 2048, 963, 271, 3063});
  prefill("1x32768", 12, {32768});
  prefill("1x32768", 4, {32768});
  for (const int32_t tokens : {8192, 32768}) {
    const std::string row = "/h32/1x" + std::to_string(tokens);
    Kda(bench, "kda_prefill_unbounded" + row, 32, {tokens}, KdaGate::kSoftplus, "ms", true);
    Kda(bench, "kda_prefill_layer_unbounded" + row, 32, {tokens}, KdaGate::kSoftplus, "ms");
  }
  for (const auto& [heads, batch] : {std::pair{32, 1}, {32, 8}, {32, 32}, {32, 64}, {32, 256}, {96, 32}, {96, 128}}) {
    Kda(bench, "kda_decode/h" + std::to_string(heads) + "/b" + std::to_string(batch), heads,
        std::vector<int32_t>(static_cast<size_t>(batch), 1), KdaGate::kBounded, "us");
  }
  Kda(bench, "kda_verify8/h32/b32", 32, std::vector<int32_t>(32, 8), KdaGate::kBounded, "us");
}

}  // namespace k3
