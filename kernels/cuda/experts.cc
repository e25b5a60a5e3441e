#include "kernels/cuda/experts.h"

#include <string>

#include "kernels/core/random_weights.h"
#include "kernels/cuda/convert.h"

namespace k3::cuda {
namespace {

constexpr int32_t kExpandedExperts = 8;

std::string ShapeText(const HostTensor& tensor) {
  std::string text = "[";
  for (size_t i = 0; i < tensor.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(tensor.shape[i]);
  return text + "]";
}

void CheckShape(const HostTensor& tensor, int64_t rows, int64_t cols, bool bytes) {
  const bool good = tensor.shape.size() == 2 && tensor.shape[0] == rows && tensor.shape[1] == cols &&
                    (tensor.dtype == DType::kU8) == bytes;
  K3_REQUIRE(good, tensor.name + " must be " + (bytes ? "U8 " : "BF16, F16 or F32 ") + "[" + std::to_string(rows) +
                       ", " + std::to_string(cols) + "], is " + Name(tensor.dtype) + " " + ShapeText(tensor));
}

}  // namespace

void* ExpertMaker::Space(size_t bytes) {
  std::lock_guard lock(mutex_);
  if (spaces_.empty() || spaces_.back().bytes() < bytes) spaces_.emplace_back(device_.ordinal, bytes);
  return spaces_.back().data();
}

std::unique_ptr<ExpertWeights> ExpertMaker::Make(int32_t first, std::span<const HostExpert> experts) {
  auto made = std::make_unique<CudaExperts>();
  made->first = first;
  made->count = static_cast<int32_t>(experts.size());
  if (experts.empty()) return made;
  const HostExpert& model = experts.front();
  const bool packed = !model.w1_scale.shape.empty();
  K3_REQUIRE(model.w1.shape.size() == 2,
             model.w1.name + " must have 2 dimensions, has " + std::to_string(model.w1.shape.size()));
  const int64_t inner = made->inner = model.w1.shape[0];
  const int64_t in = made->in = model.w1.shape[1] * (packed ? 2 : 1);
  made->form = packed ? ExpertForm::kMxfp4 : ExpertForm::kPlain;
  made->interleave = inner % 8 == 0 ? 8 : 1;
  K3_REQUIRE(!packed || (in % 32 == 0 && inner % 32 == 0), "MXFP4 experts need widths that are multiples of 32, have " +
                                                               std::to_string(in) + " and " + std::to_string(inner));

  // Bytes of a row of w1 or w3 and of w2.
  const int64_t element = static_cast<int64_t>(SizeOf(device_.act));
  const int64_t row13 = packed ? in / 2 : in * element, row2 = packed ? inner / 2 : inner * element;
  const int64_t count = made->count;
  made->w13 = DeviceMemory(device_.ordinal, count * 2 * inner * row13);
  made->w2 = DeviceMemory(device_.ordinal, count * in * row2);
  if (packed) {
    made->w13_scale = DeviceMemory(device_.ordinal, count * 2 * inner * in / 32);
    made->w2_scale = DeviceMemory(device_.ordinal, count * in * inner / 32);
    made->expanded_experts = std::min<int32_t>(made->count, kExpandedExperts);
    if (device_.act == DType::kBF16) {
      made->expanded = Space(static_cast<size_t>(made->expanded_experts) * 3 * in * inner * sizeof(uint16_t));
    }
  }
  made->bytes = made->w13.bytes() + made->w2.bytes() + made->w13_scale.bytes() + made->w2_scale.bytes();

  DeviceMemory staging(device_.ordinal, static_cast<size_t>(inner * row13));
  // Rows of w1 (part 0) or w3 (part 1) to every other group of w13.
  const auto upload_interleaved = [&](const HostTensor& tensor, int part, int64_t row_bytes, char* to, DType type) {
    uploader_.Upload(tensor, staging.data(), type);
    const size_t group = static_cast<size_t>(made->interleave * row_bytes);
    K3_CUDA(cudaMemcpy2DAsync(to + part * group, 2 * group, staging.data(), group, group,
                              static_cast<size_t>(inner / made->interleave), cudaMemcpyDeviceToDevice,
                              cudaStreamPerThread));
    K3_CUDA(cudaStreamSynchronize(cudaStreamPerThread));  // `staging` is used again
  };
  // Scales without values of their own follow from the spread that their packed tensor asks for.
  const auto with_scale_code = [&](const HostTensor& weight, const HostTensor& scale, const auto& upload) {
    if (scale.data != nullptr) return upload(scale);
    const std::vector<uint8_t> codes(static_cast<size_t>(scale.elements()),
                                     RandomWeightMxfp4Scale(weight.random_stddev));
    HostTensor constant = scale;
    constant.data = codes.data();
    constant.row_stride = 0;
    upload(constant);
  };

  for (int64_t e = 0; e < count; ++e) {
    const HostExpert& expert = experts[static_cast<size_t>(e)];
    const DType type = packed ? DType::kU8 : device_.act;
    const int64_t pack = packed ? 2 : 1;
    CheckShape(expert.w1, inner, in / pack, packed);
    CheckShape(expert.w3, inner, in / pack, packed);
    CheckShape(expert.w2, in, inner / pack, packed);
    char* w13 = static_cast<char*>(made->w13.data()) + e * 2 * inner * row13;
    char* w2 = static_cast<char*>(made->w2.data()) + e * in * row2;
    upload_interleaved(expert.w1, 0, row13, w13, type);
    upload_interleaved(expert.w3, 1, row13, w13, type);
    uploader_.Upload(expert.w2, w2, type);
    if (!packed) continue;
    CheckShape(expert.w1_scale, inner, in / 32, true);
    CheckShape(expert.w3_scale, inner, in / 32, true);
    CheckShape(expert.w2_scale, in, inner / 32, true);
    char* w13_scale = static_cast<char*>(made->w13_scale.data()) + e * 2 * inner * in / 32;
    char* w2_scale = static_cast<char*>(made->w2_scale.data()) + e * in * inner / 32;
    with_scale_code(expert.w1, expert.w1_scale,
                    [&](const HostTensor& scale) { upload_interleaved(scale, 0, in / 32, w13_scale, type); });
    with_scale_code(expert.w3, expert.w3_scale,
                    [&](const HostTensor& scale) { upload_interleaved(scale, 1, in / 32, w13_scale, type); });
    with_scale_code(expert.w2, expert.w2_scale,
                    [&](const HostTensor& scale) { uploader_.Upload(scale, w2_scale, type); });
  }
  if (packed) {
    RegroupMxfp4(made->w13.data(), static_cast<int64_t>(made->w13.bytes() / 4), cudaStreamPerThread);
    RegroupMxfp4(made->w2.data(), static_cast<int64_t>(made->w2.bytes() / 4), cudaStreamPerThread);
  }
  K3_CUDA(cudaStreamSynchronize(cudaStreamPerThread));
  return made;
}

}  // namespace k3::cuda
