#include <gtest/gtest.h>

#include <cmath>

#include "kernels/core/bfloat16.h"
#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

constexpr int kSlots = 6;

// Inputs of one sequence, and how a state looks in a pool.
struct KdaShape {
  int32_t heads = 2, head_dim = 128, conv_width = 4;
  int64_t width() const { return int64_t{heads} * head_dim; }
  int64_t state_elements() const { return width() * head_dim; }
  int64_t conv_elements() const { return (conv_width - 1) * 3 * width(); }
};

class KdaTest : public OpTest {
 protected:
  // Random inputs at a scale that keeps every nonlinearity busy.
  oracle::KdaInput MakeInput(const KdaShape& shape, int64_t tokens, uint32_t seed) const {
    Random random(seed);
    oracle::KdaInput in;
    in.tokens = tokens;
    in.heads = shape.heads;
    in.head_dim = shape.head_dim;
    in.conv_width = shape.conv_width;
    in.qkv = Round(random.Normal(tokens * 3 * shape.width()), act());
    in.decay = Round(random.Normal(tokens * shape.width(), 2), act());
    in.beta = Round(random.Normal(tokens * shape.heads, 2), act());
    in.gate = Round(random.Normal(tokens * shape.width()), act());
    in.conv_taps = random.Normal(3 * shape.width() * shape.conv_width, 0.5f);
    in.dt_bias = random.Normal(shape.width());
    in.a_log = random.Uniform(shape.heads, -1, 1);
    in.norm_weight = random.Normal(shape.head_dim, 0.2f, 1);
    in.norm_eps = double{1e-5f};
    return in;
  }

  // Weights as device memory; every step of a test shares them.
  struct Weights {
    DeviceArray<float> taps, dt_bias, a_log, norm;
  };
  Weights Upload(const oracle::KdaInput& in) {
    return {DeviceArray<float>(ops(), in.conv_taps), DeviceArray<float>(ops(), in.dt_bias),
            DeviceArray<float>(ops(), in.a_log), DeviceArray<float>(ops(), in.norm_weight)};
  }

  // A pool of kSlots poisoned slots: recurrent part, then convolution part, then a gap.
  struct Pool {
    Pool(Ops& ops, const KdaShape& s, DType dtype)
        : shape(s),
          state_dtype(dtype),
          conv_offset((s.state_elements() * static_cast<int64_t>(SizeOf(dtype)) + 255) / 256 * 256),
          stride((conv_offset + s.conv_elements() * static_cast<int64_t>(SizeOf(ops.activation_dtype())) + 511) / 256 *
                 256),
          act(ops.activation_dtype()),
          bytes(ops, static_cast<size_t>(kSlots * stride)) {}

    void Set(int slot, const oracle::KdaState& value) {
      const auto upload = [&](const oracle::Doubles& values, DType dtype, int64_t offset) {
        const std::vector<uint8_t> encoded = Encode(std::vector<float>(values.begin(), values.end()), dtype);
        bytes.Upload(encoded.data(), encoded.size(), static_cast<size_t>(slot * stride + offset));
      };
      upload(value.state, state_dtype, 0);
      upload(value.conv, act, conv_offset);
    }
    std::vector<uint8_t> Raw(int slot) const {
      const std::vector<uint8_t> all = bytes.Download();
      return {all.begin() + slot * stride, all.begin() + (slot + 1) * stride};
    }
    std::vector<float> State(int slot) const {
      std::vector<uint8_t> raw = Raw(slot);
      raw.resize(static_cast<size_t>(shape.state_elements()) * SizeOf(state_dtype));
      return Decode(raw, state_dtype);
    }
    std::vector<float> Conv(int slot) const {
      const std::vector<uint8_t> raw = Raw(slot);
      const auto begin = raw.begin() + conv_offset;
      return Decode({begin, begin + shape.conv_elements() * static_cast<int64_t>(SizeOf(act))}, act);
    }

    KdaShape shape;
    DType state_dtype;
    int64_t conv_offset, stride;
    DType act;
    DeviceBytes bytes;
  };

  static oracle::KdaState ZeroState(const KdaShape& shape) {
    return {oracle::Doubles(static_cast<size_t>(shape.state_elements())),
            oracle::Doubles(static_cast<size_t>(shape.conv_elements()))};
  }
  // Random and not symmetric.
  oracle::KdaState RandomState(const KdaShape& shape, uint32_t seed, DType dtype = DType::kF32) const {
    Random random(seed);
    return {oracle::ToDouble(Round(random.Normal(shape.state_elements()), dtype)),
            oracle::ToDouble(Round(random.Normal(shape.conv_elements()), act()))};
  }

  // Tokens [begin, begin + count) of one sequence's input.
  static oracle::KdaInput Part(const oracle::KdaInput& in, int64_t begin, int64_t count) {
    oracle::KdaInput part = in;
    const int64_t width = in.heads * in.head_dim;
    part.tokens = count;
    part.qkv = Slice(in.qkv, 3 * width, begin, count);
    part.decay = Slice(in.decay, width, begin, count);
    part.beta = Slice(in.beta, in.heads, begin, count);
    part.gate = Slice(in.gate, width, begin, count);
    return part;
  }

  // One step over several sequences. `inputs` share the weights. Returns the packed output.
  std::vector<float> Step(const std::vector<oracle::KdaInput>& inputs, const std::vector<int32_t>& slots,
                          const Weights& weights, Pool& pool, const std::vector<SnapshotSpec>& snapshots = {},
                          const std::vector<int32_t>& contexts = {}, int64_t row_gap = 8) {
    std::vector<SequenceSpec> sequences;
    std::vector<float> qkv, decay, beta, gate;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const oracle::KdaInput& in = inputs[i];
      sequences.push_back({static_cast<int32_t>(in.tokens), contexts.empty() ? 0 : contexts[i], slots[i], {}});
      qkv.insert(qkv.end(), in.qkv.begin(), in.qkv.end());
      decay.insert(decay.end(), in.decay.begin(), in.decay.end());
      beta.insert(beta.end(), in.beta.begin(), in.beta.end());
      gate.insert(gate.end(), in.gate.begin(), in.gate.end());
    }
    const KdaShape& shape = pool.shape;
    const DeviceBatch batch(ops(), sequences, snapshots);
    const int64_t tokens = batch.tokens();
    const DeviceMatrix device_qkv(ops(), act(), tokens, 3 * shape.width(), qkv, row_gap);
    const DeviceMatrix device_decay(ops(), act(), tokens, shape.width(), decay, row_gap);
    const DeviceMatrix device_beta(ops(), act(), tokens, shape.heads, beta, row_gap);
    const DeviceMatrix device_gate(ops(), act(), tokens, shape.width(), gate, row_gap);
    const DeviceMatrix out(ops(), act(), tokens, shape.width(), row_gap);
    const DeviceBytes scratch(ops(), ops().KdaScratchBytes(tokens, static_cast<int64_t>(inputs.size()), shape.heads,
                                                           shape.head_dim, shape.conv_width));
    KdaParams params;
    params.batch = batch.get();
    params.heads = shape.heads;
    params.head_dim = shape.head_dim;
    params.conv_width = shape.conv_width;
    params.qkv = device_qkv;
    params.decay = device_decay;
    params.beta = device_beta;
    params.gate = device_gate;
    params.conv_taps = weights.taps.data();
    params.dt_bias = weights.dt_bias.data();
    params.a_log = weights.a_log.data();
    params.norm_weight = weights.norm.data();
    params.gate_kind = inputs[0].gate_kind;
    params.gate_lower_bound = static_cast<float>(inputs[0].lower_bound);
    params.norm_eps = static_cast<float>(inputs[0].norm_eps);
    params.state = pool.bytes.data();
    params.conv_state = static_cast<char*>(pool.bytes.data()) + pool.conv_offset;
    params.slot_stride = pool.stride;
    params.state_dtype = pool.state_dtype;
    params.out = out;
    params.scratch = scratch.data();
    ops().Kda(params, ops().stream());
    return out.Get();
  }

  // One sequence from a state, against the oracle.
  void Check(const oracle::KdaInput& in, const KdaShape& shape, const oracle::KdaState& start,
             const std::string& what) {
    Pool pool(ops(), shape, DType::kF32);
    pool.Set(2, start);
    const std::vector<float> out = Step({in}, {2}, Upload(in), pool);
    oracle::KdaState state = start;
    const oracle::Doubles expected = oracle::Kda(in, state, nullptr);
    ExpectClose(out, expected, kda_tolerance(), what + ": output");
    ExpectClose(pool.State(2), state.state, kda_tolerance(), what + ": state");
    ExpectSameBits(pool.Conv(2), std::vector<float>(state.conv.begin(), state.conv.end()),
                   what + ": convolution state");
  }
};
K3_INSTANTIATE_OPS(KdaTest);

// The op's own gates and beta are functions of logits: these reach a wanted value.
double Logit(double p) { return p <= 0 ? -200 : p >= 1 ? 200 : std::log(p / (1 - p)); }

TEST_P(KdaTest, MatchesTheOracleAtEveryLength) {
  const KdaShape shape;
  for (int64_t tokens : {1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 200}) {
    for (KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
      oracle::KdaInput in = MakeInput(shape, tokens, static_cast<uint32_t>(tokens));
      in.gate_kind = kind;
      Check(in, shape, tokens % 2 == 0 ? ZeroState(shape) : RandomState(shape, 5),
            std::to_string(tokens) + " tokens, gate " + std::to_string(static_cast<int>(kind)));
    }
  }
}

TEST_P(KdaTest, OtherShapes) {
  for (const KdaShape& shape : {KdaShape{1, 128, 4}, KdaShape{3, 64, 4}, KdaShape{5, 32, 3}}) {
    Check(MakeInput(shape, 40, 9), shape, RandomState(shape, 6),
          std::to_string(shape.heads) + " heads of " + std::to_string(shape.head_dim));
  }
}

TEST_P(KdaTest, OddShapesOnTheCpu) {
  if (!ops().is_cpu()) GTEST_SKIP() << "device kernels need head sizes that are multiples of 32";
  for (const KdaShape& shape : {KdaShape{1, 1, 1}, KdaShape{3, 7, 2}, KdaShape{2, 100, 5}, KdaShape{1, 200, 4}}) {
    Check(MakeInput(shape, 33, 10), shape, RandomState(shape, 7),
          std::to_string(shape.heads) + " heads of " + std::to_string(shape.head_dim));
  }
}

// B11: log-decays and write strengths at their ends, independent and equal keys.
TEST_P(KdaTest, ExtremeGatesStayFiniteAndAccurate) {
  const KdaShape shape{1, 128, 4};
  for (int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 128, 1000}) {
    // The long run once per gate; the short ones with every combination.
    for (double decay : {0.0, -1e-4, -1.0, -2.5, -5.0, 1.0 /* random per channel */}) {
      for (double beta : {0.0, 0.5, 1.0}) {
        for (bool equal_keys : {false, true}) {
          if (tokens == 1000 && (beta != 1.0 || (equal_keys && decay < -1))) continue;
          if (slow() && tokens > 65) continue;
          oracle::KdaInput in = MakeInput(shape, tokens, 11);
          in.a_log.assign(1, 0.0f);
          in.dt_bias.assign(128, 0.0f);
          Random random(12);
          for (float& z : in.decay) {
            const double p = decay > 0 ? double{random.Uniform(1, 0, 1)[0]} : decay / -5;
            z = static_cast<float>(Logit(p));
          }
          in.decay = Round(in.decay, act());
          for (float& b : in.beta) b = static_cast<float>(Logit(beta));
          if (equal_keys) {
            for (int64_t t = 1; t < tokens; ++t) {
              std::copy_n(in.qkv.begin() + 128, 128, in.qkv.begin() + t * 384 + 128);
            }
          }
          Check(in, shape, RandomState(shape, 13),
                std::to_string(tokens) + " tokens, decay " + std::to_string(decay) + ", beta " + std::to_string(beta) +
                    (equal_keys ? ", equal keys" : ""));
        }
      }
    }
  }
}

// B04: prefill, decode, snapshot and restore agree on one layout of an unsymmetric state.
TEST_P(KdaTest, PrefillStateFeedsDecode) {
  const KdaShape shape;
  const oracle::KdaInput in = MakeInput(shape, 193, 14);
  const oracle::KdaState start = RandomState(shape, 15);
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < 128; ++i) {
    for (int64_t j = 0; j < 128; ++j) {
      difference += std::pow(start.state[i * 128 + j] - start.state[j * 128 + i], 2);
      norm += std::pow(start.state[i * 128 + j], 2);
    }
  }
  ASSERT_GT(std::sqrt(difference / norm), 0.1) << "the state is too symmetric for this test";
  const Weights weights = Upload(in);
  Pool pool(ops(), shape, DType::kF32);
  pool.Set(0, start);
  const std::vector<float> prefill = Step({Part(in, 0, 192)}, {0}, weights, pool);
  oracle::KdaState state = start;
  ExpectClose(prefill, oracle::Kda(Part(in, 0, 192), state, nullptr), kda_tolerance(), "prefill");
  ExpectClose(pool.State(0), state.state, kda_tolerance(), "state after prefill");
  const std::vector<float> decode = Step({Part(in, 192, 1)}, {0}, weights, pool, {}, {192});
  ExpectClose(decode, oracle::Kda(Part(in, 192, 1), state, nullptr), kda_tolerance(), "decode");
}

TEST_P(KdaTest, SequencesOfOneStepAreIndependent) {
  const KdaShape shape{3, 64, 4};
  const Weights weights = Upload(MakeInput(shape, 1, 20));
  const std::vector<int64_t> lengths = {1, 70, 3, 16};
  const std::vector<int32_t> slots = {4, 0, 5, 2};
  std::vector<oracle::KdaInput> inputs;
  Pool pool(ops(), shape, DType::kF32);
  std::vector<oracle::KdaState> states;
  for (size_t i = 0; i < lengths.size(); ++i) {
    oracle::KdaInput in = MakeInput(shape, lengths[i], 20 + static_cast<uint32_t>(i));
    const oracle::KdaInput shared = MakeInput(shape, 1, 20);
    in.conv_taps = shared.conv_taps;
    in.dt_bias = shared.dt_bias;
    in.a_log = shared.a_log;
    in.norm_weight = shared.norm_weight;
    inputs.push_back(in);
    states.push_back(RandomState(shape, 30 + static_cast<uint32_t>(i)));
    pool.Set(slots[i], states.back());
  }
  const std::vector<uint8_t> untouched = pool.Raw(1);
  const std::vector<float> out = Step(inputs, slots, weights, pool);
  int64_t row = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const std::string what = "sequence " + std::to_string(i);
    ExpectClose(Slice(out, shape.width(), row, lengths[i]), oracle::Kda(inputs[i], states[i], nullptr), kda_tolerance(),
                what);
    ExpectClose(pool.State(slots[i]), states[i].state, kda_tolerance(), what);
    ExpectSameBits(pool.Conv(slots[i]), std::vector<float>(states[i].conv.begin(), states[i].conv.end()), what);
    row += lengths[i];
  }
  EXPECT_EQ(pool.Raw(1), untouched);
}

// A snapshot is the state after exactly its row, whatever shares the step, and nothing else is written.
TEST_P(KdaTest, SnapshotsAreTakenInPassing) {
  const KdaShape shape{2, 64, 4};
  oracle::KdaInput first = MakeInput(shape, 70, 40), second = MakeInput(shape, 66, 41);
  second.conv_taps = first.conv_taps;
  second.dt_bias = first.dt_bias;
  second.a_log = first.a_log;
  second.norm_weight = first.norm_weight;
  Pool pool(ops(), shape, DType::kF32);
  oracle::KdaState state_a = RandomState(shape, 42), state_b = RandomState(shape, 43);
  pool.Set(0, state_a);
  pool.Set(1, state_b);
  // Rows 0 (one token of the first), 63, and of the second its token 0 and its last.
  Step({first, second}, {0, 1}, Upload(first), pool, {{0, 2}, {63, 3}, {70, 4}, {135, 5}});
  std::vector<oracle::KdaState> after_a, after_b;
  oracle::Kda(first, state_a, &after_a);
  oracle::Kda(second, state_b, &after_b);
  const std::vector<std::pair<int, const oracle::KdaState*>> expected = {
      {2, &after_a[0]}, {3, &after_a[63]}, {4, &after_b[0]}, {5, &after_b[65]}};
  for (const auto& [slot, state] : expected) {
    const std::string what = "snapshot in slot " + std::to_string(slot);
    ExpectClose(pool.State(slot), state->state, kda_tolerance(), what);
    ExpectSameBits(pool.Conv(slot), std::vector<float>(state->conv.begin(), state->conv.end()), what);
  }
  ExpectSameBits(pool.State(5), pool.State(1), "the last snapshot is the live state");
}

// B07: sequences without a slot and snapshot entries without a row touch nothing.
TEST_P(KdaTest, PaddingHasNoMemory) {
  for (const KdaShape& shape : {KdaShape{2, 64, 4}, KdaShape{2, 128, 4}}) {
    for (int64_t tokens : {1, 5, 70}) {
      const oracle::KdaInput real = MakeInput(shape, tokens, 60);
      oracle::KdaInput padding = MakeInput(shape, 1, 61);
      padding.conv_taps = real.conv_taps;
      padding.dt_bias = real.dt_bias;
      padding.a_log = real.a_log;
      padding.norm_weight = real.norm_weight;
      Pool alone(ops(), shape, DType::kF32), padded(ops(), shape, DType::kF32);
      const oracle::KdaState start = RandomState(shape, 62);
      alone.Set(2, start);
      padded.Set(2, start);
      const int32_t last = static_cast<int32_t>(tokens) - 1;
      const std::vector<float> expected = Step({real}, {2}, Upload(real), alone, {{last, 4}});
      std::vector<float> out =
          Step({real, padding, padding}, {2, -1, -1}, Upload(real), padded, {{last, 4}, {kNoRow, -1}, {kNoRow, -1}});
      const std::string what = std::to_string(shape.head_dim) + " channels, " + std::to_string(tokens) + " tokens";
      for (float value : out) EXPECT_TRUE(std::isfinite(value)) << what;
      out.resize(expected.size());
      ExpectClose(out, oracle::ToDouble(expected), kda_tolerance(), what);
      ExpectClose(padded.State(2), oracle::ToDouble(alone.State(2)), kda_tolerance(), what);
      ExpectSameBits(padded.State(4), padded.State(2), what + ": the snapshot");
      for (int slot : {0, 1, 3, 5}) EXPECT_EQ(padded.Raw(slot), alone.Raw(slot)) << what << ", slot " << slot;
    }
  }
}

// B08: chunks shorter than the convolution's history shift old and new inputs into the sequence's own slot.
TEST_P(KdaTest, ShortChunksShiftTheConvolutionState) {
  const KdaShape shape{2, 64, 4};
  const oracle::KdaInput in = MakeInput(shape, 12, 50);
  const Weights weights = Upload(in);
  for (int64_t chunk : {1, 2, 3, 4}) {
    Pool pool(ops(), shape, DType::kF32);
    const oracle::KdaState start = RandomState(shape, 51);
    pool.Set(0, start);
    pool.Set(3, start);  // the shared snapshot from which slot 0 was restored
    const std::vector<uint8_t> snapshot = pool.Raw(3);
    oracle::KdaState state = start;
    for (int64_t begin = 0; begin < 12; begin += chunk) {
      const oracle::KdaInput part = Part(in, begin, chunk);
      const std::vector<float> out = Step({part}, {0}, weights, pool, {}, {static_cast<int32_t>(begin)});
      ExpectClose(out, oracle::Kda(part, state, nullptr), kda_tolerance(), "chunk " + std::to_string(chunk));
      ExpectSameBits(pool.Conv(0), std::vector<float>(state.conv.begin(), state.conv.end()));
    }
    EXPECT_EQ(pool.Raw(3), snapshot);
  }
}

TEST_P(KdaTest, ChunksDoNotChangeAnyBit) {
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

// Sequences of every kind packed into one step at the models' head size: some long enough for a device's chunked path,
// some not, contexts and snapshots anywhere.
TEST_P(KdaTest, PackedSequencesAtTheModelsHeadSize) {
  const KdaShape shape;
  const Weights weights = Upload(MakeInput(shape, 1, 90));
  const std::vector<int64_t> lengths = {100, 1, 9, 130, 8};
  const std::vector<int32_t> slots = {4, 0, 5, 2, 1}, contexts = {37, 5, 0, 64, 200};
  for (KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
    std::vector<oracle::KdaInput> inputs;
    Pool pool(ops(), shape, DType::kF32);
    std::vector<oracle::KdaState> states;
    for (size_t i = 0; i < lengths.size(); ++i) {
      oracle::KdaInput in = MakeInput(shape, lengths[i], 90 + static_cast<uint32_t>(i));
      const oracle::KdaInput shared = MakeInput(shape, 1, 90);
      in.gate_kind = kind;
      in.conv_taps = shared.conv_taps;
      in.dt_bias = shared.dt_bias;
      in.a_log = shared.a_log;
      in.norm_weight = shared.norm_weight;
      inputs.push_back(in);
      states.push_back(RandomState(shape, 95 + static_cast<uint32_t>(i)));
      pool.Set(slots[i], states.back());
    }
    const std::vector<float> out = Step(inputs, slots, weights, pool, {{50, 3}}, contexts);
    int64_t row = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const std::string what = "sequence " + std::to_string(i);
      std::vector<oracle::KdaState> after;
      ExpectClose(Slice(out, shape.width(), row, lengths[i]), oracle::Kda(inputs[i], states[i], &after),
                  kda_tolerance(), what);
      ExpectClose(pool.State(slots[i]), states[i].state, kda_tolerance(), what);
      ExpectSameBits(pool.Conv(slots[i]), std::vector<float>(states[i].conv.begin(), states[i].conv.end()), what);
      if (i == 0) ExpectClose(pool.State(3), after[50].state, kda_tolerance(), "snapshot");
      row += lengths[i];
    }
  }
}

// Verification of drafted tokens: the state after each prefix of up to eight tokens can be kept, at the models' head
// size, whether or not rows of the inputs start at multiples of 16 bytes.
TEST_P(KdaTest, EveryPrefixOfFewTokensCanBeKept) {
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

// A device may choose its kernel by the number of sequences; the others here are padding.
TEST_P(KdaTest, SingleTokensInBatchesOfEverySize) {
  const KdaShape shape;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (size_t sequences : {2, 100, 2200}) {
      if (slow() && sequences > 100) continue;
      oracle::KdaInput first = MakeInput(shape, 1, 160), last = MakeInput(shape, 1, 161);
      last.conv_taps = first.conv_taps;
      last.dt_bias = first.dt_bias;
      last.a_log = first.a_log;
      last.norm_weight = first.norm_weight;
      first.bf16_state = last.bf16_state = dtype == DType::kBF16;
      std::vector<oracle::KdaInput> inputs(sequences, last);
      inputs[0] = first;
      std::vector<int32_t> slots(sequences, -1);
      slots[0] = 4;
      slots.back() = 1;
      Pool pool(ops(), shape, dtype);
      oracle::KdaState state_a = RandomState(shape, 162, dtype), state_b = RandomState(shape, 163, dtype);
      pool.Set(4, state_a);
      pool.Set(1, state_b);
      const std::vector<uint8_t> untouched = pool.Raw(0);
      const std::vector<float> out = Step(inputs, slots, Upload(first), pool, {{0, 5}});
      const std::string what = std::to_string(sequences) + " sequences, state " + Name(dtype);
      const double tolerance = std::max(dtype == DType::kBF16 ? 2e-3 : 0.0, kda_tolerance());
      const int64_t width = shape.width(), final_row = static_cast<int64_t>(sequences) - 1;
      ExpectClose(Slice(out, width, 0, 1), oracle::Kda(first, state_a, nullptr), tolerance, what);
      ExpectClose(Slice(out, width, final_row, 1), oracle::Kda(last, state_b, nullptr), tolerance, what);
      for (const auto& [slot, state] : {std::pair{4, &state_a}, {5, &state_a}, {1, &state_b}}) {
        ExpectClose(pool.State(slot), state->state, tolerance, what);
        ExpectSameBits(pool.Conv(slot), std::vector<float>(state->conv.begin(), state->conv.end()), what);
      }
      for (float value : out) EXPECT_TRUE(std::isfinite(value)) << what;
      EXPECT_EQ(pool.Raw(0), untouched) << what;
    }
  }
}

// A device may take another variant of its kernel when all sequences of a step have one token.
TEST_P(KdaTest, CompanyDoesNotChangeAnyBitOfOneToken) {
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

// Long enough for a device to walk segments of one sequence in parallel and to compose them.
TEST_P(KdaTest, LongSequenceKeepsItsMemory) {
  const KdaShape shape{1, 128, 4};
  for (KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
    oracle::KdaInput in = MakeInput(shape, ops().is_cpu() ? 2100 : 4097, 100);
    in.gate_kind = kind;
    // Decays near 1: what was written first is still there at the end.
    for (float& z : in.decay) z -= 9;
    in.decay = Round(in.decay, act());
    Pool pool(ops(), shape, DType::kF32);
    oracle::KdaState state = RandomState(shape, 101);
    pool.Set(1, state);
    const std::vector<float> out = Step({in}, {1}, Upload(in), pool, {{0, 2}, {1000, 3}, {1999, 4}}, {30});
    std::vector<oracle::KdaState> after;
    ExpectClose(out, oracle::Kda(in, state, &after), kda_tolerance(), "output");
    ExpectClose(pool.State(1), state.state, kda_tolerance(), "state");
    for (const auto& [slot, row] : {std::pair{2, 0}, {3, 1000}, {4, 1999}}) {
      ExpectClose(pool.State(slot), after[row].state, kda_tolerance(), "snapshot after row " + std::to_string(row));
      ExpectSameBits(pool.Conv(slot), std::vector<float>(after[row].conv.begin(), after[row].conv.end()));
    }
  }
}

// One sequence of as many heads as the models have, long enough for a device to prepare a part of it while it walks the
// part before: memory reaches over all parts, and nothing depends on which of them is faster.
TEST_P(KdaTest, PartsOfOneSequenceOfManyHeads) {
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

// More cuts than a step of this length has by itself.
TEST_P(KdaTest, SnapshotsAfterManyRows) {
  const KdaShape shape{1, 128, 4};
  const oracle::KdaInput in = MakeInput(shape, 66, 110);
  Pool pool(ops(), shape, DType::kF32);
  oracle::KdaState state = RandomState(shape, 111);
  pool.Set(0, state);
  const std::vector<SnapshotSpec> snapshots = {{1, 1}, {2, 2}, {17, 3}, {40, 4}, {65, 5}};
  const std::vector<float> out = Step({in}, {0}, Upload(in), pool, snapshots);
  std::vector<oracle::KdaState> after;
  ExpectClose(out, oracle::Kda(in, state, &after), kda_tolerance(), "output");
  ExpectClose(pool.State(0), state.state, kda_tolerance(), "state");
  for (const SnapshotSpec& snapshot : snapshots) {
    const oracle::KdaState& expected = after[snapshot.row];
    ExpectClose(pool.State(snapshot.slot), expected.state, kda_tolerance(), std::to_string(snapshot.row));
    ExpectSameBits(pool.Conv(snapshot.slot), std::vector<float>(expected.conv.begin(), expected.conv.end()));
  }
}

// Spec 4.3: keys of cosine 0.9 to 0.99 with decays near 1, where triangular inverses in half precision fail.
TEST_P(KdaTest, CorrelatedKeys) {
  const KdaShape shape{1, 128, 4};
  for (double spread : {0.3, 0.1}) {
    oracle::KdaInput in = MakeInput(shape, 400, 120);
    Random random(121);
    const std::vector<float> common = random.Normal(128);
    for (int64_t t = 0; t < in.tokens; ++t) {
      for (int64_t c = 0; c < 128; ++c) {
        float& k = in.qkv[t * 384 + 128 + c];
        k = common[c] + static_cast<float>(spread) * k;
      }
    }
    in.qkv = Round(in.qkv, act());
    in.a_log.assign(1, 0.0f);
    in.dt_bias.assign(128, 0.0f);
    in.decay.assign(in.decay.size(), static_cast<float>(Logit(1e-4)));
    in.decay = Round(in.decay, act());
    for (float& b : in.beta) b += 3;
    in.beta = Round(in.beta, act());
    Pool pool(ops(), shape, DType::kF32);
    oracle::KdaState state = RandomState(shape, 122);
    pool.Set(2, state);
    const std::vector<float> out = Step({in}, {2}, Upload(in), pool);
    const double tolerance = std::max(kda_tolerance(), act() == DType::kBF16 ? 1.5e-2 : 0.0);
    ExpectClose(out, oracle::Kda(in, state, nullptr), tolerance, "output");
    ExpectClose(pool.State(2), state.state, tolerance, "state");
  }
}

// A device's chunks end at multiples of 64 of the absolute position, wherever a prompt was cut into steps there.
TEST_P(KdaTest, CutsAtMultiplesOf64DoNotChangeAnyBit) {
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
TEST_P(KdaTest, CompanyDoesNotChangeAnyBitOfManyHeads) {
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

TEST_P(KdaTest, Bf16StateStaysCloseToTheRoundedOracle) {
  const KdaShape shape{2, 64, 4};
  oracle::KdaInput in = MakeInput(shape, 50, 70);
  in.bf16_state = true;
  Pool pool(ops(), shape, DType::kBF16);
  const oracle::KdaState start = RandomState(shape, 71, DType::kBF16);
  pool.Set(0, start);
  const std::vector<float> out = Step({in}, {0}, Upload(in), pool);
  oracle::KdaState state = start;
  // Roundings of single elements may fall to the other side: a fraction of a bf16 ulp.
  ExpectClose(out, oracle::Kda(in, state, nullptr), std::max(2e-3, kda_tolerance()));
  ExpectClose(pool.State(0), state.state, std::max(2e-3, kda_tolerance()));
}

TEST_P(KdaTest, WrongShapesAreRefusedWithNumbers) {
  const KdaShape shape{2, 64, 4};
  oracle::KdaInput in = MakeInput(shape, 3, 80);
  in.lower_bound = -6;
  Pool pool(ops(), shape, DType::kF32);
  pool.Set(0, ZeroState(shape));
  try {
    Step({in}, {0}, Upload(in), pool);
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("-6"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace k3::testing
