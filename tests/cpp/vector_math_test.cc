// SPDX-License-Identifier: Apache-2.0
// The vectorised exp and tanh of the CPU ops against double precision.

#include "base/vector_math.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <gtest/gtest.h>

#include "support/op_checks.h"

namespace paceline::testing {
namespace {

struct ExpKernel {
  [[gnu::always_inline]] static void run(const float* x, float* y) { store(y, exp(load(x))); }
};
struct TanhKernel {
  [[gnu::always_inline]] static void run(const float* x, float* y) { store(y, tanh(load(x))); }
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

}  // namespace
}  // namespace paceline::testing
