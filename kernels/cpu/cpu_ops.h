#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops.h"

namespace k3 {

class CpuLinearWeight final : public LinearWeight {
 public:
  explicit CpuLinearWeight(PanelMatrix matrix_in);
  PanelMatrix matrix;
};

class CpuExpertWeights final : public ExpertWeights {
 public:
  struct Expert {
    PanelMatrix w1, w3, w2;
  };
  std::vector<Expert> experts;  // [count]
};

class CpuLatentProjection final : public LatentProjection {
 public:
  std::vector<PanelMatrix> keys;    // per head: Wuk transposed, nope -> latent
  std::vector<PanelMatrix> values;  // per head: Wuv, latent -> value
};

// The reference Ops: fp32 throughout, one fixed order of summation per output element whatever the batch, the chunk,
// the thread count or the instruction set. Streams are ignored; every method has finished when it returns. Several
// objects may live in one process, each with its own threads.
class CpuOps final : public Ops {
 public:
  CpuOps(const KernelTable& kernels, int threads);
  ~CpuOps() override;

  std::string device_name() const override;
  bool is_cpu() const override { return true; }
  DType activation_dtype() const override { return DType::kF32; }
  Stream stream() const override { return nullptr; }

  void* Allocate(size_t bytes) override;
  void Free(void* data) noexcept override;
  void* AllocateHost(size_t bytes) override { return Allocate(bytes); }
  void FreeHost(void* data) noexcept override { Free(data); }
  void CopyToDevice(void* device, const void* host, size_t bytes, Stream stream) override;
  void CopyToHost(void* host, const void* device, size_t bytes, Stream stream) override;
  void CopyOnDevice(void* to, const void* from, size_t bytes, Stream stream) override;
  void Fill(void* device, uint8_t byte, size_t bytes, Stream stream) override;
  void Synchronize(Stream) override {}
  size_t TotalMemory() const override;
  size_t FreeMemory() const override;

  std::unique_ptr<LinearWeight> MakeLinear(std::span<const HostTensor> parts) override;
  std::unique_ptr<ExpertWeights> MakeExperts(int32_t first, std::span<const HostExpert> experts) override;
  std::unique_ptr<LatentProjection> MakeLatentProjection(const HostTensor& kv_b, int32_t heads, int32_t nope_dim,
                                                         int32_t value_dim) override;
  MatrixView MakeTable(const HostTensor& table) override;
  const float* MakeVector(std::span<const float> values) override;

  size_t KdaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t head_dim,
                         int32_t conv_width) const override;
  size_t MlaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t latent_dim, int32_t rope_dim,
                         int32_t nope_dim, int32_t value_dim, int64_t max_context) const override;
  size_t MoeScratchBytes(int64_t tokens, int32_t top_k, int32_t experts, int64_t in, int64_t inner) const override;
  size_t SampleScratchBytes(int64_t rows, int64_t vocab) const override;

  void BeginStep(const BeginStepParams& params, Stream stream) override;
  void Embed(const EmbedParams& params, Stream stream) override;
  void Linear(const LinearParams& params, Stream stream) override;
  void GatherRows(const GatherRowsParams& params, Stream stream) override;
  void CopyMatrix(const CopyMatrixParams& params, Stream stream) override;
  void TreeSum(const TreeSumParams& params, Stream stream) override;
  void PackSlots(const PackSlotsParams& params, Stream stream) override;
  void SumSlots(const SumSlotsParams& params, Stream stream) override;
  void RmsNorm(const RmsNormParams& params, Stream stream) override;
  void AddRmsNorm(const AddRmsNormParams& params, Stream stream) override;
  void AttnResMix(const AttnResMixParams& params, Stream stream) override;
  void AttnResClosed(const AttnResClosedParams& params, Stream stream) override;
  void Kda(const KdaParams& params, Stream stream) override;
  void MlaAppend(const MlaAppendParams& params, Stream stream) override;
  void MlaAttention(const MlaAttentionParams& params, Stream stream) override;
  void GatedActivation(const GatedActivationParams& params, Stream stream) override;
  void RouterTopK(const RouterTopKParams& params, Stream stream) override;
  void RouterSoftCap(const RouterSoftCapParams& params, Stream stream) override;
  void MoeExperts(const MoeExpertsParams& params, Stream stream) override;
  void Sample(const SampleParams& params, Stream stream) override;

 private:
  // Below this many multiply-adds (or operations of like cost) a loop runs on the calling thread: waking the others
  // would take longer.
  static constexpr int64_t kInlineWork = 40000;

  // body(task, thread) for every task, on all threads where the work is worth it.
  template <typename Body>
  void ForTasks(int64_t tasks, int64_t work_per_task, const Body& body) {
    if (tasks * work_per_task < kInlineWork) {
      for (int64_t i = 0; i < tasks; ++i) body(i, 0);
    } else {
      pool_.For(tasks, body);
    }
  }
  // body(begin, end, thread) over ranges of rows.
  template <typename Body>
  void ForRows(int64_t rows, int64_t work_per_row, const Body& body) {
    if (rows * work_per_row < kInlineWork || pool_.threads() == 1) {
      if (rows > 0) body(int64_t{0}, rows, 0);
      return;
    }
    const int64_t chunks = rows < 4 * pool_.threads() ? rows : 4 * pool_.threads();
    pool_.For(chunks, [&](int64_t i, int thread) { body(rows * i / chunks, rows * (i + 1) / chunks, thread); });
  }
  // y rows (+)= x rows times w, over all threads. Row pointers as in KernelTable::gemm, for panel 0.
  void Multiply(const PanelMatrix& w, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows,
                bool accumulate);

  // Scratch of one thread of the pool, at least `count` floats; valid until the thread asks again.
  float* ThreadFloats(int thread, int64_t count) {
    std::vector<float>& floats = thread_floats_[static_cast<size_t>(thread)];
    if (floats.size() < static_cast<size_t>(count)) floats.resize(static_cast<size_t>(count));
    return floats.data();
  }

  // Convolution taps [channels, width] as [width, channels]: made once for vectors of MakeVector, else in `scratch`.
  const float* TransposedTaps(const float* taps, int64_t channels, int width, float* scratch);

  const KernelTable& kernels_;
  ThreadPool pool_;
  std::vector<std::vector<float>> thread_floats_;  // [threads]
  std::map<const float*, std::vector<float>> transposed_taps_;
  std::vector<float> no_history_;  // zeros: convolution inputs of padding
  std::vector<float> zeros_;       // a row that a rank did not get
  std::mutex vectors_mutex_;
  std::set<const void*> vectors_;  // guarded by vectors_mutex_; what MakeVector and MakeTable allocated
};

// For tests: null where the processor lacks the instruction set. threads as in CpuOptions.
std::unique_ptr<Ops> MakeCpuOpsFor(CpuIsa isa, int threads = 0);

}  // namespace k3
