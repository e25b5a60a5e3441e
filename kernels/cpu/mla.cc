#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

// MLA over the latent cache, absorbed form (spec 3.4): queries are taken into the latent space, attend to the cache
// lines themselves, and the mixed latents are taken to values. The softmax runs over blocks of kMlaBlock positions
// anchored at position 0; each block is reduced by itself and merged in ascending order, so that a row depends on its
// own position only, and blocks of a long context can be computed in parallel.
namespace k3 {
namespace {

constexpr int kTileRows = 16;    // (token, head) rows that walk the cache together
constexpr int kWaveBlocks = 32;  // blocks whose partial results are kept at once when a tile is split over threads

// What padding, whose pages are -1, attends to.
constexpr int64_t kMostLine = 16384;  // elements
alignas(64) constexpr float kNoLine[kMostLine] = {};

struct MlaShape {
  int64_t tokens, heads, latent, rope, nope, value;
  int64_t line() const { return latent + rope; }
};

// Partial softmax of one block for the rows of a tile.
struct BlockResult {
  float* out;  // [kTileRows, latent]
  float* max;  // [kTileRows]
  float* sum;  // [kTileRows]
};

// One function lays out the scratch and thereby says its size.
struct MlaScratch {
  float* q;     // [T, H, latent + rope] queries in the latent space
  float* mix;   // [T, H, latent] attention output in the latent space
  float* tile;  // [threads][ scores [kTileRows, kMlaBlock], result of one block ]
  float* wave;  // [kWaveBlocks] results of one block
  int64_t block_floats;
  int64_t tile_floats;
  size_t bytes;

  MlaScratch(void* base, const MlaShape& shape, int threads) {
    block_floats = kTileRows * (shape.latent + 2);
    tile_floats = kTileRows * kMlaBlock + block_floats;
    size_t offset = 0;
    const auto take = [&](float*& pointer, int64_t count) {
      pointer = base != nullptr ? reinterpret_cast<float*>(static_cast<char*>(base) + offset) : nullptr;
      offset += (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
    };
    take(q, shape.tokens * shape.heads * shape.line());
    take(mix, shape.tokens * shape.heads * shape.latent);
    take(tile, threads * tile_floats);
    take(wave, kWaveBlocks * block_floats);
    bytes = offset;
  }

  float* scores(int thread) const { return tile + thread * tile_floats; }
  BlockResult ThreadResult(int thread, int64_t latent) const {
    return Result(scores(thread) + kTileRows * kMlaBlock, latent);
  }
  BlockResult WaveResult(int64_t index, int64_t latent) const { return Result(wave + index * block_floats, latent); }

 private:
  static BlockResult Result(float* p, int64_t latent) {
    return {p, p + kTileRows * latent, p + kTileRows * (latent + 1)};
  }
};

// Consecutive rows of one sequence: heads [head, head + heads) of tokens [token, token + tokens).
struct Tile {
  int32_t sequence, token, tokens, head, heads;
  int rows() const { return tokens * heads; }
};

std::vector<Tile> MakeTiles(const SequenceBatch& batch, int32_t heads) {
  std::vector<Tile> tiles;
  const int32_t tile_heads = std::min(heads, kTileRows);
  const int32_t tile_tokens = kTileRows / tile_heads;
  for (int32_t s = 0; s < batch.num_sequences; ++s) {
    for (int32_t t = batch.token_begin[s]; t < batch.token_begin[s + 1]; t += tile_tokens) {
      const int32_t tokens = std::min(tile_tokens, batch.token_begin[s + 1] - t);
      for (int32_t h = 0; h < heads; h += tile_heads) {
        tiles.push_back({s, t, tokens, h, std::min(tile_heads, heads - h)});
      }
    }
  }
  return tiles;
}

class TileAttention {
 public:
  TileAttention(const KernelTable& kernels, const MlaAttentionParams& p, const MlaScratch& scratch, const Tile& tile)
      : kernels_(kernels), p_(p), scratch_(scratch), tile_(tile), line_(p.latent_dim + p.rope_dim) {}

  int64_t blocks() const { return (p_.batch->position[tile_.token + tile_.tokens - 1] + kMlaBlock) / kMlaBlock; }

  // The block's own softmax and weighted sum of lines, for the rows that reach it.
  void RunBlock(int64_t block, int thread, const BlockResult& result) const {
    const int64_t first_position = block * kMlaBlock;
    const int skip = FirstRow(block);
    const int rows = tile_.rows() - skip;
    const float* q[kTileRows];
    float* scores[kTileRows];
    float* out[kTileRows];
    int counts[kTileRows];
    for (int r = 0; r < rows; ++r) {
      const int64_t row = Row(skip + r);
      q[r] = scratch_.q + row * line_;
      scores[r] = scratch_.scores(thread) + r * kMlaBlock;
      out[r] = result.out + (skip + r) * p_.latent_dim;
      counts[r] = static_cast<int>(std::min<int64_t>(kMlaBlock, Position(skip + r) + 1 - first_position));
    }
    const void* lines[kMlaBlock];
    const int keys = counts[rows - 1];
    for (int j = 0; j < keys; ++j) lines[j] = Line(first_position + j);
    kernels_.mla_scores(q, rows, lines, p_.pages.dtype, keys, line_, p_.scale, scores);
    for (int r = 0; r < rows; ++r) {
      kernels_.mla_softmax(scores[r], counts[r], &result.max[skip + r], &result.sum[skip + r]);
    }
    kernels_.mla_values(scores, counts, rows, lines, p_.pages.dtype, p_.latent_dim, out);
  }

  // Merges a block into the running softmax of the row; blocks come in ascending order.
  void MergeBlock(int64_t block, const BlockResult& result, float* max, float* sum) const {
    for (int r = FirstRow(block); r < tile_.rows(); ++r) {
      float* mix = scratch_.mix + Row(r) * p_.latent_dim;
      const float* out = result.out + r * p_.latent_dim;
      if (block == 0) {
        std::memcpy(mix, out, static_cast<size_t>(p_.latent_dim) * sizeof(float));
        max[r] = result.max[r];
        sum[r] = result.sum[r];
        continue;
      }
      const float top = std::max(max[r], result.max[r]);
      float factors[2] = {max[r] - top, result.max[r] - top};
      kernels_.exp(factors, 2, factors);
      kernels_.scale_add(mix, factors[0], out, factors[1], p_.latent_dim);
      sum[r] = std::fma(result.sum[r], factors[1], sum[r] * factors[0]);
      max[r] = top;
    }
  }

  void Finish(const float* sum) const {
    for (int r = 0; r < tile_.rows(); ++r) {
      float* mix = scratch_.mix + Row(r) * p_.latent_dim;
      const float inverse = 1.0f / sum[r];
      for (int32_t c = 0; c < p_.latent_dim; ++c) mix[c] *= inverse;
    }
  }

 private:
  // Row (token, head) of the step's [T, H] matrices; positions ascend with r.
  int64_t Row(int r) const { return int64_t{tile_.token + r / tile_.heads} * p_.heads + tile_.head + r % tile_.heads; }
  int64_t Position(int r) const { return p_.batch->position[tile_.token + r / tile_.heads]; }
  int FirstRow(int64_t block) const {
    int r = 0;
    while (Position(r) < block * kMlaBlock) r += tile_.heads;
    return r;
  }
  const void* Line(int64_t position) const {
    const int32_t page =
        p_.batch->page_table[tile_.sequence * p_.batch->page_table_stride + position / p_.pages.page_size];
    if (page < 0) return kNoLine;
    return static_cast<const char*>(p_.pages.data) + page * p_.pages.page_stride +
           position % p_.pages.page_size * line_ * static_cast<int64_t>(SizeOf(p_.pages.dtype));
  }

  const KernelTable& kernels_;
  const MlaAttentionParams& p_;
  const MlaScratch& scratch_;
  const Tile& tile_;
  const int64_t line_;
};

void CheckPages(const char* op, const MlaPages& pages, int64_t line, const SequenceBatch* batch) {
  CheckPointer(op, "batch", batch);
  CheckPointer(op, "pages.data", pages.data);
  CheckTrue(pages.dtype == DType::kF32 || pages.dtype == DType::kBF16, op,
            std::string("pages.dtype must be F32 or BF16, got ") + Name(pages.dtype));
  CheckTrue(line <= kMostLine, op,
            "a line has " + std::to_string(line) + " elements, at most " + std::to_string(kMostLine) + " are possible");
  CheckTrue(pages.page_size > 0, op, "page_size must be positive, got " + std::to_string(pages.page_size));
  const int64_t needed = pages.page_size * line * static_cast<int64_t>(SizeOf(pages.dtype));
  CheckTrue(
      pages.page_stride >= needed, op,
      "page_stride " + std::to_string(pages.page_stride) + " is below the page's " + std::to_string(needed) + " bytes");
  for (const auto& [name, pointer] : {std::pair<const char*, const void*>{"token_begin", batch->token_begin},
                                      {"page_table", batch->page_table},
                                      {"sequence_of_token", batch->sequence_of_token},
                                      {"position", batch->position}}) {
    CheckPointer(op, name, pointer);
  }
}

}  // namespace

size_t CpuOps::MlaScratchBytes(int64_t tokens, int64_t, int32_t heads, int32_t latent_dim, int32_t rope_dim,
                               int32_t nope_dim, int32_t value_dim, int64_t) const {
  return MlaScratch(nullptr, {tokens, heads, latent_dim, rope_dim, nope_dim, value_dim}, pool_.threads()).bytes;
}

void CpuOps::MlaAppend(const MlaAppendParams& p, Stream) {
  if (p.batch != nullptr && p.batch->num_tokens == 0) return;
  const int64_t line = p.latent_dim + p.rope_dim;
  CheckPages("MlaAppend", p.pages, line, p.batch);
  const SequenceBatch& batch = *p.batch;
  CheckMatrix("MlaAppend", "kv_a", p.kv_a, batch.num_tokens, line, DType::kF32);
  CheckPointer("MlaAppend", "norm_weight", p.norm_weight);
  ForRows(batch.num_tokens, 2 * line, [&](int64_t begin, int64_t end, int thread) {
    float* narrow = ThreadFloats(thread, line);
    for (int64_t t = begin; t < end; ++t) {
      const float* source = p.kv_a.as<float>() + t * p.kv_a.ld;
      const int64_t position = batch.position[t];
      const int32_t page =
          batch.page_table[batch.sequence_of_token[t] * batch.page_table_stride + position / p.pages.page_size];
      if (page < 0) continue;
      char* target = static_cast<char*>(p.pages.data) + page * p.pages.page_stride +
                     position % p.pages.page_size * line * static_cast<int64_t>(SizeOf(p.pages.dtype));
      float* out = p.pages.dtype == DType::kF32 ? reinterpret_cast<float*>(target) : narrow;
      kernels_.rms_norm(source, p.norm_weight, p.norm_eps, p.latent_dim, out);
      std::memcpy(out + p.latent_dim, source + p.latent_dim, static_cast<size_t>(p.rope_dim) * sizeof(float));
      if (out == narrow) kernels_.narrow_bf16(narrow, line, reinterpret_cast<uint16_t*>(target));
    }
  });
}

void CpuOps::MlaAttention(const MlaAttentionParams& p, Stream) {
  if (p.batch != nullptr && p.batch->num_tokens == 0) return;
  const char* op = "MlaAttention";
  const MlaShape shape{
      p.batch != nullptr ? p.batch->num_tokens : 0, p.heads, p.latent_dim, p.rope_dim, p.nope_dim, p.value_dim};
  CheckPages(op, p.pages, shape.line(), p.batch);
  const SequenceBatch& batch = *p.batch;
  CheckPointer(op, "projection", p.projection);
  CheckPointer(op, "scratch", p.scratch);
  const auto& projection = static_cast<const CpuLatentProjection&>(*p.projection);
  CheckEqual(op, "projection heads", projection.heads, p.heads);
  CheckEqual(op, "projection nope_dim", projection.nope_dim, p.nope_dim);
  CheckEqual(op, "projection value_dim", projection.value_dim, p.value_dim);
  CheckEqual(op, "projection latent_dim", projection.latent_dim, p.latent_dim);
  const int64_t query_width = p.nope_dim + p.rope_dim;
  CheckMatrix(op, "q", p.q, shape.tokens, p.heads * query_width, DType::kF32);
  if (p.gate) CheckMatrix(op, "gate", p.gate, shape.tokens, p.heads * shape.value, DType::kF32);
  CheckMatrix(op, "out", p.out, shape.tokens, p.heads * shape.value, DType::kF32);

  const MlaScratch s(p.scratch, shape, pool_.threads());
  const int64_t line = shape.line();
  for (int32_t h = 0; h < p.heads; ++h) {
    Multiply(projection.keys[static_cast<size_t>(h)], p.q.as<float>() + h * query_width, p.q.ld, s.q + h * line,
             p.heads * line, shape.tokens, false);
    for (int64_t t = 0; t < shape.tokens; ++t) {
      std::memcpy(s.q + (t * p.heads + h) * line + p.latent_dim,
                  p.q.as<float>() + t * p.q.ld + h * query_width + p.nope_dim,
                  static_cast<size_t>(p.rope_dim) * sizeof(float));
    }
  }

  const std::vector<Tile> tiles = MakeTiles(batch, p.heads);
  const int64_t block_work = int64_t{kTileRows} * kMlaBlock * (line + p.latent_dim);
  int64_t total_blocks = 0;
  for (const Tile& tile : tiles) total_blocks += TileAttention(kernels_, p, s, tile).blocks();
  const int64_t tile_count = static_cast<int64_t>(tiles.size());
  if (tile_count < pool_.threads() && total_blocks > 2 * tile_count) {
    // Few rows, long contexts: the blocks of a tile in parallel, a wave at a time.
    for (const Tile& tile : tiles) {
      const TileAttention attention(kernels_, p, s, tile);
      float max[kTileRows], sum[kTileRows];
      for (int64_t begin = 0; begin < attention.blocks(); begin += kWaveBlocks) {
        const int64_t count = std::min<int64_t>(kWaveBlocks, attention.blocks() - begin);
        ForTasks(count, block_work,
                 [&](int64_t i, int thread) { attention.RunBlock(begin + i, thread, s.WaveResult(i, p.latent_dim)); });
        for (int64_t i = 0; i < count; ++i) attention.MergeBlock(begin + i, s.WaveResult(i, p.latent_dim), max, sum);
      }
      attention.Finish(sum);
    }
  } else {
    ForTasks(tile_count, block_work * total_blocks / tile_count, [&](int64_t i, int thread) {
      // Late tiles see the longest contexts: they go first, so that the threads end together.
      const TileAttention attention(kernels_, p, s, tiles[static_cast<size_t>(tile_count - 1 - i)]);
      const BlockResult result = s.ThreadResult(thread, p.latent_dim);
      float max[kTileRows], sum[kTileRows];
      for (int64_t block = 0; block < attention.blocks(); ++block) {
        attention.RunBlock(block, thread, result);
        attention.MergeBlock(block, result, max, sum);
      }
      attention.Finish(sum);
    });
  }

  for (int32_t h = 0; h < p.heads; ++h) {
    Multiply(projection.values[static_cast<size_t>(h)], s.mix + h * p.latent_dim, p.heads * p.latent_dim,
             p.out.as<float>() + h * p.value_dim, p.out.ld, shape.tokens, false);
  }
  if (p.gate) {
    const int64_t width = p.heads * shape.value;
    ForRows(shape.tokens, 20 * width, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        kernels_.mul_sigmoid(p.out.as<float>() + t * p.out.ld, p.gate.as<float>() + t * p.gate.ld, width);
      }
    });
  }
}

}  // namespace k3
