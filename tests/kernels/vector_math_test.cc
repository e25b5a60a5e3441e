// The vectorised elementary functions, through the kernels that expose them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/kernel_table.h"

namespace k3 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Every table that this processor runs.
std::vector<const KernelTable*> Tables() {
  std::vector<const KernelTable*> tables;
  for (CpuIsa isa : {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (Kernels(isa) != nullptr) tables.push_back(Kernels(isa));
  }
  return tables;
}

std::vector<float> Grid(float low, float high, int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    x[i] = low + (high - low) * static_cast<float>(i) / static_cast<float>(count - 1);
  }
  return x;
}

// Distance in units of the last place of the fp32 value nearest to `exact`.
double Ulps(float value, double exact) {
  const float nearest = static_cast<float>(exact);
  const float step = std::nextafter(std::fabs(nearest), kInf) - std::fabs(nearest);
  return std::fabs(double{value} - exact) / double{step};
}

TEST(VectorMathTest, ExpWithinTwoUlp) {
  for (const KernelTable* table : Tables()) {
    for (const std::vector<float>& x : {Grid(-87, 88, 200001), Grid(-1e-3f, 1e-3f, 10001), Grid(-103, -87, 5001)}) {
      std::vector<float> y(x.size());
      table->exp(x.data(), static_cast<int64_t>(x.size()), y.data());
      for (size_t i = 0; i < x.size(); ++i)
        ASSERT_LE(Ulps(y[i], std::exp(double{x[i]})), 2) << table->name << " " << x[i];
    }
    const std::vector<float> ends = {0, -0.0f, 1000, -1000, kInf, -kInf, 88.8f, -104.5f};
    std::vector<float> y(ends.size());
    table->exp(ends.data(), static_cast<int64_t>(ends.size()), y.data());
    EXPECT_EQ(y, (std::vector<float>{1, 1, kInf, 0, kInf, 0, kInf, 0}));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    table->exp(&nan, 1, y.data());
    EXPECT_TRUE(std::isnan(y[0]));
  }
}

TEST(VectorMathTest, SigmoidWithinThreeUlp) {
  for (const KernelTable* table : Tables()) {
    const std::vector<float> x = Grid(-80, 80, 100001);
    std::vector<float> y(x.size());
    table->sigmoid(x.data(), static_cast<int64_t>(x.size()), y.data());
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_LE(Ulps(y[i], 1 / (1 + std::exp(-double{x[i]}))), 3) << table->name << " " << x[i];
  }
}

// SiTU with a huge beta on the up side isolates tanh: 1e0 * tanh(u / 1).
TEST(VectorMathTest, TanhThroughTheActivation) {
  for (const KernelTable* table : Tables()) {
    const std::vector<float> up = Grid(-12, 12, 50001);
    const std::vector<float> gate(up.size(), 3.0f);
    std::vector<float> y(up.size());
    table->gated_activation(gate.data(), up.data(), {Activation::kSitu, 1, 1}, static_cast<int64_t>(up.size()),
                            y.data());
    const double factor = std::tanh(3.0) / (1 + std::exp(-3.0));
    for (size_t i = 0; i < up.size(); ++i) {
      if (up[i] == 0) continue;
      ASSERT_LE(Ulps(y[i], factor * std::tanh(double{up[i]})), 6) << table->name << " " << up[i];
    }
  }
}

// The decays of both gates: base + delta against exp(g) with relative accuracy of the part that is left and of the part
// that is lost, for slow and fast decay.
TEST(VectorMathTest, DecaysKeepRelativeAccuracy) {
  for (const KernelTable* table : Tables()) {
    for (const KdaGate kind : {KdaGate::kBounded, KdaGate::kSoftplus}) {
      const std::vector<float> z = Grid(-30, 30, 4001);
      const std::vector<float> zeros(z.size(), 0.0f), ones(z.size(), 1.0f);
      std::vector<float> q(z.size()), k(z.size()), v(z.size()), base(z.size()), delta(z.size()), decayed(z.size());
      const float* history[1] = {ones.data()};
      KdaPrepareArgs args;
      args.head_dim = static_cast<int>(z.size());
      args.conv_width = 1;
      for (int part = 0; part < 3; ++part) {
        args.history[part] = history;
        args.taps[part] = ones.data();
      }
      args.tap_stride = static_cast<int64_t>(z.size());
      args.decay = z.data();
      args.dt_bias = zeros.data();
      args.a_log = 0.0f;
      args.gate_kind = kind;
      args.lower_bound = -5;
      args.q = q.data();
      args.k = k.data();
      args.v = v.data();
      args.decay_base = base.data();
      args.decay_delta = delta.data();
      args.decayed_k = decayed.data();
      table->kda_prepare(args);
      for (size_t i = 0; i < z.size(); ++i) {
        const double x = double{z[i]};
        const double g = kind == KdaGate::kBounded ? -5 / (1 + std::exp(-x))
                                                   : -(std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))));
        const double kept = double{base[i]} + double{delta[i]};
        // g itself carries 3 ulp, and exp multiplies its error by |g|.
        ASSERT_NEAR(kept / std::exp(g), 1, 5e-7 * (1 + std::fabs(g))) << table->name << " " << x;
        if (base[i] == 0) continue;
        ASSERT_NEAR(double{delta[i]} / std::expm1(g), 1, 1e-6) << table->name << " " << x;
      }
    }
  }
}

TEST(VectorMathTest, InstructionSetsAgreeBitForBit) {
  const std::vector<float> x = Grid(-100, 100, 5003);  // not a multiple of 16
  const int64_t n = static_cast<int64_t>(x.size());
  const KernelTable& scalar = *Kernels(CpuIsa::kScalar);
  for (const KernelTable* table : Tables()) {
    const auto same = [&](auto run) {
      std::vector<float> a(x.size()), b(x.size());
      run(scalar, a.data());
      run(*table, b.data());
      EXPECT_EQ(0, std::memcmp(a.data(), b.data(), x.size() * sizeof(float))) << table->name;
    };
    same([&](const KernelTable& t, float* y) { t.exp(x.data(), n, y); });
    same([&](const KernelTable& t, float* y) { t.sigmoid(x.data(), n, y); });
    same([&](const KernelTable& t, float* y) { t.softmax(x.data(), n, y); });
    same([&](const KernelTable& t, float* y) { t.rms_norm(x.data(), x.data(), 1e-5f, n, y); });
    same([&](const KernelTable& t, float* y) {
      t.gated_activation(x.data(), x.data(), {Activation::kSitu, 4, 25}, n, y);
    });
    same([&](const KernelTable& t, float* y) {
      t.gated_activation(x.data(), x.data(), {Activation::kSwiglu, 1, 0}, n, y);
    });
  }
}

TEST(VectorMathTest, ALaneDoesNotDependOnItsPlace) {
  const std::vector<float> x = Grid(-20, 20, 100);
  for (const KernelTable* table : Tables()) {
    std::vector<float> all(x.size());
    table->exp(x.data(), 100, all.data());
    for (int i = 0; i < 100; ++i) {
      float one;
      table->exp(&x[i], 1, &one);
      EXPECT_EQ(one, all[i]) << table->name;
    }
  }
}

}  // namespace
}  // namespace k3
