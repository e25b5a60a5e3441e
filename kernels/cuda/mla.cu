#include <algorithm>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/mla.cuh"
#include "kernels/cuda/mla_absorbed.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/weights.h"

namespace k3::cuda {
namespace {

constexpr int64_t kBlockBytes = int64_t{64} << 20;  // latent queries of the tokens that are worked on together
constexpr int kMaxSplits = 512;

// Tokens worked on together: their latent queries and outputs lie in the scratch.
int64_t BlockTokens(int64_t tokens, int64_t heads, int64_t latent, size_t element) {
  const int64_t line = heads * latent * static_cast<int64_t>(element);
  return std::min(tokens, std::max<int64_t>(kMlaTileRows, kBlockBytes / line / kMlaTileRows * kMlaTileRows));
}

// Splits of each tile's keys: as many as fill the device once. Not a function of lengths, so that a captured launch
// stays right while contexts grow.
int Splits(const Device& device, int64_t tiles) {
  if (device.batch_invariant) return 1;
  return static_cast<int>(std::clamp<int64_t>(device.multiprocessors / tiles, 1, kMaxSplits));
}

// One function lays out the scratch and thereby says its size. Not smaller for more tokens or sequences.
struct MlaScratch {
  void* latent_q;      // [block tokens, heads, latent] act
  void* latent_out;    // the same
  float* partial;      // [tiles * splits <= 2 * multiprocessors][64, latent]
  float* partial_lse;  // [tiles * splits][64]
  size_t bytes;

  MlaScratch(const Device& device, void* base, int64_t tokens, int64_t heads, int64_t latent) {
    size_t offset = 0;
    const auto take = [&](int64_t bytes) {
      void* piece = static_cast<char*>(base) + offset;
      offset += RoundUp(bytes, 256);
      return piece;
    };
    const int64_t element = static_cast<int64_t>(SizeOf(device.act));
    const int64_t block = BlockTokens(tokens, heads, latent, element) * heads * latent * element;
    latent_q = take(block);
    latent_out = take(block);
    const int64_t pieces = device.multiprocessors;  // tiles * splits never exceeds it where splits > 1
    partial = static_cast<float*>(take(pieces * kMlaTileRows * latent * 4));
    partial_lse = static_cast<float*>(take(pieces * kMlaTileRows * 4));
    bytes = offset;
  }
};

void CheckPages(const SequenceBatch* batch, const MlaPages& pages, int64_t line) {
  K3_REQUIRE(batch != nullptr, "batch is null");
  K3_REQUIRE(pages.data != nullptr && (pages.dtype == DType::kF32 || pages.dtype == DType::kBF16),
             std::string("pages must be F32 or BF16 and present, are ") + Name(pages.dtype));
  const int64_t bytes = pages.page_size * line * static_cast<int64_t>(SizeOf(pages.dtype));
  K3_REQUIRE(
      pages.page_size > 0 && pages.page_stride >= bytes,
      "page_stride " + std::to_string(pages.page_stride) + " is below the page's " + std::to_string(bytes) + " bytes");
  K3_REQUIRE(
      batch->token_begin && batch->page_table && batch->sequence_of_token && batch->position && batch->host_token_begin,
      "an array of the batch is null");
}

template <typename T>
void Append(const MlaAppendParams& p, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(p.batch->num_tokens, kAppendWarps)));
  shape.block = dim3(32 * kAppendWarps);
  void (*kernel)(MlaAppendParams, SequenceBatch) =
      p.pages.dtype == DType::kBF16 ? &MlaAppendKernel<T, bf16> : &MlaAppendKernel<T, float>;
  Launch(kernel, shape, queue, "MlaAppend", p, *p.batch);
}

template <typename T>
void AttendAny(const MlaAttentionParams& p, const MlaRows& rows, const MlaScratch& scratch, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.heads), static_cast<unsigned>(rows.token_end - rows.token_begin));
  shape.block = dim3(kMlaAnyThreads);
  shape.shared = (p.latent_dim + p.rope_dim + kMlaAnyKeys) * sizeof(float);
  void (*kernel)(MlaAttentionParams, SequenceBatch, MlaRows, const T*, T*) =
      p.pages.dtype == DType::kBF16 ? &MlaAnyKernel<T, bf16> : &MlaAnyKernel<T, float>;
  Launch(kernel, shape, queue, "MlaAny", p, *p.batch, rows, static_cast<const T*>(scratch.latent_q),
         static_cast<T*>(scratch.latent_out));
}

void AttendAbsorbed(const Device& device, const MlaAttentionParams& p, const MlaRows& rows, const MlaScratch& scratch,
                    cudaStream_t queue) {
  AbsorbedArgs args;
  args.rows = rows;
  args.pages = p.pages;
  args.latent_q = static_cast<const bf16*>(scratch.latent_q);
  args.q = AsMatrix<const bf16>(p.q);
  args.nope_dim = p.nope_dim;
  args.rope_aligned = RowsAligned16(p.q) && (p.nope_dim + p.rope_dim) % 8 == 0 && p.nope_dim % 8 == 0;
  args.scale_log2 = p.scale * 1.4426950408889634f;
  args.splits = Splits(device, rows.tiles);
  args.latent_out = static_cast<bf16*>(scratch.latent_out);
  args.partial = scratch.partial;
  args.partial_lse = scratch.partial_lse;
  const unsigned tiles = static_cast<unsigned>(rows.tiles), splits = static_cast<unsigned>(args.splits);
  Launch(&MlaAbsorbedKernel,
         {.grid = dim3(tiles, splits), .block = dim3(kAbsorbedThreads), .shared = sizeof(AbsorbedShared)}, queue,
         "MlaAbsorbed", args, *p.batch);
  if (splits == 1) return;
  Launch(&MlaCombineKernel,
         {.grid = dim3(kMlaTileRows, tiles),
          .block = dim3(kCombineThreads),
          .shared = splits * sizeof(float) + sizeof(MlaTile)},
         queue, "MlaCombine", args, *p.batch);
}

// Rows of packed tokens [begin, end) in tiles that never hold two sequences.
MlaRows MakeRows(const SequenceBatch& batch, int64_t begin, int64_t end, int32_t heads) {
  MlaRows rows{static_cast<int>(begin), static_cast<int>(end), heads, 0, 0};
  bool uniform = true;
  int64_t first = -1;
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int64_t tokens =
        std::min<int64_t>(end, batch.host_token_begin[s + 1]) - std::max<int64_t>(begin, batch.host_token_begin[s]);
    const int64_t tiles = CeilDiv(std::max<int64_t>(0, tokens) * heads, kMlaTileRows);
    rows.tiles += static_cast<int>(tiles);
    if (first < 0) first = tiles;
    uniform = uniform && tiles == first;
  }
  if (uniform) rows.tiles_per_sequence = static_cast<int>(first);
  return rows;
}

}  // namespace

std::unique_ptr<LatentProjection> MakeLatentProjection(const Device& device, Uploader& uploader, const HostTensor& kv_b,
                                                       int32_t heads, int32_t nope_dim, int32_t value_dim) {
  K3_REQUIRE(kv_b.shape.size() == 2 && kv_b.shape[0] == int64_t{heads} * (nope_dim + value_dim),
             kv_b.name + " must have " + std::to_string(heads) + " * (" + std::to_string(nope_dim) + " + " +
                 std::to_string(value_dim) + ") rows");
  auto projection = std::make_unique<CudaLatentProjection>();
  projection->heads = heads;
  projection->nope_dim = nope_dim;
  projection->value_dim = value_dim;
  projection->latent_dim = static_cast<int32_t>(kv_b.shape[1]);
  projection->bytes = static_cast<size_t>(kv_b.elements()) * SizeOf(device.act);
  projection->memory = DeviceMemory(device.ordinal, projection->bytes);
  uploader.Upload(kv_b, projection->memory.data(), device.act);
  return projection;
}

size_t MlaScratchBytes(const Device& device, int64_t tokens, int64_t heads, int64_t latent_dim) {
  return MlaScratch(device, nullptr, tokens, heads, latent_dim).bytes;
}

void MlaAppend(const Device& device, const MlaAppendParams& p, cudaStream_t queue) {
  if (p.batch != nullptr && p.batch->num_tokens == 0) return;
  CheckPages(p.batch, p.pages, p.latent_dim + p.rope_dim);
  K3_REQUIRE_MATRIX(p.kv_a, device.act, p.batch->num_tokens, p.latent_dim + p.rope_dim);
  K3_REQUIRE(p.norm_weight != nullptr, "norm_weight is null");
  device.act == DType::kBF16 ? Append<bf16>(p, queue) : Append<float>(p, queue);
}

void MlaAttention(const Device& device, const MlaAttentionParams& p, cudaStream_t queue) {
  if (p.batch != nullptr && p.batch->num_tokens == 0) return;
  CheckPages(p.batch, p.pages, p.latent_dim + p.rope_dim);
  const SequenceBatch& batch = *p.batch;
  const auto* projection = dynamic_cast<const CudaLatentProjection*>(p.projection);
  K3_REQUIRE(projection != nullptr, "projection is null or of another backend");
  K3_REQUIRE(projection->heads == p.heads && projection->nope_dim == p.nope_dim &&
                 projection->value_dim == p.value_dim && projection->latent_dim == p.latent_dim,
             "projection has heads, nope, value, latent = " + std::to_string(projection->heads) + ", " +
                 std::to_string(projection->nope_dim) + ", " + std::to_string(projection->value_dim) + ", " +
                 std::to_string(projection->latent_dim));
  K3_REQUIRE(p.latent_dim <= kMlaAnyThreads * kMlaAnyColumns, "latent_dim must be at most " +
                                                                  std::to_string(kMlaAnyThreads * kMlaAnyColumns) +
                                                                  ", is " + std::to_string(p.latent_dim));
  K3_REQUIRE_MATRIX(p.q, device.act, batch.num_tokens, int64_t{p.heads} * (p.nope_dim + p.rope_dim));
  K3_REQUIRE_MATRIX(p.out, device.act, batch.num_tokens, int64_t{p.heads} * p.value_dim);
  if (p.gate) K3_REQUIRE_MATRIX(p.gate, device.act, batch.num_tokens, int64_t{p.heads} * p.value_dim);
  K3_REQUIRE(p.scratch != nullptr, "scratch is null");

  const MlaScratch scratch(device, p.scratch, batch.num_tokens, p.heads, p.latent_dim);
  const bool absorbed = device.act == DType::kBF16 && p.pages.dtype == DType::kBF16 &&
                        p.latent_dim == kAbsorbedLatent && p.rope_dim == kAbsorbedRope && Aligned(p.pages.data, 16) &&
                        p.pages.page_stride % 16 == 0;
  const int64_t element = static_cast<int64_t>(SizeOf(device.act));
  const int64_t block = BlockTokens(batch.num_tokens, p.heads, p.latent_dim, element);
  const int64_t head_rows = p.nope_dim + p.value_dim;
  for (int64_t begin = 0; begin < batch.num_tokens; begin += block) {
    const int64_t end = std::min<int64_t>(batch.num_tokens, begin + block);
    const MatrixView q = p.q.Rows(begin, end - begin), out = p.out.Rows(begin, end - begin);
    GemmArgs gemm;
    gemm.in = gemm.out = device.act;
    gemm.batch = p.heads;
    gemm.m = end - begin;
    gemm.stride_b = head_rows * p.latent_dim;
    gemm.ldb = p.latent_dim;
    // q_lat = q_nope Wuk, per head.
    gemm.n = p.latent_dim;
    gemm.k = p.nope_dim;
    gemm.a = q.data;
    gemm.lda = q.ld;
    gemm.stride_a = p.nope_dim + p.rope_dim;
    gemm.b = projection->data();
    gemm.b_is_k_by_n = true;
    gemm.c = scratch.latent_q;
    gemm.ldc = int64_t{p.heads} * p.latent_dim;
    gemm.stride_c = p.latent_dim;
    Gemm(device, gemm, queue);

    const MlaRows rows = MakeRows(batch, begin, end, p.heads);
    if (absorbed) {
      AttendAbsorbed(device, p, rows, scratch, queue);
    } else {
      device.act == DType::kBF16 ? AttendAny<bf16>(p, rows, scratch, queue) : AttendAny<float>(p, rows, scratch, queue);
    }

    // o = o_lat Wuv^T, per head.
    gemm.n = p.value_dim;
    gemm.k = p.latent_dim;
    gemm.a = scratch.latent_out;
    gemm.lda = int64_t{p.heads} * p.latent_dim;
    gemm.stride_a = p.latent_dim;
    gemm.b = static_cast<const char*>(projection->data()) + p.nope_dim * p.latent_dim * element;
    gemm.b_is_k_by_n = false;
    gemm.c = out.data;
    gemm.ldc = out.ld;
    gemm.stride_c = p.value_dim;
    Gemm(device, gemm, queue);
  }
  if (p.gate) {
    LaunchShape shape;
    shape.block = dim3(256);
    shape.grid = dim3(static_cast<unsigned>(batch.num_tokens), static_cast<unsigned>(CeilDiv(p.out.cols, 256)));
    if (device.act == DType::kBF16) {
      Launch(&MlaGateKernel<bf16>, shape, queue, "MlaGate", AsMatrix<const bf16>(p.gate), static_cast<int>(p.out.cols),
             AsMatrix<bf16>(p.out));
    } else {
      Launch(&MlaGateKernel<float>, shape, queue, "MlaGate", AsMatrix<const float>(p.gate),
             static_cast<int>(p.out.cols), AsMatrix<float>(p.out));
    }
  }
}

}  // namespace k3::cuda
