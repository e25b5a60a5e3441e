#include "kernels/cpu/kda_chunked.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

constexpr int64_t kDim = 128;

struct Inputs {
  std::vector<float> q, k, v, g, beta, state;
  KdaGate gate_kind = KdaGate::kBounded;
  int64_t tokens() const { return static_cast<int64_t>(beta.size()); }
};

void Normalise(std::vector<float>& rows, float scale) {
  for (size_t r = 0; r < rows.size(); r += kDim) {
    double sum = 0;
    for (int64_t c = 0; c < kDim; ++c) sum += double{rows[r + c]} * double{rows[r + c]};
    for (int64_t c = 0; c < kDim; ++c)
      rows[r + c] = static_cast<float>(rows[r + c] * double{scale} / std::sqrt(sum + 1e-6));
  }
}

// Keys with a mutual cosine of about `cosine`.
Inputs MakeInputs(int64_t tokens, double cosine, uint32_t seed) {
  Random random(seed);
  Inputs in;
  in.q = random.Normal(tokens * kDim);
  in.k = random.Normal(tokens * kDim);
  const std::vector<float> common = random.Normal(kDim);
  for (size_t i = 0; i < in.k.size(); ++i) {
    in.k[i] = static_cast<float>(std::sqrt(1 - cosine) * in.k[i] + std::sqrt(cosine) * common[i % kDim]);
  }
  Normalise(in.q, static_cast<float>(1 / std::sqrt(double{kDim})));
  Normalise(in.k, 1);
  in.v = random.Normal(tokens * kDim);
  in.g = random.Uniform(tokens * kDim, -5, 0);
  in.beta = random.Uniform(tokens, 0, 1);
  in.state = random.Normal(kDim * kDim);
  return in;
}

void Check(const Inputs& in, const std::string& what, double tolerance = 1e-5) {
  std::vector<float> state = in.state, out(in.v.size(), std::numeric_limits<float>::quiet_NaN());
  KdaChunkedParams params;
  params.tokens = in.tokens();
  params.head_dim = params.stride = kDim;
  params.q = in.q.data();
  params.k = in.k.data();
  params.v = in.v.data();
  params.g = in.g.data();
  params.beta = in.beta.data();
  params.gate_kind = in.gate_kind;
  params.state = state.data();
  params.out = out.data();
  KdaChunked(params);
  oracle::Doubles expected_state = oracle::ToDouble(in.state);
  const oracle::Doubles expected =
      oracle::KdaRecurrence(oracle::ToDouble(in.q), oracle::ToDouble(in.k), oracle::ToDouble(in.v),
                            oracle::ToDouble(in.g), oracle::ToDouble(in.beta), in.tokens(), kDim, expected_state);
  ExpectClose(out, expected, tolerance, what + ": output");
  ExpectClose(state, expected_state, tolerance, what + ": state");
}

TEST(KdaChunkedTest, EveryLength) {
  for (int64_t tokens : {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 1000}) {
    Check(MakeInputs(tokens, 0, static_cast<uint32_t>(tokens)), std::to_string(tokens) + " tokens");
  }
}

// B11.
TEST(KdaChunkedTest, ConstantGates) {
  for (KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
    for (float decay : {0.0f, -1e-4f, -1.0f, -2.5f, -5.0f}) {
      for (float beta : {0.0f, 0.5f, 1.0f}) {
        for (int64_t tokens : {17, 64, 128}) {
          Inputs in = MakeInputs(tokens, 0, 2);
          in.gate_kind = kind;
          in.g.assign(in.g.size(), decay);
          in.beta.assign(in.beta.size(), beta);
          Check(in,
                std::to_string(tokens) + " tokens, decay " + std::to_string(decay) + ", beta " + std::to_string(beta));
        }
      }
    }
  }
}

TEST(KdaChunkedTest, EqualKeys) {
  for (float decay : {-1e-4f, -1.0f, -5.0f}) {
    for (float beta : {0.5f, 1.0f}) {
      Inputs in = MakeInputs(200, 1, 3);
      in.g.assign(in.g.size(), decay);
      in.beta.assign(in.beta.size(), beta);
      Check(in, "decay " + std::to_string(decay) + ", beta " + std::to_string(beta));
    }
  }
}

TEST(KdaChunkedTest, CorrelatedKeysWithSlowDecay) {
  for (double cosine : {0.5, 0.9, 0.95, 0.99}) {
    for (int64_t tokens : {64, 1000}) {
      Inputs in = MakeInputs(tokens, cosine, 4);
      Random random(5);
      in.g = random.Uniform(tokens * kDim, -1e-3f, 0);
      Check(in, "cosine " + std::to_string(cosine) + ", " + std::to_string(tokens) + " tokens");
    }
  }
}

TEST(KdaChunkedTest, UnboundedGatesInTheThousands) {
  for (double cosine : {0.0, 0.9}) {
    Inputs in = MakeInputs(300, cosine, 6);
    in.gate_kind = KdaGate::kSoftplus;
    Random random(7);
    // Mostly slow, with single decays of -10 to -10000 scattered over channels and tokens.
    for (float& g : in.g) {
      const int kind = random.Int(0, 19);
      g = kind == 0  ? -random.Uniform(1, 10, 10000)[0]
          : kind < 5 ? -random.Uniform(1, 0, 10)[0]
                     : -random.Uniform(1, 0, 1e-3f)[0];
    }
    Check(in, "cosine " + std::to_string(cosine));
    in.g.assign(in.g.size(), -5000.0f);
    Check(in, "all -5000");
  }
}

TEST(KdaChunkedTest, MixedSaturatedAndOpenChannels) {
  Inputs in = MakeInputs(200, 0.9, 8);
  for (size_t i = 0; i < in.g.size(); ++i) in.g[i] = i % 3 == 0 ? -5.0f : i % 3 == 1 ? -1e-4f : 0.0f;
  Check(in, "bounded");
  in.gate_kind = KdaGate::kSoftplus;
  Check(in, "unbounded");
}

TEST(KdaChunkedTest, StridedRows) {
  const Inputs in = MakeInputs(70, 0.5, 9);
  const int64_t stride = kDim + 24;
  const auto spread = [&](const std::vector<float>& rows) {
    std::vector<float> wide(static_cast<size_t>(70 * stride), std::numeric_limits<float>::quiet_NaN());
    for (int64_t t = 0; t < 70; ++t) std::copy_n(rows.begin() + t * kDim, kDim, wide.begin() + t * stride);
    return wide;
  };
  const std::vector<float> q = spread(in.q), k = spread(in.k), v = spread(in.v), g = spread(in.g);
  std::vector<float> out(q.size()), narrow_out(in.q.size()), state = in.state, narrow_state = in.state;
  KdaChunkedParams params{70,       kDim,           stride, q.data(),          k.data(),     v.data(),
                          g.data(), in.beta.data(), 1,      KdaGate::kBounded, state.data(), out.data()};
  KdaChunked(params);
  KdaChunkedParams narrow{70,          kDim,           kDim, in.q.data(),       in.k.data(),         in.v.data(),
                          in.g.data(), in.beta.data(), 1,    KdaGate::kBounded, narrow_state.data(), narrow_out.data()};
  KdaChunked(narrow);
  ExpectSameBits(state, narrow_state);
  for (int64_t t = 0; t < 70; ++t) ExpectSameBits(Slice(out, 1, t * stride, kDim), Slice(narrow_out, kDim, t, 1));
}

}  // namespace
}  // namespace k3::testing
