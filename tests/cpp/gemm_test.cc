// SPDX-License-Identifier: Apache-2.0
// gemm on the CPU: against a reference in double precision and in the documented order of
// additions; the bits of a row depend on that row alone.

#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

struct GemmCase {
  int32_t num_rows;
  int32_t n;
  int32_t k;
  DType dtype;
  int32_t x_padding;  // stride - k
  int32_t y_padding;
  bool has_bias;
  int num_threads;
};

void PrintTo(const GemmCase& c, std::ostream* out) {
  *out << "M" << c.num_rows << " N" << c.n << " K" << c.k << " " << dtype_name(c.dtype) << " x+"
       << c.x_padding << " y+" << c.y_padding << (c.has_bias ? " bias" : "") << " threads "
       << c.num_threads;
}

class GemmTest : public ::testing::TestWithParam<GemmCase> {};

TEST_P(GemmTest, MatchesReference) {
  TRACE_SEED();
  const GemmCase& c = GetParam();
  Random random(1);
  const int64_t x_stride = c.k + c.x_padding;
  const int64_t y_stride = c.n + c.y_padding;
  const int32_t max_rows = c.num_rows + 2;
  std::vector<float> x = random.normals(max_rows * x_stride + 1);
  for (int64_t row = 0; row < max_rows; ++row) {
    for (int64_t i = c.k; i < x_stride; ++i) x[static_cast<size_t>(row * x_stride + i)] = kNan;
  }
  // With bfloat16 weights some machines round x as well, which leaves rounded values as they are.
  if (c.dtype == DType::kBFloat16) x = typed_array(c.dtype, x).rounded;
  const TypedArray weight = typed_array(c.dtype, random.normals(int64_t{c.n} * c.k, 0.05f));
  const std::vector<float> bias = random.normals(c.n);
  std::vector<float> y(static_cast<size_t>(max_rows * y_stride), -77.0f);
  CpuContext ctx = context_of(c.num_threads);
  gemm(ctx, {.num_rows = &c.num_rows,
             .max_rows = max_rows,
             .x = x.data(),
             .x_stride = x_stride,
             .weight = plain_matrix(weight.bytes.data(), c.n, c.k, c.dtype),
             .bias = c.has_bias ? bias.data() : nullptr,
             .y = y.data(),
             .y_stride = y_stride});
  for (int64_t row = 0; row < max_rows; ++row) {
    for (int64_t column = 0; column < y_stride; ++column) {
      const float got = y[static_cast<size_t>(row * y_stride + column)];
      if (row >= c.num_rows || column >= c.n) {
        ASSERT_EQ(got, -77.0f) << "touched outside of y at " << row << ", " << column;
        continue;
      }
      double want = c.has_bias ? bias[static_cast<size_t>(column)] : 0.0;
      double magnitude = std::fabs(want);
      for (int64_t i = 0; i < c.k; ++i) {
        const double product = double{x[static_cast<size_t>(row * x_stride + i)]} *
                               weight.rounded[static_cast<size_t>(column * c.k + i)];
        want += product;
        magnitude += std::fabs(product);
      }
      // The error bound of K / 16 additions a lane, 4 in the tree and 1 for the bias.
      const double bound = (c.k / 16.0 + 8.0) * kFloatEpsilon * magnitude;
      ASSERT_TRUE(is_near(got, want, bound, 0.0)) << "row " << row << ", column " << column;
    }
  }
}

std::vector<GemmCase> gemm_cases() {
  std::vector<GemmCase> cases;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t k : {1, 15, 16, 17, 33, 100, 256, 1000}) {
      cases.push_back({5, 37, k, dtype, 0, 0, false, 1});
      cases.push_back({13, 7, k, dtype, 3, 5, true, 2});
    }
    for (const int32_t rows : {0, 1, 2, 3, 4, 6, 8, 12, 19}) {
      cases.push_back({rows, 67, 96, dtype, 1, 1, true, 1});
    }
    for (const int32_t n : {1, 2, 3, 4, 5, 15, 16, 17, 31}) {
      cases.push_back({9, n, 64, dtype, 0, 0, false, 3});
    }
    cases.push_back({65, 300, 128, dtype, 0, 0, true, 2});
    cases.push_back({70, 40, 4100, dtype, 0, 0, false, 2});  // several blocks of rows
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Cases, GemmTest, ::testing::ValuesIn(gemm_cases()));

TEST(Gemm, GroupsReadInputsOfTheirOwn) {
  TRACE_SEED();
  Random random(5);
  constexpr int32_t kRows = 3;
  constexpr int32_t kGroups = 4;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t group_n : {5, 16, 300}) {
      constexpr int32_t kK = 96;
      const std::vector<float> x = random.normals(kRows * kGroups * kK);
      const TypedArray weight = typed_array(dtype, random.normals(kGroups * group_n * kK));
      const std::vector<float> bias = random.normals(kGroups * group_n);
      std::vector<float> together(static_cast<size_t>(kRows * kGroups * group_n));
      std::vector<float> one_by_one = together;
      CpuContext ctx = context_of(2);
      GemmParams p = {.num_rows = &kRows,
                      .max_rows = kRows,
                      .x = x.data(),
                      .x_stride = kGroups * kK,
                      .weight = plain_matrix(weight.bytes.data(), kGroups * group_n, kK, dtype),
                      .bias = bias.data(),
                      .y = together.data(),
                      .y_stride = kGroups * group_n};
      p.num_groups = kGroups;
      gemm(ctx, p);
      for (int32_t group = 0; group < kGroups; ++group) {
        const int64_t first = int64_t{group} * group_n;
        p.num_groups = 1;
        p.x = x.data() + group * kK;
        p.weight =
            plain_matrix(weight.bytes.data() + first * kK * dtype_bytes(dtype), group_n, kK, dtype);
        p.bias = bias.data() + first;
        p.y = one_by_one.data() + first;
        gemm(ctx, p);
      }
      EXPECT_TRUE(same_bits(together.data(), one_by_one.data(), std::ssize(together)));
    }
  }
}

// Whether gemm was compiled to fused multiply-adds (it is not for SSE2, nor below -O2).
bool is_gemm_fused() {
  std::vector<float> x(32, 0.0f);
  std::vector<float> weight(32, 0.0f);
  x[0] = -1.0f;
  weight[0] = 1.0f;
  x[16] = weight[16] = 1.0f + 0x1p-12f;  // the square, 1 + 2^-11 + 2^-24, rounds to 1 + 2^-11
  const int32_t num_rows = 1;
  float y = 0.0f;
  CpuContext ctx = context_of(1);
  gemm(ctx, {.num_rows = &num_rows,
             .max_rows = 1,
             .x = x.data(),
             .x_stride = 32,
             .weight = plain_matrix(weight.data(), 1, 32, DType::kFloat32),
             .bias = nullptr,
             .y = &y,
             .y_stride = 1});
  return y != 0x1p-11f;
}

// One output of gemm by itself: one row of x, one row of the weight.
float gemm_alone(const float* x, const std::byte* weight, DType dtype, int32_t k) {
  const int32_t num_rows = 1;
  float y = 0.0f;
  CpuContext ctx = context_of(1);
  gemm(ctx, {.num_rows = &num_rows,
             .max_rows = 1,
             .x = x,
             .x_stride = k,
             .weight = plain_matrix(weight, 1, k, dtype),
             .bias = nullptr,
             .y = &y,
             .y_stride = 1});
  return y;
}

// Whether gemm rounds x to bfloat16 beside bfloat16 weights (it has a dot product for them).
bool does_gemm_round_x() {
  std::vector<float> x(32, 0.0f);
  x[0] = 1.0f + 0x1p-12f;
  std::vector<float> weight(32, 1.0f);
  const TypedArray typed = typed_array(DType::kBFloat16, weight);
  return gemm_alone(x.data(), typed.bytes.data(), DType::kBFloat16, 32) == 1.0f;
}

TEST(Gemm, RoundsXToBfloat16AtMost) {
  TRACE_SEED();
  Random random(17);
  const int32_t k = 640;
  for (int i = 0; i < 50; ++i) {
    const std::vector<float> x = random.normals(k);
    const TypedArray weight = typed_array(DType::kBFloat16, random.normals(k));
    double want = 0;
    double magnitude = 0;
    for (int32_t j = 0; j < k; ++j) {
      const double product =
          double{x[static_cast<size_t>(j)]} * weight.rounded[static_cast<size_t>(j)];
      want += product;
      magnitude += std::fabs(product);
    }
    const double got = gemm_alone(x.data(), weight.bytes.data(), DType::kBFloat16, k);
    // Half an ulp of eight bits for each product.
    ASSERT_TRUE(is_near(got, want, (0x1p-9 + 50 * kFloatEpsilon) * magnitude, 0.0));
  }
}

// The order of a sum as gemm_cpu.cc states it, one lane at a time.
float sum_in_lane_order(const float* x, const float* w, int32_t k, bool is_fused) {
  float lanes[16] = {};
  for (int32_t at = 0; at < (k + 15) / 16 * 16; ++at) {
    const float xv = at < k ? x[at] : 0.0f;
    const float wv = at < k ? w[at] : 0.0f;
    float& lane = lanes[at % 16];
    const volatile float product = xv * wv;  // rounded to float
    lane = is_fused ? std::fma(xv, wv, lane) : lane + product;
  }
  for (const int step : {8, 4, 2, 1}) {
    for (int l = 0; l < step; ++l) lanes[l] += lanes[l + step];
  }
  return lanes[0];
}

TEST(Gemm, EveryTileFollowsTheLaneOrder) {
  TRACE_SEED();
  const bool is_fused = is_gemm_fused();
  const bool rounds_x = does_gemm_round_x();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    // The processor decides how the dot product adds a pair, so there the 1x1 tile is the
    // reference.
    const bool has_own_order = dtype == DType::kBFloat16 && rounds_x;
    for (const int32_t k : {1, 15, 16, 17, 31, 32, 33, 48, 63, 100, 256, 1007}) {
      // Rows: every tile height and the remainder. Columns: wide tiles with and without a next
      // tile to prefetch, and narrow ones.
      for (const int32_t num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13}) {
        for (const int32_t n : {1, 3, 4, 11, 23}) {
          Random random(static_cast<uint64_t>(1000 * k + 100 * num_rows + n));
          const std::vector<float> x = random.normals(int64_t{num_rows} * k);
          const TypedArray weight = typed_array(dtype, random.normals(int64_t{n} * k));
          std::vector<float> y(static_cast<size_t>(num_rows * n));
          CpuContext ctx = context_of(1);
          gemm(ctx, {.num_rows = &num_rows,
                     .max_rows = num_rows,
                     .x = x.data(),
                     .x_stride = k,
                     .weight = plain_matrix(weight.bytes.data(), n, k, dtype),
                     .bias = nullptr,
                     .y = y.data(),
                     .y_stride = n});
          for (int32_t row = 0; row < num_rows; ++row) {
            for (int32_t column = 0; column < n; ++column) {
              const float* const row_x = x.data() + int64_t{row} * k;
              const float want =
                  has_own_order
                      ? gemm_alone(row_x, weight.bytes.data() + int64_t{column} * k * 2, dtype, k)
                      : sum_in_lane_order(row_x, weight.rounded.data() + int64_t{column} * k, k,
                                          is_fused);
              ASSERT_EQ(y[static_cast<size_t>(row * n + column)], want)
                  << dtype_name(dtype) << " rows " << num_rows << " n " << n << " k " << k << " at "
                  << row << ", " << column;
            }
          }
        }
      }
    }
  }
}

TEST(Gemm, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    // (272, 520) is wide enough for several threads at one row; (24, 5000) has blocks of rows.
    for (const auto& [n, k] : {std::pair{50, 33}, {67, 100}, {272, 520}, {24, 5000}}) {
      Random random(2);
      const TypedArray weight = typed_array(dtype, random.normals(int64_t{n} * k, 0.05f));
      const std::vector<float> bias = random.normals(n);
      auto run = [&](const std::vector<float>& x, int32_t num_rows, int num_threads) {
        std::vector<float> y(static_cast<size_t>(num_rows) * static_cast<size_t>(n));
        CpuContext ctx = context_of(num_threads);
        gemm(ctx, {.num_rows = &num_rows,
                   .max_rows = num_rows,
                   .x = x.data(),
                   .x_stride = k,
                   .weight = plain_matrix(weight.bytes.data(), n, k, dtype),
                   .bias = bias.data(),
                   .y = y.data(),
                   .y_stride = n});
        return y;
      };
      for (const int32_t num_rows : kBatchSizes) {
        // A new probe each time: one row's sums may round alike in two orders.
        const std::vector<float> probe = random.normals(k);
        const std::vector<float> alone = run(probe, 1, 1);
        for (const int num_threads : {1, 2, 3}) {
          std::vector<float> x = random.normals(int64_t{num_rows} * k);
          const int32_t places[] = {0, num_rows - 1, random.below(num_rows),
                                    random.below(num_rows)};
          for (const int32_t place : places) {
            std::copy(probe.begin(), probe.end(), x.begin() + int64_t{place} * k);
          }
          const std::vector<float> y = run(x, num_rows, num_threads);
          for (const int32_t place : places) {
            ASSERT_TRUE(same_bits(alone.data(), y.data() + int64_t{place} * n, n))
                << dtype_name(dtype) << " n " << n << " k " << k << " rows " << num_rows
                << " place " << place << " threads " << num_threads;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace paceline::testing
