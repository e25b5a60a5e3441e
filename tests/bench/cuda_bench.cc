// Times of the CUDA backend's ops at the shapes of the performance goals, under their names, beside the copy and matrix
// product ceilings of the same run. Every figure is the median of many replays of a CUDA graph that runs the op over
// several sets of random inputs, together larger than the L2 cache where the op's own data is not.
//   cuda_bench [--filter TEXT] [--json FILE]
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

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
#include <thread>
#include <vector>

#include "kernels/cuda/blas.h"
#include "kernels/cuda/convert.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/weights.h"
#include "kernels/kda_split.h"
#include "kernels/ops.h"
#include "tests/bench/device_copy.h"
#include "tests/bench/result_file.h"

namespace k3 {
namespace {

constexpr double kL2Bytes = 200e6;  // inputs in rotation exceed the cache by this much

// Device memory of one case, freed with it. Values come from the device's own generator.
class Arena {
 public:
  explicit Arena(Ops& ops) : ops_(ops), queue_(static_cast<cudaStream_t>(ops.stream())) {}
  ~Arena() {
    ops_.Synchronize(ops_.stream());
    for (void* block : blocks_) ops_.Free(block);
  }
  void* Bytes(int64_t bytes) {
    blocks_.push_back(ops_.Allocate(static_cast<size_t>(bytes)));
    return blocks_.back();
  }
  MatrixView Matrix(int64_t rows, int64_t cols, float deviation = 1, DType type = DType::kBF16) {
    void* data = Bytes(rows * cols * static_cast<int64_t>(SizeOf(type)));
    cuda::FillNormal(data, type, rows * cols, deviation, ++seed_, queue_);
    return {data, type, rows, cols, cols};
  }
  const float* Vector(int64_t count, float deviation = 1) {
    return Matrix(1, count, deviation, DType::kF32).as<const float>();
  }
  template <typename T>
  T* Array(const std::vector<T>& values) {
    auto* data = static_cast<T*>(Bytes(static_cast<int64_t>(values.size() * sizeof(T)) + 16));
    ops_.CopyToDevice(data, values.data(), values.size() * sizeof(T), ops_.stream());
    ops_.Synchronize(ops_.stream());
    return data;
  }

 private:
  Ops& ops_;
  cudaStream_t queue_;
  uint64_t seed_ = 0;
  std::vector<void*> blocks_;
};

constexpr double kGraphSeconds = 2e-3;  // a graph's start takes 3 to 6 us, which are not the kernel's
constexpr int kGraphCalls = 64;

// For seconds after large products the card's clocks stay low, which makes kernels up to a quarter slower. A row, like
// the ceilings, starts from a rested card, unless it is one of hundreds or shows what is left after a second of work.
struct Timing {
  double budget = 0.15;  // seconds, about
  bool rested = true;
  double warm = 0;  // seconds of replays before
};
constexpr Timing kOfHundreds = {.budget = 0.015, .rested = false};
constexpr Timing kSustained = {.budget = 0.15, .rested = false, .warm = 1};

class Bench {
 public:
  Bench(Ops& ops, std::string filter)
      : ops_(ops), filter_(std::move(filter)), queue_(static_cast<cudaStream_t>(ops.stream())) {
    K3_CUDA(cudaEventCreate(&begin_));
    K3_CUDA(cudaEventCreate(&end_));
  }
  ~Bench() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  Ops& ops() { return ops_; }
  bool Wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }
  const std::vector<bench::Result>& results() const { return results_; }
  double copy_speed() const { return copy_; }

  // Seconds of one call of `run`, median of the replays of a graph of many calls. The calls are run(0 .. sets - 1) in
  // turn, for kGraphSeconds or kGraphCalls, all sets once at least.
  double Time(int sets, const std::function<void(int)>& run, const Timing& timing = {}) {
    run(0);  // loads modules and chooses algorithms
    K3_CUDA(cudaStreamSynchronize(queue_));
    int calls = sets;
    cudaGraphExec_t graph = Capture(calls, sets, run);
    Replay(graph);
    double first = Replay(graph);
    const int rounds = std::min(static_cast<int>(kGraphSeconds / first), kGraphCalls / sets);
    if (rounds > 1) {
      K3_CUDA(cudaGraphExecDestroy(graph));
      calls = sets * rounds;
      graph = Capture(calls, sets, run);
      first = Replay(graph);
    }
    if (timing.rested) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      for (int i = 0; i < 5; ++i) Replay(graph);
    }
    for (double warm = 0; warm < timing.warm;) warm += Replay(graph);
    std::vector<double> times;
    const int repeats = std::clamp(static_cast<int>(timing.budget / first), 5, 60);
    for (int i = 0; i < repeats; ++i) times.push_back(Replay(graph));
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    K3_CUDA(cudaGraphExecDestroy(graph));
    if (timing.warm > 0) std::this_thread::sleep_for(std::chrono::seconds(5));  // for the next row's clocks
    return times[static_cast<size_t>(repeats / 2)] / calls;
  }

  void Ceilings() {
    {
      Arena arena(ops_);
      const int64_t bytes = int64_t{2} << 30;
      void *from = arena.Matrix(1, bytes / 2).data, *to = arena.Bytes(bytes);
      const double seconds = Time(1, [&](int) { bench::CopyByKernel(to, from, bytes, queue_); });
      copy_ = 2 * static_cast<double>(bytes) / seconds;
    }
    Arena arena(ops_);
    const int64_t n = 8192;
    HostTensor weight;
    weight.dtype = DType::kBF16;
    weight.shape = {n, n};
    weight.random_stddev = 1;
    const auto linear = ops_.MakeLinear({&weight, 1});
    const MatrixView x = arena.Matrix(n, n), y = arena.Matrix(n, n);
    const double seconds = Time(1, [&](int) { ops_.Linear({x, linear.get(), y}, ops_.stream()); });
    gemm_ = 2.0 * n * n * n / seconds;
    std::printf("copy %.2f TB/s, bf16 product 8192^3 %.0f TFLOP/s\n", copy_ * 1e-12, gemm_ * 1e-12);
    std::printf("%-36s %12s %-8s %10s\n", "name", "value", "unit", "of floor");
  }

  // A figure whose value is `value`; `floor_seconds` from bytes at the copy speed, 0 when there is none.
  void Report(const std::string& name, double value, const char* unit, double seconds, double bytes) {
    bench::Result result;
    result.name = name;
    result.value = value;
    result.unit = unit;
    if (bytes > 0) result.floor_ratio = seconds / (bytes / copy_);
    result.copy_TBps = copy_ * 1e-12;
    result.gemm_TFLOPs = gemm_ * 1e-12;
    results_.push_back(result);
    std::printf("%-36s %12.3f %-8s %10.2f\n", name.c_str(), value, unit, result.floor_ratio.value_or(0));
    std::fflush(stdout);
  }

 private:
  cudaGraphExec_t Capture(int calls, int sets, const std::function<void(int)>& run) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    K3_CUDA(cudaStreamBeginCapture(queue_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) run(i % sets);
    K3_CUDA(cudaStreamEndCapture(queue_, &graph));
    K3_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    K3_CUDA(cudaGraphDestroy(graph));
    return executable;
  }

  // Seconds.
  double Replay(cudaGraphExec_t graph) {
    K3_CUDA(cudaEventRecord(begin_, queue_));
    K3_CUDA(cudaGraphLaunch(graph, queue_));
    K3_CUDA(cudaEventRecord(end_, queue_));
    K3_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    K3_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e-3;
  }

  Ops& ops_;
  std::string filter_;
  cudaStream_t queue_;
  cudaEvent_t begin_, end_;
  double copy_ = 1, gemm_ = 1;
  std::vector<bench::Result> results_;
};

// The sequences of a step on the device, with identity pages and slots.
struct Batch {
  std::vector<int32_t> begin{0}, context;
  SequenceBatch view;

  Batch(Arena& arena, const std::vector<int32_t>& tokens, int32_t context_tokens, int32_t first_slot, int32_t page_size,
        int32_t first_page)
      : Batch(arena, tokens, std::vector<int32_t>(tokens.size(), context_tokens), first_slot, page_size, first_page) {}
  Batch(Arena& arena, const std::vector<int32_t>& tokens, const std::vector<int32_t>& contexts, int32_t first_slot,
        int32_t page_size, int32_t first_page)
      : context(contexts) {
    std::vector<int32_t> slots, sequence_of_token, position, pages;
    const int32_t pages_each = (*std::max_element(contexts.begin(), contexts.end()) +
                                *std::max_element(tokens.begin(), tokens.end()) + page_size - 1) /
                               page_size;
    for (size_t s = 0; s < tokens.size(); ++s) {
      const int32_t context_tokens = contexts[s], own_pages = (context_tokens + tokens[s] + page_size - 1) / page_size;
      begin.push_back(begin.back() + tokens[s]);
      slots.push_back(first_slot + static_cast<int32_t>(s));
      for (int32_t t = 0; t < tokens[s]; ++t) {
        sequence_of_token.push_back(static_cast<int32_t>(s));
        position.push_back(context_tokens + t);
      }
      for (int32_t p = 0; p < pages_each; ++p) pages.push_back(p < own_pages ? first_page + p : -1);
      first_page += own_pages;
    }
    view.num_tokens = begin.back();
    view.num_sequences = static_cast<int32_t>(tokens.size());
    view.token_begin = arena.Array(begin);
    view.context = arena.Array(context);
    view.state_slot = arena.Array(slots);
    view.page_table = arena.Array(pages);
    view.page_table_stride = pages_each;
    view.sequence_of_token = arena.Array(sequence_of_token);
    view.position = arena.Array(position);
    view.host_token_begin = begin.data();
    view.host_context = context.data();
  }
};

int Sets(double bytes_each) { return std::clamp(static_cast<int>(std::ceil(kL2Bytes / bytes_each)), 1, 64); }

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

void MoeCases(Bench& bench, const MoeShape& shape, const std::vector<int64_t>& batches) {
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

// Few rows against the larger projections of both models: weights at what share of the copy speed.
void Linear(Bench& bench, int64_t rows, int64_t out, int64_t in) {
  const std::string name = "linear/" + std::to_string(rows) + "x" + std::to_string(out) + "x" + std::to_string(in);
  if (!bench.Wants(name)) return;
  Ops& ops = bench.ops();
  Arena arena(ops);
  const double bytes = static_cast<double>(out * in) * 2;
  const int sets = std::min(8, Sets(bytes));
  std::vector<std::unique_ptr<LinearWeight>> weights;
  for (int i = 0; i < sets; ++i) {
    HostTensor tensor;
    tensor.dtype = DType::kBF16;
    tensor.shape = {out, in};
    tensor.random_stddev = 0.02f;
    tensor.random_seed = static_cast<uint64_t>(i);
    weights.push_back(ops.MakeLinear({&tensor, 1}));
  }
  const MatrixView x = arena.Matrix(rows, in), y = arena.Matrix(rows, out);
  const double seconds = bench.Time(sets, [&](int i) {
    ops.Linear({x, weights[static_cast<size_t>(i)].get(), y}, ops.stream());
  });
  bench.Report(name, bytes / seconds * 1e-12, "TB/s", seconds, bytes);
}

// A matrix product of a model as its layers call it, unsharded.
struct Projection {
  const char* name;
  int64_t out, in;
  bool logits = false;      // fp32 output
  bool accumulate = false;  // added to what the experts gave
  int64_t input_ld = 0;     // of an input that is some columns of a wider product; 0: `in`
};

// configs/models/kimi-linear-48b (D = 2304, 32 heads) and kimi-k3 (D = 7168, 96 heads); what reads the same input is
// one product. kda in: q, k, v, f_a, beta, then g_a or the full gate. mla in: q or q_a, kv_a, gate.
constexpr Projection kProjections[] = {
    {"kl/kda_in", 12288 + 128 + 32 + 128, 2304},
    {"kl/kda_f_b,g_b", 4096, 128, false, false, 12576},
    {"kl/kda_o,mla_o", 2304, 4096},
    {"kl/mla_in", 6144 + 576, 2304},
    {"kl/mlp_gate_up", 2 * 9216, 2304},
    {"kl/mlp_down", 2304, 9216},
    {"kl/router", 256, 2304, true},
    {"kl/shared_gate_up", 2 * 1024, 2304},
    {"kl/shared_down", 2304, 1024, false, true},
    {"kl/lm_head", 163840, 2304, true},
    {"k3/kda_in", 3 * 12288 + 128 + 96 + 12288, 7168},
    {"k3/kda_f_b", 12288, 128, false, false, 49376},
    {"k3/kda_o,mla_o", 7168, 12288},
    {"k3/mla_in", 1536 + 576 + 12288, 7168},
    {"k3/mla_q_b", 96 * 192, 1536},
    {"k3/mlp_gate_up", 2 * 33792, 7168},
    {"k3/mlp_down", 7168, 33792},
    {"k3/router", 896, 7168, true},
    {"k3/latent_down", 3584, 7168},
    {"k3/latent_up", 7168, 3584},
    {"k3/shared_gate_up", 2 * 6144, 7168},
    {"k3/shared_down", 7168, 6144, false, true},
    {"k3/lm_head", 163840, 7168, true},
};

// Speed of Linear over that of cublasGemmEx, the lowest over 1 to 16 rows and all projections; both read the same
// weights, in turn. A tenth of the usual time each, the better of two medians.
void LinearSmallM(Bench& bench) {
  const std::string name = "linear_small_m/worst";
  if (!bench.Wants(name)) return;
  Ops& ops = bench.ops();
  cudaStream_t queue = static_cast<cudaStream_t>(ops.stream());
  cublasHandle_t blas;
  cuda::Check(cublasCreate(&blas), "cublasCreate");
  cuda::Check(cublasSetStream(blas, queue), "cublasSetStream");
  double worst = 1e9;
  for (const Projection& projection : kProjections) {
    Arena arena(ops);
    constexpr int64_t kMostRows = 16;
    constexpr size_t kWorkspace = size_t{32} << 20;  // what cuBLAS takes for itself on this device
    cuda::Check(cublasSetWorkspace(blas, arena.Bytes(kWorkspace), kWorkspace), "cublasSetWorkspace");
    const int sets = Sets(static_cast<double>(projection.out * projection.in) * 2);
    std::vector<std::unique_ptr<LinearWeight>> weights;
    for (int i = 0; i < sets; ++i) {
      HostTensor tensor;
      tensor.dtype = DType::kBF16;
      tensor.shape = {projection.out, projection.in};
      tensor.random_stddev = 0.02f;
      tensor.random_seed = static_cast<uint64_t>(i);
      weights.push_back(ops.MakeLinear({&tensor, 1}));
    }
    const DType type = projection.logits ? DType::kF32 : DType::kBF16;
    const MatrixView wide = arena.Matrix(kMostRows, std::max(projection.in, projection.input_ld));
    const MatrixView all = arena.Matrix(kMostRows, projection.out, 1, type);
    double lowest = 1e9, theirs_there = 0, ours_there = 0;
    int64_t at = 0;
    for (int64_t rows = 1; rows <= kMostRows; ++rows) {
      const MatrixView x = wide.Rows(0, rows).Columns(0, projection.in), y = all.Rows(0, rows);
      const float one = 1, beta = projection.accumulate ? 1 : 0;
      double ours = 1e9, theirs = 1e9;
      for (int repeat = 0; repeat < 2; ++repeat) {
        const auto serve = [&](int i) {
          ops.Linear({x, weights[static_cast<size_t>(i)].get(), y, projection.accumulate}, ops.stream());
        };
        const auto compare = [&](int i) {
          const auto* weight = static_cast<const cuda::CudaLinear*>(weights[static_cast<size_t>(i)].get());
          cuda::Check(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(projection.out),
                                   static_cast<int>(rows), static_cast<int>(projection.in), &one, weight->data(),
                                   CUDA_R_16BF, static_cast<int>(projection.in), x.data, CUDA_R_16BF,
                                   static_cast<int>(x.ld), &beta, y.data, projection.logits ? CUDA_R_32F : CUDA_R_16BF,
                                   static_cast<int>(y.ld), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                      "cublasGemmEx");
        };
        ours = std::min(ours, bench.Time(sets, serve, kOfHundreds));
        theirs = std::min(theirs, bench.Time(sets, compare, kOfHundreds));
      }
      if (theirs / ours >= lowest) continue;
      lowest = theirs / ours;
      at = rows;
      ours_there = ours;
      theirs_there = theirs;
    }
    std::printf("  %-20s lowest at %2lld rows: %.3f (%.2f us, cuBLAS %.2f us)\n", projection.name,
                static_cast<long long>(at), lowest, ours_there * 1e6, theirs_there * 1e6);
    std::fflush(stdout);
    worst = std::min(worst, lowest);
  }
  cublasDestroy(blas);
  bench.Report(name, worst, "of cuBLAS", 0, 0);
}

int Main(int argc, char** argv) {
  std::string filter, json;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--filter") == 0) filter = argv[i + 1];
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
  }
  const std::unique_ptr<Ops> ops = MakeCudaOps();
  Bench bench(*ops, filter);
  bench.Ceilings();
  KdaCases(bench);
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
  MoeCases(bench, {"moe_bf16/kl", 256, 8, 2304, 1024, false}, {1, 8, 64, 256, 8192});
  MoeCases(bench, {"moe_mxfp4/k3ep8", 112, 16, 3584, 3072, true}, {64, 8192});
  for (int64_t rows : {1, 128, 8192}) AttnRes(bench, rows);
  if (bench.Wants("attn_res_sites")) std::printf("  %s\n", AttnResFormText().c_str());
  for (int64_t rows : {128, 256, 1024, 8192}) {
    for (int32_t closed : {4, 6, 8}) AttnResSites(bench, rows, closed);
  }
  AddRmsNorm(bench);
  for (int64_t rows : {128, 1}) Sample(bench, rows);
  for (int64_t rows : {1, 16, 64}) {
    Linear(bench, rows, 12288, 7168);
    Linear(bench, rows, 12576, 2304);
  }
  LinearSmallM(bench);
  bench::WriteResults(json, bench.results(), ops->device_name(), argc, argv);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) { return k3::Main(argc, argv); }
