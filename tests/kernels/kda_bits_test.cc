#include "tests/kernels/kda_fixture.h"

namespace k3::testing {
namespace {

// What must not change any bit of an answer: cuts, company, repetition, drafts that are taken back.
class KdaBitsTest : public KdaTest {};
K3_INSTANTIATE_OPS(KdaBitsTest);

TEST_P(KdaBitsTest, ChunksDoNotChangeAnyBit) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  const KdaShape shape{2, 100, 4};
  if (!ops().is_cpu()) GTEST_SKIP() << "device kernels need head sizes that are multiples of 32";
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const oracle::KdaInput in = MakeInput(shape, 70, 60);
    const Weights weights = Upload(in);
    Pool whole(ops(), shape, dtype);
    const oracle::KdaState start = RandomState(shape, 61, dtype);
    whole.Set(0, start);
    const std::vector<float> expected = Step({in}, {0}, weights, whole);
    for (int64_t chunk : {1, 3, 7, 16, 64, 65}) {
      Pool pool(ops(), shape, dtype);
      pool.Set(0, start);
      std::vector<float> out;
      for (int64_t begin = 0; begin < 70; begin += chunk) {
        const int64_t count = std::min<int64_t>(chunk, 70 - begin);
        const std::vector<float> part =
            Step({Part(in, begin, count)}, {0}, weights, pool, {}, {static_cast<int32_t>(begin)});
        out.insert(out.end(), part.begin(), part.end());
      }
      const std::string what = "chunk " + std::to_string(chunk) + ", state " + Name(dtype);
      ExpectSameBits(out, expected, what);
      ExpectSameBits(pool.State(0), whole.State(0), what);
      ExpectSameBits(pool.Conv(0), whole.Conv(0), what);
    }
  }
}

// Verification of drafted tokens: the state after each prefix of up to eight tokens can be kept, at the models' head
// size, whether or not rows of the inputs start at multiples of 16 bytes.
TEST_P(KdaBitsTest, EveryPrefixOfFewTokensCanBeKept) {
  const KdaShape shape;
  for (int64_t tokens : {2, 3, 5, 8}) {
    for (int64_t row_gap : {8, 5}) {
      // Row 0 is a padding sequence's. Snapshots after all tokens but the last (of eight: after the last four before
      // it).
      oracle::KdaInput in = MakeInput(shape, tokens, 140 + static_cast<uint32_t>(tokens));
      in.gate_kind = tokens == 3 ? KdaGate::kSoftplus : KdaGate::kBounded;
      oracle::KdaInput padding = Part(in, 0, 1);
      const int64_t kept = std::min<int64_t>(tokens - 1, kSlots - 2);
      const int64_t first_kept = tokens == 8 ? 3 : 0;  // after tokens 3 to 6, or after all but the last
      std::vector<SnapshotSpec> snapshots;
      for (int64_t i = 0; i < kept; ++i) {
        snapshots.push_back({static_cast<int32_t>(1 + first_kept + i), static_cast<int32_t>(1 + i)});
      }
      Pool pool(ops(), shape, DType::kF32);
      oracle::KdaState state = RandomState(shape, 141);
      pool.Set(0, state);
      const std::vector<uint8_t> untouched = pool.Raw(kSlots - 1);
      const std::vector<float> out = Step({padding, in}, {-1, 0}, Upload(in), pool, snapshots, {0, 17}, row_gap);
      std::vector<oracle::KdaState> after;
      const std::string what = std::to_string(tokens) + " tokens, gap " + std::to_string(row_gap);
      ExpectClose(Slice(out, shape.width(), 1, tokens), oracle::Kda(in, state, &after), kda_tolerance(), what);
      for (int64_t i = 0; i <= kept; ++i) {
        const int slot = static_cast<int>(i == kept ? 0 : 1 + i);
        const oracle::KdaState& expected = i == kept ? state : after[static_cast<size_t>(first_kept + i)];
        const std::string where = what + ", slot " + std::to_string(slot);
        ExpectClose(pool.State(slot), expected.state, kda_tolerance(), where);
        ExpectSameBits(pool.Conv(slot), std::vector<float>(expected.conv.begin(), expected.conv.end()), where);
      }
      EXPECT_EQ(pool.Raw(kSlots - 1), untouched) << what;
    }
  }
}

// A device may take another variant of its kernel when all sequences of a step have one token.
TEST_P(KdaBitsTest, CompanyDoesNotChangeAnyBitOfOneToken) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  const KdaShape shape{3, 128, 4};
  const oracle::KdaInput one = MakeInput(shape, 1, 150);
  const Weights weights = Upload(one);
  oracle::KdaInput eight = MakeInput(shape, 8, 151);
  const oracle::KdaState start = RandomState(shape, 152), other = RandomState(shape, 153);
  Pool alone(ops(), shape, DType::kF32), together(ops(), shape, DType::kF32);
  alone.Set(1, start);
  together.Set(1, start);
  together.Set(3, other);
  const std::vector<float> expected = Step({one}, {1}, weights, alone);
  std::vector<float> out = Step({one, eight}, {1, 3}, weights, together);
  out.resize(expected.size());
  ExpectSameBits(out, expected);
  ExpectSameBits(together.State(1), alone.State(1));
  ExpectSameBits(together.Conv(1), alone.Conv(1));
}

// One sequence of as many heads as the models have, long enough for a device to prepare a part of it while it walks the
// part before: memory reaches over all parts, and nothing depends on which of them is faster.
TEST_P(KdaBitsTest, PartsOfOneSequenceOfManyHeads) {
  const KdaShape shape{32, 128, 4};
  for (KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
    oracle::KdaInput in = MakeInput(shape, ops().is_cpu() ? 70 : 1100, 105);
    in.gate_kind = kind;
    for (float& z : in.decay) z -= 9;
    in.decay = Round(in.decay, act());
    const std::vector<SnapshotSpec> snapshots = {{static_cast<int32_t>(in.tokens) - 20, 2}};
    const Weights weights = Upload(in);
    const oracle::KdaState start = RandomState(shape, 106);
    oracle::KdaState state = start;
    Pool pool(ops(), shape, DType::kF32);
    pool.Set(1, start);
    const std::vector<float> out = Step({in}, {1}, weights, pool, snapshots, {30});
    ExpectClose(out, oracle::Kda(in, state, nullptr), kda_tolerance(), "output");
    ExpectClose(pool.State(1), state.state, kda_tolerance(), "state");
    for (int i = 0; i < 3; ++i) {
      Pool again(ops(), shape, DType::kF32);
      again.Set(1, start);
      ExpectSameBits(Step({in}, {1}, weights, again, snapshots, {30}), out);
      ExpectSameBits(again.State(1), pool.State(1));
      ExpectSameBits(again.State(2), pool.State(2), "snapshot");
    }
  }
}

// Steps over two sets of slots in turn, as layers follow each other, queued at once: a device may begin a step while
// the one before still runs. Sequences change places, so that another multiprocessor works on a state each time.
TEST_P(KdaBitsTest, OverlappingStepsChangeNoBit) {
  const KdaShape shape{8, 128, 4};
  struct Case {
    int32_t sequences, tokens;
  };
  for (const auto& [sequences, tokens] : {Case{1, 1}, Case{ops().is_cpu() ? 3 : 56, 1}, Case{4, 5}}) {
    const std::string what = std::to_string(sequences) + " sequences of " + std::to_string(tokens);
    const oracle::KdaInput in = MakeInput(shape, sequences * tokens, 190);
    const Weights weights = Upload(in);
    const oracle::KdaState starts[] = {RandomState(shape, 191), RandomState(shape, 192), RandomState(shape, 193)};
    std::vector<std::vector<float>> expected;
    std::vector<uint8_t> expected_bytes;
    for (bool settled : {false, true}) {
      Pool pool(ops(), shape, DType::kF32, 2 * sequences);
      for (int slot = 0; slot < 2 * sequences; ++slot) pool.Set(slot, starts[slot % 3]);
      std::vector<std::unique_ptr<Call>> calls;
      for (int step = 0; step < 10; ++step) {
        std::vector<oracle::KdaInput> inputs;
        std::vector<int32_t> slots;
        for (int i = 0; i < sequences; ++i) {
          inputs.push_back(Part(in, (i + step) % sequences * tokens, tokens));
          slots.push_back(step % 2 * sequences + (i + 5 * step) % sequences);
        }
        calls.push_back(MakeCall(inputs, slots, weights, pool));
        calls.back()->params.slots_settled = settled;
      }
      for (const auto& call : calls) ops().Kda(call->params, ops().stream());
      for (size_t step = 0; step < calls.size(); ++step) {
        if (!settled) {
          expected.push_back(calls[step]->out.Get());
        } else {
          ExpectSameBits(calls[step]->out.Get(), expected[step], what + ", step " + std::to_string(step));
        }
      }
      const std::vector<uint8_t> bytes = pool.bytes.Download();
      if (!settled) expected_bytes = bytes;
      EXPECT_TRUE(bytes == expected_bytes) << what;
    }
  }
}

// A device's chunks end at multiples of 64 of the absolute position, wherever a prompt was cut into steps there.
TEST_P(KdaBitsTest, CutsAtMultiplesOf64DoNotChangeAnyBit) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  const KdaShape shape;
  for (KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
    oracle::KdaInput in = MakeInput(shape, 230, 130);
    in.gate_kind = kind;
    const Weights weights = Upload(in);
    Pool whole(ops(), shape, DType::kF32);
    const oracle::KdaState start = RandomState(shape, 131);
    whole.Set(0, start);
    const std::vector<float> expected = Step({in}, {0}, weights, whole);
    for (int64_t chunk : {64, 128, 192}) {
      Pool pool(ops(), shape, DType::kF32);
      pool.Set(0, start);
      std::vector<float> out;
      for (int64_t begin = 0; begin < in.tokens; begin += chunk) {
        const int64_t count = std::min<int64_t>(chunk, in.tokens - begin);
        // With company: the same sequence must come out.
        const std::vector<float> part = Step({Part(in, begin, count), Part(in, 3, 70)}, {0, 1}, weights, pool, {},
                                             {static_cast<int32_t>(begin), 7});
        out.insert(out.end(), part.begin(), part.begin() + count * shape.width());
        pool.Set(1, start);
      }
      ExpectSameBits(out, expected, "chunk " + std::to_string(chunk));
      ExpectSameBits(pool.State(0), whole.State(0), "chunk " + std::to_string(chunk));
    }
  }
}

// With as many heads as the models have, a device may spread one sequence over more blocks than it gives to each of
// several.
TEST_P(KdaBitsTest, CompanyDoesNotChangeAnyBitOfManyHeads) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  const KdaShape shape{32, 128, 4};
  for (KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
    oracle::KdaInput in = MakeInput(shape, 20, 140);
    in.gate_kind = kind;
    const Weights weights = Upload(in);
    const oracle::KdaState start = RandomState(shape, 141);
    Pool alone(ops(), shape, DType::kF32);
    alone.Set(0, start);
    const std::vector<float> expected = Step({in}, {0}, weights, alone);
    Pool together(ops(), shape, DType::kF32);
    for (int32_t slot = 0; slot < 5; ++slot) together.Set(slot, start);
    const std::vector<float> out = Step({Part(in, 3, 9), in, Part(in, 0, 12), Part(in, 1, 17), Part(in, 5, 9)},
                                        {1, 0, 2, 3, 4}, weights, together);
    ExpectSameBits(Slice(out, shape.width(), 9, 20), expected, kind == KdaGate::kBounded ? "bounded" : "softplus");
    ExpectSameBits(together.State(0), alone.State(0));
  }
}

}  // namespace
}  // namespace k3::testing
