// SPDX-License-Identifier: Apache-2.0
// The vectorised exp and tanh of the CPU ops, and the sigmoid that backends share, against double
// precision.

#include "base/vector_math.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <gtest/gtest.h>

#include "base/sigmoid.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

struct ExpKernel {
  [[gnu::always_inline]] static void run(const float* x, float* y) { store(y, exp(load(x))); }
};
struct TanhKernel {
  [[gnu::always_inline]] static void run(const float* x, float* y) { store(y, tanh(load(x))); }
};

struct SigmoidKernel {
  [[gnu::always_inline]] static void run(const float* x, float* y, int32_t count) {
    for (int32_t i = 0; i < count; ++i) y[i] = sigmoid_same_bits(x[i]);
  }
};

double ulps(float got, double want) {
  const float nearest = static_cast<float>(want);
  const float next = std::nextafter(std::fabs(nearest), kInf);
  return std::fabs(got - want) / (static_cast<double>(next) - std::fabs(nearest));
}

TEST(VectorMath, ExpAndTanhAreWithinTwoUlp) {
  double worst_exp = 0.0;
  double worst_tanh = 0.0;
  for (double x = -103.0; x < 88.7; x += 0.00137 * 16) {
    float in[16];
    float out[16];
    for (int i = 0; i < 16; ++i) in[i] = static_cast<float>(x + 0.00137 * i);
    run_best_isa<ExpKernel>(static_cast<const float*>(in), &out[0]);
    for (int i = 0; i < 16; ++i) {
      if (in[i] < 88.7f) worst_exp = std::max(worst_exp, ulps(out[i], std::exp(double{in[i]})));
    }
    for (int i = 0; i < 16; ++i) in[i] *= 0.1f;
    run_best_isa<TanhKernel>(static_cast<const float*>(in), &out[0]);
    for (int i = 0; i < 16; ++i) {
      worst_tanh = std::max(worst_tanh, ulps(out[i], std::tanh(double{in[i]})));
    }
  }
  EXPECT_LE(worst_exp, 2.0);
  EXPECT_LE(worst_tanh, 2.0);
  std::printf("worst error: exp %.2f ulp, tanh %.2f ulp\n", worst_exp, worst_tanh);
}

TEST(VectorMath, ExpAndTanhOfSpecialValues) {
  const float in[16] = {0.0f,   -0.0f,  -kInf, kInf,   kNan,    -1e30f, 1e30f, -104.5f,
                        -87.5f, -103.f, 89.5f, 1e-30f, -1e-30f, 20.0f,  -20.f, 88.0f};
  float out[16];
  run_best_isa<ExpKernel>(&in[0], &out[0]);
  for (int i = 0; i < 16; ++i) {
    EXPECT_TRUE(is_near(out[i], std::exp(in[i]), 0x1p-149, 3e-7)) << "exp(" << in[i] << ")";
  }
  EXPECT_EQ(out[2], 0.0f);
  run_best_isa<TanhKernel>(&in[0], &out[0]);
  for (int i = 0; i < 16; ++i) {
    EXPECT_TRUE(is_near(out[i], std::tanh(in[i]), 0.0, 3e-7)) << "tanh(" << in[i] << ")";
  }
}

// Contracted or vectorised code may not change a bit, as a GPU computes the same.
TEST(VectorMath, SigmoidHasTheSameBitsOnEveryInstructionSet) {
  std::vector<float> in = {0.0f, -0.0f, -kInf, kInf, kNan, -86.99f, -87.0f, 87.0f, 1e-30f, 100.0f};
  for (double x = -86.9; x < 89; x += 0.000731) in.push_back(static_cast<float>(x));
  const auto count = static_cast<int32_t>(in.size());
  std::vector<float> out(in.size());
  std::vector<float> baseline(in.size());
  run_best_isa<SigmoidKernel>(static_cast<const float*>(in.data()), out.data(), count);
  Compiled<SigmoidKernel, Isa::kBaseline>::run(static_cast<const float*>(in.data()),
                                               baseline.data(), count);
  EXPECT_EQ(out, baseline);
  const std::vector<float> special = {0.5f, 0.5f, 0.0f, 1.0f, 0.0f};
  EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + 5), special);
  double worst = 0.0;
  for (size_t i = 8; i < in.size(); ++i) {
    worst = std::max(worst, ulps(out[i], 1 / (1 + std::exp(-double{in[i]}))));
  }
  EXPECT_LE(worst, 4.0);
  std::printf("worst error: sigmoid %.2f ulp\n", worst);
}

}  // namespace
}  // namespace paceline::testing
