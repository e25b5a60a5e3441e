#include <algorithm>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/mla.cuh"
#include "kernels/cuda/mla_absorbed.cuh"
#include "kernels/cuda/mla_prefill.cuh"
#include "kernels/cuda/mla_project.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/weights.h"

namespace k3::cuda {
namespace {

constexpr int64_t kBlockBytes = int64_t{64} << 20;  // latent queries of the tokens that are worked on together
constexpr int kMaxSplits = 512;
constexpr int64_t kMaxPages = 1 << 24;                  // more than any memory holds
constexpr int64_t kVectorTokens = 4;                    // up to so many tokens projections are matrix-vector kernels
constexpr int64_t kExpandQueries = 160;                 // from so many on a sequence's keys and values are expanded
constexpr int64_t kExpandedBytes = int64_t{512} << 20;  // of the keys that are expanded together
constexpr int64_t kCarryBytes = int64_t{128} << 20;     // of the queries whose softmax is carried over blocks of keys

constexpr int64_t kGroupBytes = int64_t{32} << 20;  // of expanded keys whose tiles run together

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

// Keys expanded together, of `context` at most.
int64_t ExpandKeys(int64_t context, int64_t heads) {
  const int64_t most = std::max<int64_t>(kPrefillQueries, kExpandedBytes / (heads * kPrefillExpanded * 2) / 128 * 128);
  return std::min(RoundUp(context, 128), most);
}

// Queries whose softmax is carried together where the keys do not fit at once.
int64_t CarryQueries(int64_t tokens, int64_t heads) {
  return std::min(tokens,
                  std::max<int64_t>(kPrefillQueries, kCarryBytes / (heads * (kPrefillValue + 2) * 4) / 128 * 128));
}

// One function lays out the scratch and thereby says its size. Not smaller for more tokens, sequences or context.
struct MlaScratch {
  void* latent_q;      // [block tokens, heads, latent] act
  void* latent_out;    // the same
  bf16* partial;       // [multiprocessors][64, latent]: tiles * splits is at most that where splits > 1
  float* partial_lse;  // [multiprocessors][64]
  uint32_t* progress;  // 1
  int2* split_of;      // [kSplitMost]
  // Expanded keys and values: sequences of at least kExpandQueries tokens.
  int* counter;           // 1
  bf16* lines;            // [keys, 576]
  bf16* expanded;         // [keys, heads, 256]
  float* carry;           // [queries, heads, 128], where the context has more keys
  float2* carry_softmax;  // [queries, heads]
  size_t bytes;

  MlaScratch(const Device& device, void* base, int64_t tokens, int64_t heads, int64_t latent, int64_t context) {
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
    const int64_t pieces = device.multiprocessors;
    partial = static_cast<bf16*>(take(pieces * kMlaTileRows * latent * 2));
    partial_lse = static_cast<float*>(take(pieces * kMlaTileRows * 4));
    progress = static_cast<uint32_t*>(take(sizeof(uint32_t)));
    split_of = static_cast<int2*>(take(kSplitMost * sizeof(int2)));
    if (device.act == DType::kBF16 && !device.batch_invariant && tokens >= kExpandQueries) {
      const int64_t keys = ExpandKeys(context, heads);
      counter = static_cast<int*>(take(sizeof(int)));
      lines = static_cast<bf16*>(take(keys * kPrefillLine * 2));
      expanded = static_cast<bf16*>(take(keys * heads * kPrefillExpanded * 2));
      const int64_t queries = keys < context ? CarryQueries(tokens, heads) : 0;
      carry = static_cast<float*>(take(queries * heads * kPrefillValue * 4));
      carry_softmax = static_cast<float2*>(take(queries * heads * 8));
    }
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
  shape.grid = dim3(static_cast<unsigned>(p.batch->num_tokens));
  shape.block = dim3(kAppendThreads);
  shape.early = true;
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

// Of the largest tile.
int64_t TileRows(const SequenceBatch& batch, const MlaRows& rows) {
  int64_t most = 0;
  for (int s = 0; s < batch.num_sequences; ++s) {
    most = std::max<int64_t>(most, std::min(rows.token_end, batch.host_token_begin[s + 1]) -
                                       std::max(rows.token_begin, batch.host_token_begin[s]));
  }
  return std::min<int64_t>(kMlaTileRows, most * rows.heads);
}

// Whether blocks can be dealt out to sequences by their lengths.
bool SharesSplits(const Device& device, const MlaRows& rows) {
  return rows.tiles_per_sequence > 0 && rows.tiles <= std::min(device.multiprocessors, kSplitMost);
}

AbsorbedArgs MakeAbsorbed(const Device& device, const MlaAttentionParams& p, const MlaRows& rows,
                          const MlaScratch& scratch) {
  AbsorbedArgs args;
  args.rows = rows;
  args.pages = p.pages;
  args.latent_q = static_cast<const bf16*>(scratch.latent_q);
  args.q = AsMatrix<const bf16>(p.q);
  args.nope_dim = p.nope_dim;
  args.rope_aligned = RowsAligned16(p.q) && (p.nope_dim + p.rope_dim) % 8 == 0 && p.nope_dim % 8 == 0;
  args.boxes = p.pages.page_size % kAbsorbedKeys == 0;
  args.scale_log2 = p.scale * 1.4426950408889634f;
  args.splits = Splits(device, rows.tiles);
  args.shared_splits = 0;
  args.whole = false;
  args.paced = false;
  args.progress = scratch.progress;
  args.split_of = scratch.split_of;
  args.latent_out = static_cast<bf16*>(scratch.latent_out);
  args.partial = scratch.partial;
  args.partial_lse = scratch.partial_lse;
  return args;
}

template <int kRows, bool kShared>
void LaunchAbsorbed(const AbsorbedArgs& args, const SequenceBatch& batch, bool early, cudaStream_t queue) {
  CUtensorMap boxes = {};
  if (args.boxes) {
    boxes = LineBoxes(args.pages.data, kMaxPages, args.pages.page_stride, args.pages.page_size, kAbsorbedLine);
  }
  const unsigned tiles = static_cast<unsigned>(kShared ? args.rows.tiles_per_sequence : args.rows.tiles),
                 splits = static_cast<unsigned>(kShared ? args.shared_splits : args.splits);
  Launch(&MlaAbsorbedKernel<kRows, kShared>,
         {.grid = dim3(tiles, splits),
          .block = dim3(kAbsorbedThreads),
          .shared = sizeof(AbsorbedShared<kRows>),
          .early = early},
         queue, "MlaAbsorbed", boxes, args, batch);
}

// `rows`: of the largest tile. `early`: see LaunchShape; the launch before is not the one that wrote lines.
void LaunchAbsorbed(const AbsorbedArgs& args, const SequenceBatch& batch, int64_t rows, bool early,
                    cudaStream_t queue) {
  if (args.shared_splits > 0) {
    rows <= 32 ? LaunchAbsorbed<32, true>(args, batch, early, queue)
               : LaunchAbsorbed<64, true>(args, batch, early, queue);
  } else {
    rows <= 32 ? LaunchAbsorbed<32, false>(args, batch, early, queue)
               : LaunchAbsorbed<64, false>(args, batch, early, queue);
  }
}

void AttendAbsorbed(const Device& device, const MlaAttentionParams& p, const MlaRows& rows, const MlaScratch& scratch,
                    cudaStream_t queue) {
  AbsorbedArgs args = MakeAbsorbed(device, p, rows, scratch);
  if (!device.batch_invariant && SharesSplits(device, rows)) {
    args.shared_splits = device.multiprocessors / rows.tiles_per_sequence;
    args.whole = true;
  }
  LaunchAbsorbed(args, *p.batch, TileRows(*p.batch, rows), false, queue);
  if (args.splits == 1 && args.shared_splits == 0) return;
  Launch(&MlaCombineKernel,
         {.grid = dim3(kCombineBlocks, static_cast<unsigned>(rows.tiles)),
          .block = dim3(kCombineThreads),
          .shared = sizeof(CombineShared) + std::max(args.splits, args.shared_splits) * sizeof(float),
          .early = true},
         queue, "MlaCombine", args, *p.batch);
}

// The absorbed form for few tokens in kernels of its own, the gate included.
void AttendFew(const Device& device, const MlaAttentionParams& p, const CudaLatentProjection& projection,
               const MlaRows& rows, const MlaScratch& scratch, cudaStream_t queue) {
  AbsorbedArgs args = MakeAbsorbed(device, p, rows, scratch);
  const bf16* kv_b = static_cast<const bf16*>(projection.data());
  const int head_rows = p.nope_dim + p.value_dim, query_dim = p.nope_dim + p.rope_dim;
  bf16* latent_q = static_cast<bf16*>(scratch.latent_q);
  const unsigned heads = static_cast<unsigned>(p.heads),
                 tokens = static_cast<unsigned>(rows.token_end - rows.token_begin);
  const bool vectors = tokens <= kVectorTokens;
  if (SharesSplits(device, rows) && (!vectors || p.batch->num_sequences > 1)) {
    args.shared_splits = device.multiprocessors / rows.tiles_per_sequence;
    args.paced = !vectors;
  }
  if (vectors) {
    Launch(&MlaLatentQueryKernel,
           {.grid = dim3(heads, tokens, kAbsorbedLatent / kLatentColumns),
            .block = dim3(kLatentThreads),
            .shared = 8 * kLatentColumns * sizeof(float),
            .early = true},
           queue, "MlaLatentQuery", args.q, query_dim, kv_b, head_rows, rows.token_begin, latent_q, args.progress,
           *p.batch);
  } else {
    Launch(
        &MlaLatentQueryTileKernel,
        {.grid = dim3(heads, kAbsorbedLatent / kLatentTileColumns, static_cast<unsigned>(CeilDiv(tokens, kTileTokens))),
         .block = dim3(kLatentTileThreads),
         .early = true},
        queue, "MlaLatentQuery", args.q, query_dim, kv_b, head_rows, rows.token_begin, static_cast<int>(tokens),
        latent_q, args.progress, *p.batch);
  }
  LaunchAbsorbed(args, *p.batch, TileRows(*p.batch, rows), true, queue);
  Launch(vectors ? &MlaFinishRowKernel : &MlaFinishTileKernel,
         {.grid = dim3(heads * kFinishBlocks, vectors ? tokens : 1),
          .block = dim3(vectors ? kFinishThreads : kFinishTileThreads),
          .shared = vectors ? sizeof(FinishShared) : sizeof(FinishTileShared),
          .cluster = kFinishBlocks,
          .early = true},
         queue, "MlaFinish", args, *p.batch, kv_b, head_rows, AsMatrix<const bf16>(p.gate), AsMatrix<bf16>(p.out));
}

// Whether all rows lie as the projections of tiles want them.
bool ProjectsTiles(const MlaAttentionParams& p) {
  return RowsAligned16(p.q) && p.out.ld % 4 == 0 && Aligned(p.out.data, 8) &&
         (!p.gate || (p.gate.ld % 4 == 0 && Aligned(p.gate.data, 8)));
}

// Rows of packed tokens [begin, end) in tiles that never hold two sequences.
MlaRows MakeRows(const SequenceBatch& batch, int64_t begin, int64_t end, int32_t heads) {
  MlaRows rows{static_cast<int>(begin), static_cast<int>(end), heads, 0, 0, false};
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
  rows.one_token_each = rows.tiles_per_sequence > 0 && end - begin == batch.num_sequences;
  return rows;
}

// Tokens [first, last) of the step in the absorbed form.
void AttendLatent(const Device& device, const MlaAttentionParams& p, const CudaLatentProjection& projection,
                  const MlaScratch& scratch, bool fast, int64_t first, int64_t last, cudaStream_t queue) {
  const SequenceBatch& batch = *p.batch;
  const int64_t element = static_cast<int64_t>(SizeOf(device.act));
  const int64_t block = BlockTokens(batch.num_tokens, p.heads, p.latent_dim, element);
  const int64_t head_rows = p.nope_dim + p.value_dim;
  for (int64_t begin = first; begin < last; begin += block) {
    const int64_t end = std::min<int64_t>(last, begin + block);
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
    gemm.b = projection.data();
    gemm.b_is_k_by_n = true;
    gemm.c = scratch.latent_q;
    gemm.ldc = int64_t{p.heads} * p.latent_dim;
    gemm.stride_c = p.latent_dim;
    Gemm(device, gemm, queue);

    const MlaRows rows = MakeRows(batch, begin, end, p.heads);
    if (fast) {
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
    gemm.b = static_cast<const char*>(projection.data()) + p.nope_dim * p.latent_dim * element;
    gemm.b_is_k_by_n = false;
    gemm.c = out.data;
    gemm.ldc = out.ld;
    gemm.stride_c = p.value_dim;
    Gemm(device, gemm, queue);
  }
}

// Sequence `sequence` with keys and values expanded, a block of keys at a time.
void AttendExpanded(const Device& device, const MlaAttentionParams& p, const CudaLatentProjection& projection,
                    const MlaScratch& scratch, int sequence, int64_t longest, cudaStream_t queue) {
  const SequenceBatch& batch = *p.batch;
  const int64_t row = batch.host_token_begin[sequence], context = batch.host_context[sequence];
  const int64_t tokens = batch.host_token_begin[sequence + 1] - row, total = context + tokens;
  const int64_t key_step = ExpandKeys(longest, p.heads);
  const int64_t query_step = key_step < total ? CarryQueries(batch.num_tokens, p.heads) : tokens;
  for (int64_t query = 0; query < tokens; query += query_step) {
    const int64_t queries = std::min(query_step, tokens - query);
    const int64_t seen = context + query + queries;
    for (int64_t key = 0; key < seen; key += key_step) {
      const int64_t keys = std::min(key_step, seen - key);
      constexpr int kGatherWarps = 8;
      Launch(&MlaGatherKernel,
             {.grid = dim3(static_cast<unsigned>(CeilDiv(keys, kGatherWarps))), .block = dim3(32 * kGatherWarps)},
             queue, "MlaGather", p.pages, batch, sequence, static_cast<int>(key), static_cast<int>(keys), kPrefillLine,
             scratch.lines, scratch.counter);
      Gemm(device,
           {.m = keys,
            .n = int64_t{p.heads} * kPrefillExpanded,
            .k = kPrefillLatent,
            .a = scratch.lines,
            .lda = kPrefillLine,
            .b = projection.data(),
            .ldb = kPrefillLatent,
            .c = scratch.expanded,
            .ldc = int64_t{p.heads} * kPrefillExpanded},
           queue);
      PrefillArgs args;
      args.out = AsMatrix<bf16>(p.out.Rows(row + query, queries));
      args.queries = static_cast<int>(queries);
      args.query_position = static_cast<int>(context + query);
      args.heads = p.heads;
      args.head_group = static_cast<int>(std::clamp<int64_t>(kGroupBytes / (keys * kPrefillExpanded * 2), 1, p.heads));
      args.keys = static_cast<int>(keys);
      args.key_position = static_cast<int>(key);
      args.scale_log2 = p.scale * 1.4426950408889634f;
      args.first = key == 0;
      args.last = key + keys == seen;
      args.carry = scratch.carry;
      args.carry_softmax = scratch.carry_softmax;
      args.counter = scratch.counter;
      const MatrixView q = p.q.Rows(row + query, queries);
      const int64_t tiles = CeilDiv(queries, kPrefillQueries) * p.heads;
      Launch(&MlaPrefillKernel,
             {.grid = dim3(static_cast<unsigned>(std::min<int64_t>(tiles, device.multiprocessors))),
              .block = dim3(kPrefillThreads),
              .shared = sizeof(PrefillShared)},
             queue, "MlaPrefill", MatrixBoxes(q.data, 1, queries * q.ld, queries, q.cols, q.ld, kPrefillQueries),
             MatrixBoxes(scratch.lines, 1, keys, kPrefillLine, kPrefillKeys),
             MatrixBoxes(scratch.expanded, 1, keys, int64_t{p.heads} * kPrefillExpanded, kPrefillKeys), args);
    }
  }
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

size_t MlaScratchBytes(const Device& device, int64_t tokens, int64_t heads, int64_t latent_dim, int64_t max_context) {
  return MlaScratch(device, nullptr, tokens, heads, latent_dim, max_context).bytes;
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

  int64_t longest = 0;  // context of the longest sequence, this step included
  for (int s = 0; s < batch.num_sequences; ++s) {
    longest =
        std::max<int64_t>(longest, batch.host_context[s] + batch.host_token_begin[s + 1] - batch.host_token_begin[s]);
  }
  const MlaScratch scratch(device, p.scratch, batch.num_tokens, p.heads, p.latent_dim, longest);
  const bool fast = device.act == DType::kBF16 && p.pages.dtype == DType::kBF16 && p.latent_dim == kAbsorbedLatent &&
                    p.rope_dim == kAbsorbedRope && Aligned(p.pages.data, 16) && p.pages.page_stride % 16 == 0;
  const bool expandable = fast && !device.batch_invariant && p.nope_dim == kPrefillNope &&
                          p.value_dim == kPrefillValue && RowsAligned16(p.q) && p.out.ld % 2 == 0 &&
                          Aligned(p.out.data, 4);
  // All of the step at once, sequences alike: decode.
  if (fast && !device.batch_invariant && p.nope_dim == kPrefillNope && p.value_dim == kPrefillValue &&
      (batch.num_tokens <= kVectorTokens || (batch.num_tokens <= kProjectTokens && ProjectsTiles(p)))) {
    const MlaRows rows = MakeRows(batch, 0, batch.num_tokens, p.heads);
    if (rows.tiles_per_sequence > 0 && (batch.num_tokens <= kVectorTokens || SharesSplits(device, rows))) {
      return AttendFew(device, p, *projection, rows, scratch, queue);
    }
  }
  const auto is_long = [&](int s) {
    return expandable && batch.host_token_begin[s + 1] - batch.host_token_begin[s] >= kExpandQueries;
  };
  for (int s = 0; s < batch.num_sequences;) {
    if (is_long(s)) {
      AttendExpanded(device, p, *projection, scratch, s, longest, queue);
      ++s;
      continue;
    }
    int end = s + 1;
    while (end < batch.num_sequences && !is_long(end)) ++end;
    AttendLatent(device, p, *projection, scratch, fast, batch.host_token_begin[s], batch.host_token_begin[end], queue);
    s = end;
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
