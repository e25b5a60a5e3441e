#include <limits>

#include "tests/kernels/kda_fixture.h"

namespace k3::testing {
namespace {

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

// The same where a decay has no bound: none at all, too little to see in one token, thousands of nats, and all of them
// side by side in one tile, by token (all channels) and by channel.
TEST_P(KdaTest, UnboundedGatesStayFiniteAndAccurate) {
  const KdaShape shape{1, 128, 4};
  const std::vector<double> logits = {-200, -12, -6, 0, 12, 40, 200, 3000};  // softplus from 0 to 3,000
  for (int64_t tokens : {9, 16, 40, 130}) {
    if (slow() && tokens > 65) continue;
    for (double a_log : {0.0, -8.0, 3.0}) {
      for (size_t kind = 0; kind < logits.size() + 2; ++kind) {
        for (bool equal_keys : {false, true}) {
          oracle::KdaInput in = MakeInput(shape, tokens, 15);
          in.gate_kind = KdaGate::kSoftplus;
          in.a_log.assign(1, static_cast<float>(a_log));
          in.dt_bias.assign(128, 0.0f);
          const int64_t draws = kind == logits.size() ? tokens : tokens * 128;
          const std::vector<float> draw = Random(16).Uniform(draws, 0, static_cast<float>(logits.size()) - 1e-3f);
          for (int64_t i = 0; i < tokens * 128; ++i) {
            const size_t which = kind < logits.size() ? kind : static_cast<size_t>(draw[i * draws / (tokens * 128)]);
            in.decay[i] = static_cast<float>(logits[which]);
          }
          in.decay = Round(in.decay, act());
          if (equal_keys) {
            for (int64_t t = 1; t < tokens; ++t) {
              std::copy_n(in.qkv.begin() + 128, 128, in.qkv.begin() + t * 384 + 128);
            }
          }
          Check(in, shape, RandomState(shape, 17),
                std::to_string(tokens) + " tokens, decays " + std::to_string(kind) + ", a_log " +
                    std::to_string(a_log) + (equal_keys ? ", equal keys" : ""));
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

// A device may choose its kernel by the number of sequences; the others here are padding.
TEST_P(KdaTest, SingleTokensInBatchesOfEverySize) {
  const KdaShape shape;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (size_t sequences : {2, 100, 300, 2200}) {
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

// A million products of decays and thousands of tiles one after the other: errors must not add up.
TEST_P(KdaTest, VeryLongSequence) {
  const KdaShape shape{1, 128, 4};
  const int64_t tokens = slow() ? 8192 : 65536;
  oracle::KdaInput in = MakeInput(shape, tokens, 102);
  in.gate_kind = KdaGate::kBounded;
  for (float& z : in.decay) z -= 9;
  in.decay = Round(in.decay, act());
  Pool pool(ops(), shape, DType::kF32);
  oracle::KdaState state = RandomState(shape, 103);
  pool.Set(1, state);
  const std::vector<float> out = Step({in}, {1}, Upload(in), pool, {}, {7});
  ExpectClose(out, oracle::Kda(in, state, nullptr), kda_tolerance(), "output");
  ExpectClose(pool.State(1), state.state, kda_tolerance(), "state");
}

// Null taps and norm weight: the recurrence between convolution and gated norm, whose gates nobody reads.
TEST_P(KdaTest, WithoutConvolutionAndNorm) {
  for (const KdaShape& shape : {KdaShape{2, 128, 4}, KdaShape{3, 64, 4}}) {
    for (KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
      for (int64_t tokens : {1, 8, 9, 17, 65, 200, 1100}) {
        if (tokens > 200 && (ops().is_cpu() || shape.head_dim != 128)) continue;
        for (int64_t row_gap : {8, 3}) {
          oracle::KdaInput in = MakeInput(shape, tokens, 170 + static_cast<uint32_t>(tokens)), other = in;
          in.gate_kind = other.gate_kind = kind;
          for (oracle::KdaInput* input : {&in, &other}) {
            input->conv_taps.clear();
            input->norm_weight.clear();
            std::fill(input->gate.begin(), input->gate.end(), std::numeric_limits<float>::quiet_NaN());
          }
          other = Part(other, 0, 1);
          Pool pool(ops(), shape, DType::kF32);
          oracle::KdaState state = RandomState(shape, 171), other_state = RandomState(shape, 172);
          const oracle::Doubles conv = state.conv;
          pool.Set(1, state);
          pool.Set(3, other_state);
          const int32_t kept = static_cast<int32_t>(tokens / 2);
          const std::vector<uint8_t> untouched = pool.Raw(0);
          const std::vector<float> out = Step({other, in}, {3, 1}, Upload(in), pool, {{1 + kept, 4}}, {0, 21}, row_gap);
          std::vector<oracle::KdaState> after;
          const oracle::Doubles expected = oracle::Kda(in, state, &after);
          const std::string what = std::to_string(tokens) + " tokens of " + std::to_string(shape.head_dim) +
                                   " channels, gate " + std::to_string(static_cast<int>(kind)) + ", gap " +
                                   std::to_string(row_gap);
          ExpectClose(Slice(out, shape.width(), 1, tokens), expected, kda_tolerance(), what);
          ExpectClose(Slice(out, shape.width(), 0, 1), oracle::Kda(other, other_state, nullptr), kda_tolerance(), what);
          ExpectClose(pool.State(1), state.state, kda_tolerance(), what + ": state");
          ExpectClose(pool.State(3), other_state.state, kda_tolerance(), what + ": other state");
          ExpectClose(pool.State(4), after[static_cast<size_t>(kept)].state, kda_tolerance(), what + ": snapshot");
          ExpectSameBits(pool.Conv(1), std::vector<float>(conv.begin(), conv.end()), what);
          EXPECT_EQ(pool.Raw(0), untouched) << what;
        }
      }
    }
  }
}

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

// What kernels/README.md states: each decoded token rounds the state, and slow decays keep the errors.
TEST_P(KdaTest, Bf16StateErrsAsStated) {
  const KdaShape shape{2, 128, 4};
  constexpr int64_t kTokens = 512;
  for (const auto& [shift, bound] : {std::pair{0.0f, 2e-3}, {-9.0f, 3e-2}}) {
    oracle::KdaInput in = MakeInput(shape, kTokens, 72);
    for (float& z : in.decay) z += shift;
    in.decay = Round(in.decay, act());
    const Weights weights = Upload(in);
    Pool pool(ops(), shape, DType::kBF16);
    const oracle::KdaState start = RandomState(shape, 73, DType::kBF16);
    pool.Set(0, start);
    std::vector<float> out;
    for (int64_t i = 0; i < kTokens; ++i) {
      const std::vector<float> row = Step({Part(in, i, 1)}, {0}, weights, pool, {}, {static_cast<int32_t>(i)});
      out.insert(out.end(), row.begin(), row.end());
    }
    oracle::KdaState state = start;
    ExpectClose(out, oracle::Kda(in, state, nullptr), bound + kda_tolerance(),
                "output, decays shifted by " + std::to_string(shift));
  }
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
