#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/core/bfloat16.h"
#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

struct MlaShape {
  int32_t heads = 2, nope = 128, rope = 64, latent = 512, value = 128;
  int32_t page_size = 64;
  int64_t line() const { return latent + rope; }
};

class MlaTest : public OpTest {
 protected:
  struct Weights {
    std::vector<float> kv_b, norm;
    std::unique_ptr<LatentProjection> projection;
    std::unique_ptr<DeviceArray<float>> device_norm;
  };
  Weights MakeWeights(const MlaShape& s, uint32_t seed) {
    Random random(seed);
    Weights w;
    const int64_t rows = int64_t{s.heads} * (s.nope + s.value);
    w.kv_b = Round(random.Normal(rows * s.latent, 0.05f), DType::kBF16);
    const OwnedTensor tensor = MakeTensor(w.kv_b, DType::kBF16, {rows, s.latent}, "kv_b");
    w.projection = ops().MakeLatentProjection(tensor.tensor, s.heads, s.nope, s.value);
    w.norm = random.Normal(s.latent, 0.2f, 1);
    w.device_norm = std::make_unique<DeviceArray<float>>(ops(), w.norm);
    return w;
  }

  // All tokens of one sequence.
  struct Sequence {
    int64_t length = 0;
    std::vector<float> kv_a, q, gate;
    std::vector<int32_t> pages;
  };
  Sequence MakeSequence(const MlaShape& s, int64_t length, uint32_t seed, std::vector<int32_t> pages) const {
    Random random(seed);
    Sequence q;
    q.length = length;
    q.kv_a = Round(random.Normal(length * s.line(), 1.5f), act());
    q.q = Round(random.Normal(length * s.heads * (s.nope + s.rope), 1.0f), act());
    q.gate = Round(random.Normal(length * s.heads * s.value), act());
    q.pages = std::move(pages);
    return q;
  }

  struct Pool {
    Pool(Ops& ops, const MlaShape& s, int pages, DType dtype)
        : stride(s.page_size * s.line() * static_cast<int64_t>(SizeOf(dtype)) + 128),
          bytes(ops, static_cast<size_t>(stride * pages)),
          pages{bytes.data(), dtype, stride, s.page_size} {}
    int64_t stride;
    DeviceBytes bytes;
    MlaPages pages;
  };

  // Appends tokens [0, count[i]) of each sequence.
  void AppendOnly(const MlaShape& s, const Weights& w, const std::vector<const Sequence*>& sequences,
                  const std::vector<int64_t>& count, Pool& pool) {
    std::vector<SequenceSpec> specs;
    std::vector<float> kv_a;
    for (size_t i = 0; i < sequences.size(); ++i) {
      specs.push_back({static_cast<int32_t>(count[i]), 0, 0, sequences[i]->pages});
      const std::vector<float> lines = Slice(sequences[i]->kv_a, s.line(), 0, count[i]);
      kv_a.insert(kv_a.end(), lines.begin(), lines.end());
    }
    const DeviceBatch batch(ops(), specs);
    const DeviceMatrix device_kv(ops(), act(), batch.tokens(), s.line(), kv_a);
    MlaAppendParams params;
    params.batch = batch.get();
    params.kv_a = device_kv;
    params.norm_weight = w.device_norm->data();
    params.norm_eps = 1e-6f;
    params.latent_dim = s.latent;
    params.rope_dim = s.rope;
    params.pages = pool.pages;
    ops().MlaAppend(params, ops().stream());
    ops().Synchronize(ops().stream());
  }

  // Appends and attends tokens [begin[i], begin[i] + count[i]) of each sequence in one step.
  std::vector<float> Step(const MlaShape& s, const Weights& w, const std::vector<const Sequence*>& sequences,
                          const std::vector<int64_t>& begin, const std::vector<int64_t>& count, Pool& pool,
                          bool gated = true) {
    std::vector<SequenceSpec> specs;
    std::vector<float> kv_a, q, gate;
    const auto append = [](std::vector<float>& to, const std::vector<float>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& seq = *sequences[i];
      specs.push_back({static_cast<int32_t>(count[i]), static_cast<int32_t>(begin[i]), 0, seq.pages});
      append(kv_a, Slice(seq.kv_a, s.line(), begin[i], count[i]));
      append(q, Slice(seq.q, s.heads * (s.nope + s.rope), begin[i], count[i]));
      append(gate, Slice(seq.gate, s.heads * s.value, begin[i], count[i]));
    }
    const DeviceBatch batch(ops(), specs);
    const int64_t tokens = batch.tokens();
    const DeviceMatrix device_kv(ops(), act(), tokens, s.line(), kv_a);
    const DeviceMatrix device_q(ops(), act(), tokens, s.heads * (s.nope + s.rope), q);
    const DeviceMatrix device_gate(ops(), act(), tokens, s.heads * s.value, gate);
    const DeviceMatrix out(ops(), act(), tokens, s.heads * s.value);
    MlaAppendParams append_params;
    append_params.batch = batch.get();
    append_params.kv_a = device_kv;
    append_params.norm_weight = w.device_norm->data();
    append_params.norm_eps = 1e-6f;
    append_params.latent_dim = s.latent;
    append_params.rope_dim = s.rope;
    append_params.pages = pool.pages;
    ops().MlaAppend(append_params, ops().stream());
    const DeviceBytes scratch(ops(), ops().MlaScratchBytes(tokens, static_cast<int64_t>(sequences.size()), s.heads,
                                                           s.latent, s.rope, s.nope, s.value, 1 << 14));
    MlaAttentionParams params;
    params.batch = batch.get();
    params.heads = s.heads;
    params.nope_dim = s.nope;
    params.rope_dim = s.rope;
    params.latent_dim = s.latent;
    params.value_dim = s.value;
    params.q = device_q;
    params.projection = w.projection.get();
    if (gated) params.gate = device_gate;
    params.scale = static_cast<float>(1 / std::sqrt(double{1.0} * (s.nope + s.rope)));
    params.pages = pool.pages;
    params.out = out;
    params.scratch = scratch.data();
    ops().MlaAttention(params, ops().stream());
    return out.Get();
  }

  // Expected outputs of tokens [begin, begin + count).
  oracle::Doubles Expected(const MlaShape& s, const Weights& w, const Sequence& seq, int64_t begin, int64_t count,
                           DType cache, bool gated = true) const {
    oracle::MlaInput in;
    in.tokens = count;
    in.context = begin;
    in.heads = s.heads;
    in.nope = s.nope;
    in.rope = s.rope;
    in.latent = s.latent;
    in.value = s.value;
    in.q = Slice(seq.q, s.heads * (s.nope + s.rope), begin, count);
    if (gated) in.gate = Slice(seq.gate, s.heads * s.value, begin, count);
    in.kv_b = w.kv_b;
    in.scale = double{static_cast<float>(1 / std::sqrt(double{1.0} * (s.nope + s.rope)))};
    for (int64_t t = 0; t < begin + count; ++t) {
      const oracle::Doubles raw = oracle::ToDouble(Slice(seq.kv_a, s.line(), t, 1));
      const oracle::Doubles latent(raw.begin(), raw.begin() + s.latent);
      oracle::Doubles line = oracle::RmsNorm(latent, w.norm, double{1e-6f}, 1, s.latent);
      line.insert(line.end(), raw.begin() + s.latent, raw.end());
      if (cache == DType::kBF16) {
        for (double& x : line) x = double{Bf16ToFloat(FloatToBf16(static_cast<float>(x)))};
      }
      in.lines.insert(in.lines.end(), line.begin(), line.end());
    }
    return oracle::Mla(in);
  }
  DType cache_dtype() const { return act(); }
  // Scores pass through exp, which multiplies their error by their size.
  double mla_tolerance() const { return 5 * tolerance(); }
};
K3_INSTANTIATE_OPS(MlaTest);

std::vector<int32_t> Pages(std::initializer_list<int32_t> ids) { return ids; }

TEST_P(MlaTest, MatchesTheOracleAtEveryLength) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 1);
  for (int64_t length : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300}) {
    const Sequence seq = MakeSequence(s, length, static_cast<uint32_t>(length), Pages({5, 0, 7, 2, 6}));
    Pool pool(ops(), s, 8, cache_dtype());
    const std::vector<float> out = Step(s, w, {&seq}, {0}, {length}, pool);
    ExpectClose(out, Expected(s, w, seq, 0, length, cache_dtype()), mla_tolerance(),
                std::to_string(length) + " tokens");
  }
}

TEST_P(MlaTest, DecodesOverALongContext) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 2);
  const int64_t length = slow() ? 300 : 1500;
  std::vector<int32_t> pages(24);
  std::iota(pages.rbegin(), pages.rend(), 0);
  const Sequence seq = MakeSequence(s, length, 3, pages);
  Pool pool(ops(), s, 24, cache_dtype());
  Step(s, w, {&seq}, {0}, {length - 3}, pool);
  for (int64_t t = length - 3; t < length; ++t) {
    const std::vector<float> out = Step(s, w, {&seq}, {t}, {1}, pool);
    ExpectClose(out, Expected(s, w, seq, t, 1, cache_dtype()), mla_tolerance(), "position " + std::to_string(t));
  }
}

TEST_P(MlaTest, SequencesOfOneStepAreIndependent) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 4);
  // Pages interleave; contexts were appended in earlier steps.
  const Sequence a = MakeSequence(s, 70, 5, Pages({0, 3})), b = MakeSequence(s, 1, 6, Pages({1})),
                 c = MakeSequence(s, 200, 7, Pages({2, 4, 5, 6}));
  Pool pool(ops(), s, 9, cache_dtype());
  Step(s, w, {&c}, {0}, {190}, pool);
  const std::vector<float> out = Step(s, w, {&a, &b, &c}, {0, 0, 190}, {70, 1, 10}, pool);
  const int64_t width = s.heads * s.value;
  ExpectClose(Slice(out, width, 0, 70), Expected(s, w, a, 0, 70, cache_dtype()), mla_tolerance(), "first");
  ExpectClose(Slice(out, width, 70, 1), Expected(s, w, b, 0, 1, cache_dtype()), mla_tolerance(), "second");
  ExpectClose(Slice(out, width, 71, 10), Expected(s, w, c, 190, 10, cache_dtype()), mla_tolerance(), "third");
}

// Devices deal their blocks out to sequences by their lengths.
TEST_P(MlaTest, DecodesManySequencesOfUnevenLength) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 40);
  std::vector<Sequence> sequences;
  int32_t page = 0;
  for (int64_t length : {1, 2900, 64,  65, 700, 1500, 3, 128, 2049, 1000, 1,   1,  640, 63, 1111, 2500, 2, 90,
                         1, 200,  129, 17, 31,  64,   5, 1,   300,  8,    150, 66, 191, 40, 2,    77,   1, 260,
                         9, 70,   33,  1,  65,  2,    4, 80,  12,   1,    48,  3,  100, 7,  66,   21,   1, 5,
                         2, 11,   130, 6,  1,   90,   3, 14,  64,   1,    2,   19, 8,   63, 1,    40,   5, 68}) {
    std::vector<int32_t> pages(static_cast<size_t>((length + s.page_size - 1) / s.page_size));
    std::iota(pages.rbegin(), pages.rend(), page);
    page += static_cast<int32_t>(pages.size());
    sequences.push_back(MakeSequence(s, length, static_cast<uint32_t>(41 + page), pages));
  }
  Pool pool(ops(), s, page, cache_dtype());
  // Devices have kernels of their own for 32 tokens at a time and for up to 4, and do not split keys of very many.
  for (const size_t count : {sequences.size(), size_t{36}, size_t{16}, size_t{5}, size_t{2}}) {
    std::vector<const Sequence*> batch;
    std::vector<int64_t> context;
    for (size_t i = 0; i < count; ++i) {
      batch.push_back(&sequences[i]);
      context.push_back(sequences[i].length - 1);
    }
    AppendOnly(s, w, batch, context, pool);
    const std::vector<float> out = Step(s, w, batch, context, std::vector<int64_t>(count, 1), pool);
    for (size_t i = 0; i < count; ++i) {
      ExpectClose(Slice(out, s.heads * s.value, static_cast<int64_t>(i), 1),
                  Expected(s, w, sequences[i], context[i], 1, cache_dtype()), mla_tolerance(),
                  "sequence " + std::to_string(i) + " of " + std::to_string(count));
    }
    EXPECT_EQ(Step(s, w, batch, context, std::vector<int64_t>(count, 1), pool), out) << "not the same bits again";
  }
}

// More than 32 and more than 64 rows of a sequence.
TEST_P(MlaTest, DecodesManyHeads) {
  MlaShape s;
  s.heads = 40;
  const Weights w = MakeWeights(s, 70);
  const Sequence a = MakeSequence(s, 130, 71, Pages({3, 1, 0})), b = MakeSequence(s, 7, 72, Pages({2}));
  Pool pool(ops(), s, 4, cache_dtype());
  for (const int64_t tokens : {1, 2}) {
    AppendOnly(s, w, {&a, &b}, {130 - tokens, 7 - tokens}, pool);
    const std::vector<float> out = Step(s, w, {&a, &b}, {130 - tokens, 7 - tokens}, {tokens, tokens}, pool);
    const int64_t width = s.heads * s.value;
    ExpectClose(Slice(out, width, 0, tokens), Expected(s, w, a, 130 - tokens, tokens, cache_dtype()), mla_tolerance(),
                "first, tokens: " + std::to_string(tokens));
    ExpectClose(Slice(out, width, tokens, tokens), Expected(s, w, b, 7 - tokens, tokens, cache_dtype()),
                mla_tolerance(), "second, tokens: " + std::to_string(tokens));
  }
}

// The same where a sequence has several tiles of rows.
TEST_P(MlaTest, DecodesManyTilesOfUnevenLength) {
  const std::vector<int64_t> lengths = {700, 3, 64, 1100, 65, 129, 9};
  for (const auto& [heads, tokens] : {std::pair<int32_t, int64_t>{40, 1}, {80, 1}, {32, 3}}) {
    MlaShape s;
    s.heads = heads;
    const Weights w = MakeWeights(s, 75);
    std::vector<Sequence> sequences;
    int32_t page = 0;
    for (const int64_t length : lengths) {
      std::vector<int32_t> pages(static_cast<size_t>((length + s.page_size - 1) / s.page_size));
      std::iota(pages.rbegin(), pages.rend(), page);
      page += static_cast<int32_t>(pages.size());
      sequences.push_back(MakeSequence(s, length, static_cast<uint32_t>(76 + page), pages));
    }
    Pool pool(ops(), s, page, cache_dtype());
    std::vector<const Sequence*> batch;
    std::vector<int64_t> context;
    for (const Sequence& sequence : sequences) {
      batch.push_back(&sequence);
      context.push_back(sequence.length - tokens);
    }
    AppendOnly(s, w, batch, context, pool);
    const std::vector<int64_t> each(batch.size(), tokens);
    const std::vector<float> out = Step(s, w, batch, context, each, pool);
    for (size_t i = 0; i < batch.size(); ++i) {
      ExpectClose(Slice(out, s.heads * s.value, static_cast<int64_t>(i) * tokens, tokens),
                  Expected(s, w, sequences[i], context[i], tokens, cache_dtype()), mla_tolerance(),
                  "sequence " + std::to_string(i) + ", heads: " + std::to_string(heads));
    }
    EXPECT_EQ(Step(s, w, batch, context, each, pool), out) << "not the same bits again";
  }
}

TEST_P(MlaTest, WorksWithoutGate) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 8);
  const Sequence seq = MakeSequence(s, 20, 9, Pages({1}));
  Pool pool(ops(), s, 2, cache_dtype());
  ExpectClose(Step(s, w, {&seq}, {0}, {20}, pool, false), Expected(s, w, seq, 0, 20, cache_dtype(), false),
              mla_tolerance());
}

TEST_P(MlaTest, OddShapesOnTheCpu) {
  if (!ops().is_cpu()) GTEST_SKIP() << "device kernels are made for the released head shapes";
  for (const MlaShape& s :
       {MlaShape{3, 24, 10, 50, 20, 16}, MlaShape{1, 5, 1, 7, 3, 1}, MlaShape{11, 16, 8, 40, 16, 64}}) {
    const Weights w = MakeWeights(s, 10);
    const int64_t length = 40;
    std::vector<int32_t> pages(static_cast<size_t>(length / s.page_size + 1));
    std::iota(pages.begin(), pages.end(), 0);
    const Sequence seq = MakeSequence(s, length, 11, pages);
    Pool pool(ops(), s, static_cast<int>(pages.size()), DType::kF32);
    ExpectClose(Step(s, w, {&seq}, {0}, {length}, pool), Expected(s, w, seq, 0, length, DType::kF32), mla_tolerance(),
                std::to_string(s.heads) + " heads");
  }
}

TEST_P(MlaTest, Bf16CacheOnTheCpu) {
  if (!ops().is_cpu()) GTEST_SKIP() << "covered by the other tests";
  const MlaShape s;
  const Weights w = MakeWeights(s, 12);
  const Sequence seq = MakeSequence(s, 90, 13, Pages({1, 0}));
  Pool pool(ops(), s, 2, DType::kBF16);
  // Single elements of a line may round to the other side of the oracle's.
  ExpectClose(Step(s, w, {&seq}, {0}, {90}, pool), Expected(s, w, seq, 0, 90, DType::kBF16), 2e-4);
}

TEST_P(MlaTest, ChunksAndPageSizesDoNotChangeAnyBit) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  MlaShape s;
  const Weights w = MakeWeights(s, 14);
  const int64_t length = 330;
  std::vector<float> expected;
  for (const int32_t page_size : {64, 16}) {
    s.page_size = page_size;
    std::vector<int32_t> pages(static_cast<size_t>((length + page_size - 1) / page_size));
    std::iota(pages.rbegin(), pages.rend(), 0);
    const Sequence seq = MakeSequence(s, length, 15, pages);
    for (int64_t chunk : {length, int64_t{1}, int64_t{7}, int64_t{16}, int64_t{64}, int64_t{65}, int64_t{128}}) {
      if (slow() && chunk != length && chunk != 65) continue;
      Pool pool(ops(), s, static_cast<int>(pages.size()), cache_dtype());
      std::vector<float> out;
      for (int64_t begin = 0; begin < length; begin += chunk) {
        const std::vector<float> part = Step(s, w, {&seq}, {begin}, {std::min(chunk, length - begin)}, pool);
        out.insert(out.end(), part.begin(), part.end());
      }
      if (expected.empty()) expected = out;
      ExpectSameBits(out, expected, "chunk " + std::to_string(chunk) + ", page size " + std::to_string(page_size));
    }
  }
}

TEST_P(MlaTest, BatchNeighboursDoNotChangeAnyBit) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  const MlaShape s;
  const Weights w = MakeWeights(s, 16);
  const Sequence a = MakeSequence(s, 140, 17, Pages({0, 1, 2})), b = MakeSequence(s, 30, 18, Pages({3}));
  Pool alone(ops(), s, 4, cache_dtype()), together(ops(), s, 4, cache_dtype());
  Step(s, w, {&a}, {0}, {139}, alone);
  const std::vector<float> expected = Step(s, w, {&a}, {139}, {1}, alone);
  Step(s, w, {&a}, {0}, {139}, together);
  const std::vector<float> out = Step(s, w, {&b, &a}, {0, 139}, {30, 1}, together);
  ExpectSameBits(Slice(out, s.heads * s.value, 30, 1), expected);
}

TEST_P(MlaTest, LargeScoresDoNotOverflow) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 19);
  Sequence seq = MakeSequence(s, 100, 20, Pages({0, 1}));
  for (float& x : seq.q) x *= 64;  // scores in the hundreds
  Pool pool(ops(), s, 2, cache_dtype());
  const std::vector<float> out = Step(s, w, {&seq}, {0}, {100}, pool);
  EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
  if (act() == DType::kF32) ExpectClose(out, Expected(s, w, seq, 0, 100, cache_dtype()), 64 * mla_tolerance());
}

TEST_P(MlaTest, AppendWritesOnlyItsLines) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 21);
  const Sequence seq = MakeSequence(s, 70, 22, Pages({2, 0}));
  Pool pool(ops(), s, 3, cache_dtype());
  Step(s, w, {&seq}, {0}, {70}, pool);
  const std::vector<uint8_t> bytes = pool.bytes.Download();
  const int64_t line_bytes = s.line() * static_cast<int64_t>(SizeOf(cache_dtype()));
  const auto untouched = [&](int64_t begin, int64_t end) {
    return std::all_of(bytes.begin() + begin, bytes.begin() + end, [](uint8_t b) { return b == 0xFF; });
  };
  EXPECT_TRUE(untouched(pool.stride, 2 * pool.stride)) << "a foreign page";
  EXPECT_TRUE(untouched(6 * line_bytes, pool.stride)) << "lines after the sequence's end";
  EXPECT_TRUE(untouched(2 * pool.stride + 64 * line_bytes, 3 * pool.stride)) << "the gap after a page";
}

// B07: sequences whose pages are -1 write nothing and disturb nobody.
TEST_P(MlaTest, PaddingHasNoPages) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 31);
  for (int64_t tokens : {1, 70}) {
    const Sequence real = MakeSequence(s, 70, 32, Pages({2, 0})), padding = MakeSequence(s, 1, 33, Pages({-1}));
    Pool alone(ops(), s, 4, cache_dtype()), padded(ops(), s, 4, cache_dtype());
    for (Pool* pool : {&alone, &padded}) {
      if (tokens < 70) Step(s, w, {&real}, {0}, {70 - tokens}, *pool);
    }
    const std::vector<float> expected = Step(s, w, {&real}, {70 - tokens}, {tokens}, alone);
    std::vector<float> out = Step(s, w, {&real, &padding, &padding, &padding, &padding}, {70 - tokens, 0, 0, 0, 0},
                                  {tokens, 1, 1, 1, 1}, padded);
    for (float value : out) EXPECT_TRUE(std::isfinite(value)) << tokens << " tokens";
    out.resize(expected.size());
    ExpectClose(out, oracle::ToDouble(expected), mla_tolerance(), std::to_string(tokens) + " tokens");
    EXPECT_EQ(padded.bytes.Download(), alone.bytes.Download()) << tokens << " tokens";
  }
}

TEST_P(MlaTest, WrongShapesAreRefusedWithNumbers) {
  const MlaShape s;
  const Weights w = MakeWeights(s, 23);
  const Sequence seq = MakeSequence(s, 2, 24, Pages({0}));
  Pool pool(ops(), s, 1, cache_dtype());
  pool.pages.page_stride = 100;
  try {
    Step(s, w, {&seq}, {0}, {2}, pool);
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("100"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace k3::testing
