#include <cublas_v2.h>

#include <algorithm>
#include <cstdio>

#include "kernels/cuda/blas.h"
#include "kernels/cuda/weights.h"
#include "tests/bench/op_bench.h"
#include "tests/bench/op_cases.h"

namespace k3 {
namespace {

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

}  // namespace

void LinearCases(Bench& bench) {
  for (int64_t rows : {1, 16, 64}) {
    Linear(bench, rows, 12288, 7168);
    Linear(bench, rows, 12576, 2304);
  }
  LinearSmallM(bench);
}

}  // namespace k3
