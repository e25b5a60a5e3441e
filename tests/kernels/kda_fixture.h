#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/core/bfloat16.h"
#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
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
    const auto upload = [&](const std::vector<float>& values) {
      return DeviceArray<float>(ops(), values.empty() ? std::vector<float>(1) : values);
    };
    return {upload(in.conv_taps), upload(in.dt_bias), upload(in.a_log), upload(in.norm_weight)};
  }

  // A pool of poisoned slots: recurrent part, then convolution part, then a gap.
  struct Pool {
    Pool(Ops& ops, const KdaShape& s, DType dtype, int slots = kSlots)
        : shape(s),
          state_dtype(dtype),
          conv_offset((s.state_elements() * static_cast<int64_t>(SizeOf(dtype)) + 255) / 256 * 256),
          stride((conv_offset + s.conv_elements() * static_cast<int64_t>(SizeOf(ops.activation_dtype())) + 511) / 256 *
                 256),
          act(ops.activation_dtype()),
          bytes(ops, static_cast<size_t>(slots * stride)) {}

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

  // One step over several sequences, ready to be launched.
  struct Call {
    DeviceBatch batch;
    DeviceMatrix qkv, decay, beta, gate, out;
    DeviceBytes scratch;
    KdaParams params;
  };
  // `inputs` share the weights.
  std::unique_ptr<Call> MakeCall(const std::vector<oracle::KdaInput>& inputs, const std::vector<int32_t>& slots,
                                 const Weights& weights, Pool& pool, const std::vector<SnapshotSpec>& snapshots = {},
                                 const std::vector<int32_t>& contexts = {}, int64_t row_gap = 8) {
    std::vector<SequenceSpec> sequences;
    std::vector<float> qkv, decay, beta, gate;
    int64_t tokens = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const oracle::KdaInput& in = inputs[i];
      sequences.push_back({static_cast<int32_t>(in.tokens), contexts.empty() ? 0 : contexts[i], slots[i], {}});
      tokens += in.tokens;
      qkv.insert(qkv.end(), in.qkv.begin(), in.qkv.end());
      decay.insert(decay.end(), in.decay.begin(), in.decay.end());
      beta.insert(beta.end(), in.beta.begin(), in.beta.end());
      gate.insert(gate.end(), in.gate.begin(), in.gate.end());
    }
    const KdaShape& shape = pool.shape;
    std::unique_ptr<Call> call(
        new Call{DeviceBatch(ops(), sequences, snapshots),
                 DeviceMatrix(ops(), act(), tokens, 3 * shape.width(), qkv, row_gap),
                 DeviceMatrix(ops(), act(), tokens, shape.width(), decay, row_gap),
                 DeviceMatrix(ops(), act(), tokens, shape.heads, beta, row_gap),
                 DeviceMatrix(ops(), act(), tokens, shape.width(), gate, row_gap),
                 DeviceMatrix(ops(), act(), tokens, shape.width(), row_gap),
                 DeviceBytes(ops(), ops().KdaScratchBytes(tokens, static_cast<int64_t>(inputs.size()), shape.heads,
                                                          shape.head_dim, shape.conv_width)),
                 {}});
    KdaParams& params = call->params;
    params.batch = call->batch.get();
    params.heads = shape.heads;
    params.head_dim = shape.head_dim;
    params.conv_width = shape.conv_width;
    params.qkv = call->qkv;
    params.decay = call->decay;
    params.beta = call->beta;
    params.gate = call->gate;
    const bool whole = !inputs[0].conv_taps.empty();
    params.conv_taps = whole ? weights.taps.data() : nullptr;
    params.dt_bias = weights.dt_bias.data();
    params.a_log = weights.a_log.data();
    params.norm_weight = whole ? weights.norm.data() : nullptr;
    params.gate_kind = inputs[0].gate_kind;
    params.gate_lower_bound = static_cast<float>(inputs[0].lower_bound);
    params.norm_eps = static_cast<float>(inputs[0].norm_eps);
    params.state = pool.bytes.data();
    params.conv_state = static_cast<char*>(pool.bytes.data()) + pool.conv_offset;
    params.slot_stride = pool.stride;
    params.state_dtype = pool.state_dtype;
    params.out = call->out;
    params.scratch = call->scratch.data();
    return call;
  }

  // One step over several sequences, every other one with settled slots. Returns the packed output.
  std::vector<float> Step(const std::vector<oracle::KdaInput>& inputs, const std::vector<int32_t>& slots,
                          const Weights& weights, Pool& pool, const std::vector<SnapshotSpec>& snapshots = {},
                          const std::vector<int32_t>& contexts = {}, int64_t row_gap = 8) {
    const auto call = MakeCall(inputs, slots, weights, pool, snapshots, contexts, row_gap);
    call->params.slots_settled = steps_++ % 2 == 0;
    ops().Kda(call->params, ops().stream());
    return call->out.Get();
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

 private:
  int steps_ = 0;
};

}  // namespace k3::testing
