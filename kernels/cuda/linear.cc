#include <utility>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/weights.h"

namespace k3::cuda {

std::unique_ptr<LinearWeight> MakeLinear(const Device& device, Uploader& uploader, std::span<const HostTensor> parts) {
  K3_REQUIRE(!parts.empty(), "no parts");
  auto weight = std::make_unique<CudaLinear>();
  for (const HostTensor& part : parts) {
    K3_REQUIRE(part.shape.size() == 2, part.name + " must have 2 dimensions, has " + std::to_string(part.shape.size()));
    K3_REQUIRE(part.shape[1] == parts[0].shape[1], part.name + " must have " + std::to_string(parts[0].shape[1]) +
                                                       " columns as " + parts[0].name + ", has " +
                                                       std::to_string(part.shape[1]));
    weight->out += part.shape[0];
  }
  weight->in = parts[0].shape[1];
  weight->bytes = static_cast<size_t>(weight->out * weight->in) * SizeOf(device.act);
  weight->memory = DeviceMemory(device.ordinal, weight->bytes);
  char* target = static_cast<char*>(weight->memory.data());
  for (const HostTensor& part : parts) {
    uploader.Upload(part, target, device.act);
    target += static_cast<size_t>(part.elements()) * SizeOf(device.act);
  }
  return weight;
}

namespace {

GemmArgs Checked(const Device& device, const LinearParams& params) {
  const auto* weight = dynamic_cast<const CudaLinear*>(params.weight);
  K3_REQUIRE(weight != nullptr, "weight is null or of another backend");
  const DType out = params.y.dtype;
  K3_REQUIRE_MATRIX(params.x, device.act, params.y.rows, weight->in);
  K3_REQUIRE(out == device.act || out == DType::kF32,
             "y must be " + std::string(Name(device.act)) + " or F32, is " + Describe(params.y));
  K3_REQUIRE_MATRIX(params.y, out, params.x.rows, weight->out);
  return {.m = params.x.rows,
          .n = weight->out,
          .k = weight->in,
          .a = params.x.data,
          .lda = params.x.ld,
          .b = weight->data(),
          .ldb = weight->in,
          .c = params.y.data,
          .ldc = params.y.ld,
          .in = device.act,
          .out = out,
          .accumulate = params.accumulate,
          // Where two streams meet there is more than one launch before.
          .early = !params.accumulate && !device.on_side_stream};
}

}  // namespace

void Linear(const Device& device, const LinearParams& params, cudaStream_t queue) {
  const GemmArgs args = Checked(device, params);
  if (args.m > 0) Gemm(device, args, queue);
}

void LinearPair(const Device& device, const LinearParams& first, const LinearParams& second, cudaStream_t queue) {
  const GemmArgs a = Checked(device, first), b = Checked(device, second);
  const bool alike = a.m == b.m && a.n == b.n && a.k == b.k && a.out == b.out;
  if (a.m > 0 && alike && !device.batch_invariant && TakesVectorGemm(a) && TakesVectorGemm(b)) {
    return VectorGemmPair(a, b, queue);
  }
  if (a.m > 0) Gemm(device, a, queue);
  if (b.m > 0) Gemm(device, b, queue);
}

}  // namespace k3::cuda
