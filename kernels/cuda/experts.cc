#include "kernels/cuda/experts.h"

#include <string>
#include <vector>

#include "kernels/core/random_weights.h"
#include "kernels/cuda/convert.h"
#include "kernels/cuda/mxfp4_layout.h"
#include "kernels/cuda/weight_tiles.h"

namespace k3::cuda {
namespace {

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
  const bool tiled = !packed && device_.act == DType::kBF16 && in % 32 == 0 && inner % 32 == 0;
  made->form = packed ? ExpertForm::kMxfp4 : tiled ? ExpertForm::kTiled : ExpertForm::kPlain;
  made->interleave = inner % 8 == 0 ? 8 : 1;
  K3_REQUIRE(!packed || (in % 32 == 0 && inner % 32 == 0), "MXFP4 experts need widths that are multiples of 32, have " +
                                                               std::to_string(in) + " and " + std::to_string(inner));

  // Bytes of a row of w1 or w3 and of w2 as they come.
  const int64_t element = static_cast<int64_t>(SizeOf(device_.act));
  const int64_t row13 = packed ? in / 2 : in * element, row2 = packed ? inner / 2 : inner * element;
  const int64_t count = made->count;
  // Bytes of an expert's matrices and scales as they stay.
  const int64_t pieces13 = 2 * inner / kMxfp4Rows * Mxfp4Pieces(in), pieces2 = in / kMxfp4Rows * Mxfp4Pieces(inner);
  const int64_t size13 = packed  ? pieces13 * kMxfp4PieceBytes
                         : tiled ? TiledElements(2 * inner, in) * element
                                 : 2 * inner * row13;
  const int64_t size2 = packed ? pieces2 * kMxfp4PieceBytes : tiled ? TiledElements(in, inner) * element : in * row2;
  made->w13 = DeviceMemory(device_.ordinal, count * size13);
  made->w2 = DeviceMemory(device_.ordinal, count * size2);
  DeviceMemory rows, scales;  // one matrix before it is brought into its order
  DeviceMemory found;         // Mxfp4ScalesFound
  if (tiled) rows = DeviceMemory(device_.ordinal, static_cast<size_t>(2 * inner * row13));
  if (packed) {
    found = DeviceMemory(device_.ordinal, sizeof(Mxfp4ScalesFound));
    K3_CUDA(cudaMemsetAsync(found.data(), 0, sizeof(Mxfp4ScalesFound), cudaStreamPerThread));
    made->w13_scale = DeviceMemory(device_.ordinal, count * pieces13 * kMxfp4PieceScaleBytes);
    made->w2_scale = DeviceMemory(device_.ordinal, count * pieces2 * kMxfp4PieceScaleBytes);
    rows = DeviceMemory(device_.ordinal, static_cast<size_t>(inner * in));
    scales = DeviceMemory(device_.ordinal, static_cast<size_t>(2 * inner * in / 32));
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
    char* w13 = static_cast<char*>(made->w13.data()) + e * size13;
    char* w2 = static_cast<char*>(made->w2.data()) + e * size2;
    char* to13 = packed || tiled ? static_cast<char*>(rows.data()) : w13;
    upload_interleaved(expert.w1, 0, row13, to13, type);
    upload_interleaved(expert.w3, 1, row13, to13, type);
    if (tiled) {
      const auto tile = [&](int64_t count, int64_t cols, char* to) {
        TileWeights(rows.data(), count, cols, to, cudaStreamPerThread);
        K3_CUDA(cudaStreamSynchronize(cudaStreamPerThread));  // `rows` is used again
      };
      tile(2 * inner, in, w13);
      uploader_.Upload(expert.w2, rows.data(), type);
      tile(in, inner, w2);
      continue;
    }
    if (!packed) {
      uploader_.Upload(expert.w2, w2, type);
      continue;
    }
    CheckShape(expert.w1_scale, inner, in / 32, true);
    CheckShape(expert.w3_scale, inner, in / 32, true);
    CheckShape(expert.w2_scale, in, inner / 32, true);
    const auto repack = [&](int64_t count, int64_t cols, char* to, char* to_scales) {
      RepackMxfp4(rows.data(), scales.data(), count, cols, to, to_scales, static_cast<Mxfp4ScalesFound*>(found.data()),
                  cudaStreamPerThread);
      K3_CUDA(cudaStreamSynchronize(cudaStreamPerThread));  // `rows` and `scales` are used again
    };
    char* to_scales = static_cast<char*>(scales.data());
    with_scale_code(expert.w1, expert.w1_scale,
                    [&](const HostTensor& scale) { upload_interleaved(scale, 0, in / 32, to_scales, type); });
    with_scale_code(expert.w3, expert.w3_scale,
                    [&](const HostTensor& scale) { upload_interleaved(scale, 1, in / 32, to_scales, type); });
    repack(2 * inner, in, w13, static_cast<char*>(made->w13_scale.data()) + e * pieces13 * kMxfp4PieceScaleBytes);
    uploader_.Upload(expert.w2, rows.data(), type);
    with_scale_code(expert.w2, expert.w2_scale,
                    [&](const HostTensor& scale) { uploader_.Upload(scale, to_scales, type); });
    repack(in, inner, w2, static_cast<char*>(made->w2_scale.data()) + e * pieces2 * kMxfp4PieceScaleBytes);
  }
  Mxfp4ScalesFound scales_found = {};
  if (packed) {
    K3_CUDA(cudaMemcpyAsync(&scales_found, found.data(), sizeof(scales_found), cudaMemcpyDeviceToHost,
                            cudaStreamPerThread));
  }
  K3_CUDA(cudaStreamSynchronize(cudaStreamPerThread));
  made->rare_scales = scales_found.rare != 0;
  made->large_scales = scales_found.large != 0;
  return made;
}

}  // namespace k3::cuda
