#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/core/mxfp8.h"
#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {
namespace {

constexpr int64_t kRowBlock = 48;      // picks of one expert that a task handles together
constexpr int64_t kPanelsPerTask = 4;  // 128 outputs: the widest tile of a single row

// A pick is one (token, j) that chose an expert of this rank. Picks of one expert lie together, in token order.
struct Block {
  int32_t expert;  // local index
  int32_t begin;   // picks [begin, begin + count)
  int32_t count;
};

// One function lays out the scratch and thereby says its size. `picks` is the most that can occur.
struct MoeScratch {
  int32_t* expert_begin;  // [experts + 1] first pick of each local expert
  int32_t* token;         // [picks] token of each pick
  int32_t* slot;          // [tokens * top_k] pick of (token, j), -1 where the expert is not local
  Block* blocks;          // [picks]
  float* inner;           // [picks, inner] up products, then activations
  float* gate;            // [picks, inner] gate products
  float* out;             // [picks, in] expert outputs
  size_t bytes;

  MoeScratch(void* base, int64_t picks, int64_t experts, int64_t in, int64_t inner_width) {
    size_t offset = 0;
    const auto take = [&](auto*& pointer, int64_t count) {
      using T = std::remove_reference_t<decltype(*pointer)>;
      pointer = base != nullptr ? reinterpret_cast<T*>(static_cast<char*>(base) + offset) : nullptr;
      offset += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    };
    take(expert_begin, experts + 1);
    take(token, picks);
    take(slot, picks);
    take(blocks, picks);
    take(inner, picks * inner_width);
    take(gate, picks * inner_width);
    take(out, picks * in);
    bytes = offset;
  }
};

// Fills token, slot and blocks; returns the number of blocks.
int64_t SortPicks(const MoeExpertsParams& p, int64_t tokens, const MoeScratch& s) {
  const int32_t first = p.experts->first, count = p.experts->count;
  std::fill_n(s.expert_begin, count + 1, 0);
  for (int64_t i = 0; i < tokens * p.top_k; ++i) {
    const int32_t e = p.ids[i] - first;
    if (e >= 0 && e < count) ++s.expert_begin[e + 1];
  }
  for (int32_t e = 0; e < count; ++e) s.expert_begin[e + 1] += s.expert_begin[e];
  int64_t blocks = 0;
  for (int32_t e = 0; e < count; ++e) {
    const int32_t begin = s.expert_begin[e], end = s.expert_begin[e + 1];
    for (int32_t b = begin; b < end; b += kRowBlock) {
      s.blocks[blocks++] = {e, b, std::min<int32_t>(kRowBlock, end - b)};
    }
  }
  // From here on expert_begin[e] is the next free pick of expert e.
  for (int64_t i = 0; i < tokens * p.top_k; ++i) {
    const int32_t e = p.ids[i] - first;
    s.slot[i] = -1;
    if (e < 0 || e >= count) continue;
    s.slot[i] = s.expert_begin[e]++;
    s.token[s.slot[i]] = static_cast<int32_t>(i / p.top_k);
  }
  return blocks;
}

int64_t TasksPerBlock(const PanelMatrix& w) { return (w.panels() + kPanelsPerTask - 1) / kPanelsPerTask; }

}  // namespace

size_t CpuOps::MoeScratchBytes(int64_t tokens, int32_t top_k, int32_t experts, int64_t in, int64_t inner) const {
  return MoeScratch(nullptr, tokens * top_k, experts, in, inner).bytes;
}

void CpuOps::MoeExperts(const MoeExpertsParams& p, Stream) {
  CheckPointer("MoeExperts", "experts", p.experts);
  const auto& weights = static_cast<const CpuExpertWeights&>(*p.experts);
  const int64_t tokens = p.x.rows, in = weights.in, inner = weights.inner;
  if (weights.count > 0) CheckMatrix("MoeExperts", "x", p.x, tokens, in, DType::kF32);
  CheckMatrix("MoeExperts", "out", p.out, tokens, p.x.cols, DType::kF32);
  CheckTrue(p.top_k > 0, "MoeExperts", "top_k must be positive, got " + std::to_string(p.top_k));
  if (tokens == 0) return;
  CheckPointer("MoeExperts", "ids", p.ids);
  CheckPointer("MoeExperts", "weights", p.weights);
  CheckPointer("MoeExperts", "scratch", p.scratch);

  CheckTrue(
      !p.mxfp8_inputs || (in % kMxfp8Group == 0 && inner % kMxfp8Group == 0), "MoeExperts",
      "MXFP8 inputs need widths that are multiples of 32, got " + std::to_string(in) + " and " + std::to_string(inner));

  const MoeScratch s(p.scratch, tokens * p.top_k, weights.count, in, inner);
  const int64_t blocks = SortPicks(p, tokens, s);
  if (blocks > 0) {
    MatrixView inputs = p.x;
    if (p.mxfp8_inputs) {
      // Where the experts' outputs will be.
      inputs.data = s.out;
      inputs.ld = in;
      ForRows(tokens, in * 8, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
          std::memcpy(s.out + t * in, p.x.as<float>() + t * p.x.ld, static_cast<size_t>(in) * sizeof(float));
          for (int64_t c = 0; c < in; c += kMxfp8Group) RoundToMxfp8(s.out + t * in + c);
        }
      });
    }
    const int64_t work = std::min(kRowBlock, tokens * p.top_k / blocks) * kPanelsPerTask * PanelMatrix::kWidth;
    const int64_t up_tasks = TasksPerBlock(weights.experts[0].w1);
    ForTasks(blocks * up_tasks, work * in * 2, [&](int64_t task, int) {
      const Block& block = s.blocks[task / up_tasks];
      const CpuExpertWeights::Expert& expert = weights.experts[static_cast<size_t>(block.expert)];
      const int64_t panel_begin = task % up_tasks * kPanelsPerTask;
      const int64_t panel_end = std::min(expert.w1.panels(), panel_begin + kPanelsPerTask);
      const int64_t column = panel_begin * PanelMatrix::kWidth;
      const int64_t width = std::min(inner - column, kPanelsPerTask * PanelMatrix::kWidth);
      const float* x[kRowBlock];
      float *gate[kRowBlock], *up[kRowBlock];
      for (int32_t r = 0; r < block.count; ++r) {
        x[r] = inputs.as<float>() + s.token[block.begin + r] * inputs.ld;
        gate[r] = s.gate + (block.begin + r) * inner + column;
        up[r] = s.inner + (block.begin + r) * inner + column;
      }
      kernels_.gemm(expert.w1, panel_begin, panel_end, x, gate, block.count, false);
      kernels_.gemm(expert.w3, panel_begin, panel_end, x, up, block.count, false);
      for (int32_t r = 0; r < block.count; ++r) {
        kernels_.gated_activation(gate[r], up[r], p.activation, width, up[r]);
        // A task's columns are whole groups: panels are 32 wide.
        for (int64_t c = 0; p.mxfp8_inputs && c < width; c += kMxfp8Group) RoundToMxfp8(up[r] + c);
      }
    });
    const int64_t down_tasks = TasksPerBlock(weights.experts[0].w2);
    ForTasks(blocks * down_tasks, work * inner, [&](int64_t task, int) {
      const Block& block = s.blocks[task / down_tasks];
      const PanelMatrix& w2 = weights.experts[static_cast<size_t>(block.expert)].w2;
      const int64_t panel_begin = task % down_tasks * kPanelsPerTask;
      const int64_t panel_end = std::min(w2.panels(), panel_begin + kPanelsPerTask);
      const float* x[kRowBlock];
      float* y[kRowBlock];
      for (int32_t r = 0; r < block.count; ++r) {
        x[r] = s.inner + (block.begin + r) * inner;
        y[r] = s.out + (block.begin + r) * in + panel_begin * PanelMatrix::kWidth;
      }
      kernels_.gemm(w2, panel_begin, panel_end, x, y, block.count, false);
    });
  }
  // Ids ascend per token, hence so does the sum, whatever the batch.
  ForRows(tokens, p.top_k * p.x.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* out = p.out.as<float>() + t * p.out.ld;
      bool started = false;
      for (int32_t j = 0; j < p.top_k; ++j) {
        const int32_t slot = s.slot[t * p.top_k + j];
        if (slot < 0) continue;
        if (!started) std::memset(out, 0, static_cast<size_t>(in) * sizeof(float));
        kernels_.scale_add(out, 1.0f, s.out + int64_t{slot} * in, p.weights[t * p.top_k + j], in);
        started = true;
      }
      if (!started) std::memset(out, 0, static_cast<size_t>(p.out.cols) * sizeof(float));
    }
  });
}

}  // namespace k3
