#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/sampling.cuh"

namespace k3::cuda {
namespace {

constexpr int64_t kOneBlockVocab = 4096;  // up to here one block holds a row

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
  const int blocks = vocab <= kOneBlockVocab ? 1 : kSampleBlocks;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.logits.rows * blocks));
  shape.block = dim3(kSampleThreads);
  // The slice also serves as a list of candidates.
  const size_t slice = std::max(static_cast<size_t>(SampleSlice(static_cast<int>(vocab), blocks)) * sizeof(float),
                                static_cast<size_t>(blocks) * kSampleFewList * sizeof(SampleEntry));
  shape.shared = sizeof(SampleShared) + slice;
  shape.cluster = static_cast<unsigned>(blocks);
  K3_REQUIRE(shape.shared <= device.shared_per_block, "a vocabulary of " + std::to_string(vocab) + " is too large");
  Launch(&SampleKernel, shape, queue, "Sample", p, blocks);
}

}  // namespace k3::cuda
