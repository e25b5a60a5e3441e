// Time of every op of the CPU backend at the shapes of tiny-k3 (decode of 1 and 16 sequences, prefill of 512 tokens)
// and of one published shape where it differs in kind. Prints the best and the median time, multiply-adds counted as
// two operations, and bytes that must move at least once. The best is quoted because a step of a few microseconds is
// either disturbed by another process or it is not.
//   ops_bench [--threads N] [--scalar] [--filter TEXT] [--json FILE]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/bench/result_file.h"

namespace k3 {
namespace {

struct Workload {
  std::string name;
  double flops = 0;
  double bytes = 0;
  std::function<void()> run;
  std::shared_ptr<void> data;  // what `run` points into
};

// Buffers of one workload, freed with it.
class Arena {
 public:
  explicit Arena(Ops& ops) : ops_(ops) {}
  ~Arena() {
    for (void* p : blocks_) ops_.Free(p);
  }
  void* Bytes(size_t bytes) {
    blocks_.push_back(ops_.Allocate(bytes));
    ops_.Fill(blocks_.back(), 0, bytes, nullptr);
    return blocks_.back();
  }
  float* Floats(int64_t count, float scale = 1) {
    auto* p = static_cast<float*>(Bytes(static_cast<size_t>(count) * 4));
    std::normal_distribution<float> normal(0, scale);
    for (int64_t i = 0; i < count; ++i) p[i] = normal(engine_);
    return p;
  }
  int32_t* Ints(const std::vector<int32_t>& values) {
    auto* p = static_cast<int32_t*>(Bytes(values.size() * 4 + 4));
    std::copy(values.begin(), values.end(), p);
    return p;
  }
  MatrixView Matrix(int64_t rows, int64_t cols, float scale = 1) {
    return {Floats(rows * cols, scale), DType::kF32, rows, cols, cols};
  }
  std::mt19937& engine() { return engine_; }

 private:
  Ops& ops_;
  std::vector<void*> blocks_;
  std::mt19937 engine_{1};
};

HostTensor RandomTensor(DType dtype, std::vector<int64_t> shape, float stddev, uint64_t seed) {
  HostTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.random_stddev = stddev;
  tensor.random_seed = seed;
  return tensor;
}

std::string Text(const char* op, const std::vector<int64_t>& numbers) {
  std::string text = op;
  for (int64_t n : numbers) text += "/" + std::to_string(n);
  return text;
}

Workload Linear(Ops& ops, int64_t rows, int64_t in, int64_t out, DType dtype) {
  struct Data {
    std::unique_ptr<LinearWeight> weight;
    Arena arena;
  };
  const HostTensor w = RandomTensor(dtype, {out, in}, 0.05f, 1);
  auto data = std::make_shared<Data>(Data{ops.MakeLinear({&w, 1}), Arena(ops)});
  const LinearParams params{data->arena.Matrix(rows, in), data->weight.get(), data->arena.Matrix(rows, out), false};
  return {Text(dtype == DType::kBF16 ? "linear_bf16" : "linear_f32", {rows, in, out}), 2.0 * rows * in * out,
          static_cast<double>(data->weight->bytes) + 4.0 * rows * (in + out),
          [&ops, params] { ops.Linear(params, nullptr); }, data};
}

Workload Norm(Ops& ops, int64_t rows, int64_t cols) {
  auto data = std::make_shared<Arena>(ops);
  const RmsNormParams params{data->Matrix(rows, cols), data->Floats(cols), 1e-5f, data->Matrix(rows, cols)};
  return {Text("rms_norm", {rows, cols}), 4.0 * rows * cols, 8.0 * rows * cols,
          [&ops, params] { ops.RmsNorm(params, nullptr); }, data};
}

Workload AttnRes(Ops& ops, int live_block, int64_t rows, int64_t cols) {
  auto data = std::make_shared<Arena>(ops);
  AttnResMixParams params;
  params.bank = data->Floats((live_block + 1) * rows * cols);
  params.block_stride = rows * cols;
  params.live_block = live_block;
  params.rows = rows;
  params.cols = cols;
  params.delta = data->Matrix(rows, cols, 0);
  params.query = data->Floats(cols, 0.1f);
  params.mix_eps = params.norm_eps = 1e-5f;
  params.norm_weight = data->Floats(cols);
  params.out = data->Matrix(rows, cols);
  return {Text("attn_res", {live_block + 1, rows, cols}), 6.0 * (live_block + 1) * rows * cols,
          4.0 * (live_block + 4) * rows * cols, [&ops, params] { ops.AttnResMix(params, nullptr); }, data};
}

Workload Activation(Ops& ops, int64_t rows, int64_t width) {
  auto data = std::make_shared<Arena>(ops);
  const GatedActivationParams params{
      data->Matrix(rows, 2 * width), {Activation::kSitu, 4, 25}, data->Matrix(rows, width)};
  return {Text("situ", {rows, width}), 60.0 * rows * width, 12.0 * rows * width,
          [&ops, params] { ops.GatedActivation(params, nullptr); }, data};
}

Workload Router(Ops& ops, int64_t tokens, int32_t experts, int32_t top_k) {
  auto data = std::make_shared<Arena>(ops);
  RouterTopKParams params;
  params.logits = data->Floats(tokens * experts);
  params.tokens = tokens;
  params.experts = experts;
  params.top_k = top_k;
  params.bias = data->Floats(experts, 0.1f);
  params.ids = data->Ints(std::vector<int32_t>(static_cast<size_t>(tokens * top_k)));
  params.weights = data->Floats(tokens * top_k);
  return {Text("router", {tokens, experts, top_k}), 20.0 * tokens * experts, 4.0 * tokens * experts,
          [&ops, params] { ops.RouterTopK(params, nullptr); }, data};
}

Workload Moe(Ops& ops, int64_t tokens, int32_t experts, int32_t top_k, int64_t in, int64_t inner) {
  struct Data {
    std::unique_ptr<ExpertWeights> weights;
    Arena arena;
  };
  std::vector<HostExpert> host(static_cast<size_t>(experts));
  for (size_t e = 0; e < host.size(); ++e) {
    const auto make = [&](HostTensor& w, HostTensor& scale, int64_t rows, int64_t cols, uint64_t part) {
      w = RandomTensor(DType::kU8, {rows, cols / 2}, 0.08f, 3 * e + part);
      scale = RandomTensor(DType::kU8, {rows, cols / 32}, 0.08f, 3 * e + part);
    };
    make(host[e].w1, host[e].w1_scale, inner, in, 0);
    make(host[e].w3, host[e].w3_scale, inner, in, 1);
    make(host[e].w2, host[e].w2_scale, in, inner, 2);
  }
  auto data = std::make_shared<Data>(Data{ops.MakeExperts(0, host), Arena(ops)});
  std::vector<int32_t> ids, all(static_cast<size_t>(experts));
  std::iota(all.begin(), all.end(), 0);
  std::vector<bool> hit(static_cast<size_t>(experts));
  for (int64_t t = 0; t < tokens; ++t) {
    std::shuffle(all.begin(), all.end(), data->arena.engine());
    std::sort(all.begin(), all.begin() + top_k);
    for (int32_t j = 0; j < top_k; ++j) {
      ids.push_back(all[static_cast<size_t>(j)]);
      hit[static_cast<size_t>(all[static_cast<size_t>(j)])] = true;
    }
  }
  MoeExpertsParams params;
  params.x = data->arena.Matrix(tokens, in);
  params.ids = data->arena.Ints(ids);
  params.weights = data->arena.Floats(tokens * top_k);
  params.top_k = top_k;
  params.experts = data->weights.get();
  params.activation = {Activation::kSitu, 4, 25};
  params.out = data->arena.Matrix(tokens, in);
  params.scratch = data->arena.Bytes(ops.MoeScratchBytes(tokens, top_k, experts, in, inner));
  const double hits = static_cast<double>(std::count(hit.begin(), hit.end(), true));
  return {Text("moe_mxfp4", {tokens, experts, top_k, in, inner}), 6.0 * tokens * top_k * in * inner,
          hits * static_cast<double>(data->weights->bytes) / experts + 8.0 * tokens * in,
          [&ops, params] { ops.MoeExperts(params, nullptr); }, data};
}

// One step of `sequences` sequences of `tokens` tokens each.
struct Batch {
  Batch(Arena& arena, int32_t sequences, int32_t tokens, int32_t context, int32_t page_size) {
    std::vector<int32_t> begin{0}, contexts, slots, pages, sequence, position;
    const int32_t stride = (context + tokens + page_size - 1) / page_size;
    for (int32_t s = 0; s < sequences; ++s) {
      begin.push_back((s + 1) * tokens);
      contexts.push_back(context);
      slots.push_back(s);
      for (int32_t p = 0; p < stride; ++p) pages.push_back(s * stride + p);
      for (int32_t t = 0; t < tokens; ++t) {
        sequence.push_back(s);
        position.push_back(context + t);
      }
    }
    batch.num_tokens = sequences * tokens;
    batch.num_sequences = sequences;
    batch.token_begin = batch.host_token_begin = arena.Ints(begin);
    batch.context = batch.host_context = arena.Ints(contexts);
    batch.state_slot = arena.Ints(slots);
    batch.page_table = arena.Ints(pages);
    batch.page_table_stride = stride;
    batch.sequence_of_token = arena.Ints(sequence);
    batch.position = arena.Ints(position);
  }
  SequenceBatch batch;
};

Workload Kda(Ops& ops, int32_t sequences, int32_t tokens, int32_t heads, int32_t d) {
  struct Data {
    explicit Data(Ops& ops) : arena(ops) {}
    Arena arena;
    SequenceBatch batch;
  };
  auto data = std::make_shared<Data>(ops);
  Arena& arena = data->arena;
  data->batch = Batch(arena, sequences, tokens, 0, 64).batch;
  const int64_t t = int64_t{sequences} * tokens, width = int64_t{heads} * d;
  KdaParams params;
  params.batch = &data->batch;
  params.heads = heads;
  params.head_dim = d;
  params.conv_width = 4;
  params.qkv = arena.Matrix(t, 3 * width);
  params.decay = arena.Matrix(t, width);
  params.beta = arena.Matrix(t, heads);
  params.gate = arena.Matrix(t, width);
  const std::vector<float> taps(static_cast<size_t>(3 * width * 4), 0.25f);
  params.conv_taps = ops.MakeVector(taps);
  params.dt_bias = arena.Floats(width);
  params.a_log = arena.Floats(heads, 0.1f);
  params.norm_weight = arena.Floats(d);
  params.gate_lower_bound = -5;
  params.norm_eps = 1e-5f;
  const int64_t conv_offset = width * d * 4;
  params.slot_stride = conv_offset + 3 * 3 * width * 4;
  params.state = arena.Bytes(static_cast<size_t>(sequences * params.slot_stride));
  params.conv_state = static_cast<char*>(params.state) + conv_offset;
  params.out = arena.Matrix(t, width);
  params.scratch = arena.Bytes(ops.KdaScratchBytes(t, sequences, heads, d, 4));
  return {Text("kda", {sequences, tokens, heads, d}), 9.0 * t * width * d,
          8.0 * sequences * width * d + 4.0 * t * width * 6, [&ops, params] { ops.Kda(params, nullptr); }, data};
}

Workload Mla(Ops& ops, int32_t sequences, int32_t tokens, int32_t context, int32_t heads) {
  struct Data {
    explicit Data(Ops& ops) : arena(ops) {}
    Arena arena;
    SequenceBatch batch;
    std::unique_ptr<LatentProjection> projection;
  };
  auto data = std::make_shared<Data>(ops);
  Arena& arena = data->arena;
  const int32_t nope = 128, rope = 64, latent = 512, value = 128;
  data->batch = Batch(arena, sequences, tokens, context, 64).batch;
  data->projection = ops.MakeLatentProjection(RandomTensor(DType::kBF16, {heads * (nope + value), latent}, 0.05f, 9),
                                              heads, nope, value);
  const int64_t t = int64_t{sequences} * tokens;
  MlaAttentionParams params;
  params.batch = &data->batch;
  params.heads = heads;
  params.nope_dim = nope;
  params.rope_dim = rope;
  params.latent_dim = latent;
  params.value_dim = value;
  params.q = arena.Matrix(t, heads * (nope + rope));
  params.projection = data->projection.get();
  params.gate = arena.Matrix(t, heads * value);
  params.scale = 0.0722f;
  params.pages = {arena.Floats(sequences * data->batch.page_table_stride * 64 * (latent + rope)), DType::kF32,
                  64 * (latent + rope) * 4, 64};
  params.out = arena.Matrix(t, heads * value);
  params.scratch = arena.Bytes(ops.MlaScratchBytes(t, sequences, heads, latent, rope, nope, value, context + tokens));
  const double keys = static_cast<double>(context) + (tokens + 1) / 2.0;
  return {Text("mla", {sequences, tokens, context, heads}),
          2.0 * t * heads * (keys * (2 * latent + rope) + 256.0 * latent),
          4.0 * sequences * (context + tokens) * (latent + rope) + static_cast<double>(data->projection->bytes),
          [&ops, params] { ops.MlaAttention(params, nullptr); }, data};
}

Workload Sample(Ops& ops, int64_t rows, int64_t vocab, float temperature, float top_p) {
  auto data = std::make_shared<Arena>(ops);
  SampleParams params;
  params.logits = data->Matrix(rows, vocab, 3);
  auto* row = static_cast<SampleRow*>(data->Bytes(static_cast<size_t>(rows) * sizeof(SampleRow)));
  for (int64_t r = 0; r < rows; ++r) {
    row[r] = SampleRow{};
    row[r].temperature = temperature;
    row[r].top_p = top_p;
    row[r].uniform = 0.5f;
  }
  params.rows = row;
  params.token = data->Ints(std::vector<int32_t>(static_cast<size_t>(rows)));
  params.status = data->Ints(std::vector<int32_t>(static_cast<size_t>(rows)));
  params.logprob = data->Floats(rows);
  params.scratch = data->Bytes(ops.SampleScratchBytes(rows, vocab));
  return {Text(temperature == 0 ? "sample_greedy"
               : top_p < 1      ? "sample_top_p"
                                : "sample",
               {rows, vocab}),
          20.0 * rows * vocab, 4.0 * rows * vocab, [&ops, params] { ops.Sample(params, nullptr); }, data};
}

std::vector<std::function<Workload(Ops&)>> Workloads() {
  std::vector<std::function<Workload(Ops&)>> list;
  const auto add = [&](auto make) { list.push_back(make); };
  for (int64_t rows : {1, 16, 512}) {
    // tiny-k3: KDA input, low-rank decay, output, dense MLP, router, logits.
    add([=](Ops& ops) { return Linear(ops, rows, 256, 1154, DType::kBF16); });
    add([=](Ops& ops) { return Linear(ops, rows, 128, 256, DType::kBF16); });
    add([=](Ops& ops) { return Linear(ops, rows, 256, 256, DType::kBF16); });
    add([=](Ops& ops) { return Linear(ops, rows, 1024, 256, DType::kBF16); });
    add([=](Ops& ops) { return Linear(ops, rows, 256, 32, DType::kBF16); });
    add([=](Ops& ops) { return Linear(ops, rows, 256, 4096, DType::kBF16); });
  }
  add([](Ops& ops) { return Linear(ops, 1, 2304, 9216, DType::kBF16); });
  add([](Ops& ops) { return Linear(ops, 64, 2304, 9216, DType::kBF16); });
  add([](Ops& ops) { return Linear(ops, 64, 1024, 1024, DType::kF32); });
  for (int64_t rows : {1, 16, 512}) {
    add([=](Ops& ops) { return Norm(ops, rows, 256); });
    add([=](Ops& ops) { return AttnRes(ops, 2, rows, 256); });
    add([=](Ops& ops) { return Activation(ops, rows, 256); });
    add([=](Ops& ops) { return Router(ops, rows, 32, 4); });
    add([=](Ops& ops) { return Moe(ops, rows, 32, 4, 128, 128); });
  }
  add([](Ops& ops) { return Router(ops, 16, 896, 16); });
  add([](Ops& ops) { return AttnRes(ops, 8, 16, 7168); });
  add([](Ops& ops) { return Kda(ops, 1, 1, 2, 128); });
  add([](Ops& ops) { return Kda(ops, 16, 1, 2, 128); });
  add([](Ops& ops) { return Kda(ops, 1, 512, 2, 128); });
  add([](Ops& ops) { return Mla(ops, 1, 1, 500, 2); });
  add([](Ops& ops) { return Mla(ops, 16, 1, 500, 2); });
  add([](Ops& ops) { return Mla(ops, 1, 512, 0, 2); });
  add([](Ops& ops) { return Mla(ops, 1, 1, 16000, 2); });
  for (int64_t rows : {1, 16}) {
    add([=](Ops& ops) { return Sample(ops, rows, 4096, 0, 1); });
    add([=](Ops& ops) { return Sample(ops, rows, 4096, 1, 1); });
    add([=](Ops& ops) { return Sample(ops, rows, 4096, 1, 0.95f); });
  }
  add([](Ops& ops) { return Sample(ops, 1, 163840, 1, 0.95f); });
  return list;
}

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int Main(int argc, char** argv) {
  CpuOptions options;
  std::string filter, json;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--scalar") == 0) options.force_scalar = true;
    if (i + 1 == argc) break;
    if (std::strcmp(argv[i], "--threads") == 0) options.threads = std::stoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--filter") == 0) filter = argv[i + 1];
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
  }
  const std::unique_ptr<Ops> ops = MakeCpuOps(options);
  std::printf("%s; %s\n%-32s %10s %10s %10s %10s\n", bench::CpuName().c_str(), ops->device_name().c_str(), "op",
              "best us", "median us", "GFLOP/s", "GB/s");
  std::vector<bench::Result> results;
  for (const auto& make : Workloads()) {
    const Workload w = make(*ops);
    if (w.name.find(filter) == std::string::npos) continue;
    for (int i = 0; i < 3; ++i) w.run();
    std::vector<double> seconds;
    const double end = Now() + 0.25;
    while (seconds.size() < 20 || Now() < end) {
      const double begin = Now();
      w.run();
      seconds.push_back(Now() - begin);
      if (seconds.size() >= 20000) break;
    }
    std::sort(seconds.begin(), seconds.end());
    const double best = seconds.front();
    std::printf("%-32s %10.2f %10.2f %10.1f %10.1f\n", w.name.c_str(), best * 1e6, seconds[seconds.size() / 2] * 1e6,
                w.flops / best * 1e-9, w.bytes / best * 1e-9);
    results.push_back({std::string("cpu/op/").append(w.name), best * 1e6, "us", {}, {}, {}});
  }
  bench::WriteResults(json, results, bench::CpuName(), argc, argv);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) { return k3::Main(argc, argv); }
