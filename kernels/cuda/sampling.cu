#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/sampling.cuh"

namespace k3::cuda {
namespace {

constexpr int64_t kOneBlockVocab = 4096;  // up to here one block holds a row
constexpr int64_t kFewRows = 8;           // up to here a cluster of eight blocks a row finds room at once

}  // namespace

size_t SampleScratchBytes() { return 256; }

void Sample(const Device& device, const SampleParams& p, cudaStream_t queue) {
  K3_REQUIRE_MATRIX(p.logits, DType::kF32, p.logits.rows, p.logits.cols);
  if (p.logits.rows == 0) return;
  const int64_t vocab = p.logits.cols;
  K3_REQUIRE(vocab > 0 && p.rows && p.token && p.status && p.logprob,
             "the vocabulary is empty, or rows, token, status or logprob is null");
  K3_REQUIRE(p.max_top_logprobs >= 0 && p.max_top_logprobs <= kSampleMaxTop,
             "max_top_logprobs must be in [0, " + std::to_string(kSampleMaxTop) + "], is " +
                 std::to_string(p.max_top_logprobs));
  K3_REQUIRE(p.max_top_logprobs == 0 || (p.top_ids && p.top_logprobs), "top_ids or top_logprobs is null");
  const int64_t rows = p.logits.rows;
  const int blocks = vocab <= kOneBlockVocab ? 1 : kSampleBlocks;
  const int slice = SampleSlice(static_cast<int>(vocab), blocks);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows * blocks));
  shape.block = dim3(kSampleThreads);
  // The slice also serves as a list of candidates, and to the rows that are done without it.
  shape.shared = sizeof(SampleShared) + std::max({static_cast<size_t>(slice) * sizeof(float),
                                                  static_cast<size_t>(blocks) * kSampleFewList * sizeof(SampleEntry),
                                                  QuickSampler<kSampleThreads>::SharedBytes(1, slice)});
  shape.cluster = static_cast<unsigned>(blocks);
  K3_REQUIRE(shape.shared <= device.shared_per_block, "a vocabulary of " + std::to_string(vocab) + " is too large");

  // Clusters of large blocks find room on half of the multiprocessors.
  const int64_t resident = device.multiprocessors / kSampleBlocks;
  int quick_blocks = kSampleBlocks / 2;
  while (quick_blocks > 1 && rows * quick_blocks > device.multiprocessors / 2) quick_blocks /= 2;
  LaunchShape quick;
  quick.grid = dim3(static_cast<unsigned>(rows * quick_blocks));
  quick.block = dim3(kQuickThreads);
  quick.shared = QuickSampler<kQuickThreads>::SharedBytes(kSampleBlocks / quick_blocks, slice);
  quick.cluster = static_cast<unsigned>(quick_blocks);
  if (blocks == 1 || rows <= kFewRows || quick.shared > device.shared_per_block) {
    shape.early = true;
    return Launch(&SampleKernel, shape, queue, "Sample", p, blocks);
  }
  Launch(&QuickSampleKernel, quick, queue, "Sample", p, quick_blocks);
  shape.grid = dim3(static_cast<unsigned>(std::min(rows, resident) * blocks));
  Launch(&SamplePendingKernel, shape, queue, "Sample", p, static_cast<int>(rows));
}

}  // namespace k3::cuda
