// SPDX-License-Identifier: Apache-2.0
// rms_norm on the CPU with all that it can be fused with: a residual, a norm of the branch before
// it, a scale after it.

#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

TEST(RmsNorm, WithoutANormItOnlyAddsToTheResidual) {
  TRACE_SEED();
  for (const int32_t hidden : {1, 15, 16, 100, 4096}) {
    for (const int32_t num_rows : {0, 1, 9}) {
      Random random(4);
      const int64_t n = 10 * int64_t{hidden};
      const std::vector<float> x = random.normals(n);
      const std::vector<float> before = random.normals(n);
      std::vector<float> residual = before;
      CpuContext ctx = context_of(2);
      rms_norm(ctx, {.num_rows = &num_rows,
                     .max_rows = 10,
                     .x = x.data(),
                     .x_stride = hidden,
                     .residual = residual.data(),
                     .weight = nullptr,
                     .weight_offset = 0,
                     .eps = 1e-6f,
                     .y = nullptr,
                     .y_stride = hidden,
                     .hidden = hidden});
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        const bool is_inside = i < static_cast<size_t>(num_rows * hidden);
        ASSERT_EQ(residual[i], is_inside ? before[i] + x[i] : before[i]);
      }
    }
  }
}

TEST(RmsNorm, NormalisesTheBranchBeforeItJoinsTheResidual) {
  TRACE_SEED();
  for (const int32_t hidden : {1, 15, 16, 100, 640}) {
    for (const bool wants_y : {false, true}) {
      Random random(40);
      const int32_t num_rows = 3;
      const int64_t n = num_rows * int64_t{hidden};
      const std::vector<float> x = random.normals(n, 3.0f);
      const std::vector<float> x_weight = random.normals(hidden);
      const std::vector<float> weight = random.normals(hidden);
      std::vector<float> residual = random.normals(n);
      // The same in two steps.
      std::vector<float> branch(x.size());
      std::vector<float> expected_residual = residual;
      std::vector<float> expected(x.size());
      CpuContext ctx = context_of(1);
      RmsNormParams params = {.num_rows = &num_rows,
                              .max_rows = num_rows,
                              .x = x.data(),
                              .x_stride = hidden,
                              .residual = nullptr,
                              .weight = x_weight.data(),
                              .weight_offset = 1,
                              .eps = 1e-6f,
                              .y = branch.data(),
                              .y_stride = hidden,
                              .hidden = hidden};
      rms_norm(ctx, params);
      params.x = branch.data();
      params.residual = expected_residual.data();
      params.weight = weight.data();
      params.y = expected.data();
      rms_norm(ctx, params);

      std::vector<float> y(x.size(), kNan);
      params.x = x.data();
      params.residual = residual.data();
      params.x_weight = x_weight.data();
      params.y = wants_y ? y.data() : nullptr;
      rms_norm(ctx, params);
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_TRUE(is_near(residual[i], expected_residual[i], 1e-6, 1e-6));
        ASSERT_TRUE(!wants_y || is_near(y[i], expected[i], 1e-6, 1e-6));
      }
    }
  }
}

TEST(RmsNorm, ScalesTheResidualAfterTheBranchHasJoined) {
  TRACE_SEED();
  for (const int32_t hidden : {1, 15, 16, 100, 640}) {
    for (const bool has_x_weight : {false, true}) {
      Random random(41);
      const int32_t num_rows = 3;
      const int64_t n = num_rows * int64_t{hidden};
      const float scale = 0.7f;
      const std::vector<float> x = random.normals(n, 3.0f);
      const std::vector<float> x_weight = random.normals(hidden);
      const std::vector<float> weight = random.normals(hidden);
      const std::vector<float> before = random.normals(n);
      std::vector<float> expected_residual = before;
      std::vector<float> expected(x.size());
      std::vector<float> residual = before;
      std::vector<float> y(x.size(), kNan);
      CpuContext ctx = context_of(1);
      RmsNormParams params = {.num_rows = &num_rows,
                              .max_rows = num_rows,
                              .x = x.data(),
                              .x_stride = hidden,
                              .residual = expected_residual.data(),
                              .weight = weight.data(),
                              .weight_offset = 0,
                              .eps = 1e-6f,
                              .y = nullptr,
                              .y_stride = hidden,
                              .hidden = hidden,
                              .x_weight = has_x_weight ? x_weight.data() : nullptr};
      // The same in two steps.
      rms_norm(ctx, params);
      for (float& value : expected_residual) value *= scale;
      RmsNormParams plain = params;
      plain.x = expected_residual.data();
      plain.residual = nullptr;
      plain.x_weight = nullptr;
      plain.y = expected.data();
      rms_norm(ctx, plain);

      params.residual = residual.data();
      params.residual_scale = &scale;
      params.y = y.data();
      rms_norm(ctx, params);
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_TRUE(is_near(residual[i], expected_residual[i], 1e-6, 1e-6));
        ASSERT_TRUE(is_near(y[i], expected[i], 1e-5, 1e-5));
      }
      // Without a y, and without a norm, the residual has the same bits.
      for (const bool wants_copy : {false, true}) {
        std::vector<float> again = before;
        std::vector<float> copied(x.size(), kNan);
        params.residual = again.data();
        params.weight = nullptr;
        params.y = wants_copy ? copied.data() : nullptr;
        rms_norm(ctx, params);
        ASSERT_EQ(again, residual);
        if (wants_copy) {
          ASSERT_EQ(copied, residual);
        }
      }
    }
  }
}

TEST(RmsNorm, CopiesWithoutAWeight) {
  TRACE_SEED();
  Random random(42);
  const int32_t num_rows = 2;
  const int32_t hidden = 37;
  const std::vector<float> x = random.normals(3 * hidden);
  std::vector<float> y(x.size(), -1.0f);
  CpuContext ctx = context_of(1);
  rms_norm(ctx, {.num_rows = &num_rows,
                 .max_rows = 3,
                 .x = x.data(),
                 .x_stride = hidden,
                 .residual = nullptr,
                 .weight = nullptr,
                 .weight_offset = 1,
                 .eps = 1e-6f,
                 .y = y.data(),
                 .y_stride = hidden,
                 .hidden = hidden});
  for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(y[i], i < 2 * hidden ? x[i] : -1.0f);
}

TEST(RmsNorm, MatchesReference) {
  TRACE_SEED();
  for (const int32_t hidden : {1, 16, 33, 100, 256, 2048}) {
    for (const int32_t num_rows : {0, 1, 7, 40}) {
      for (const bool has_residual : {false, true}) {
        for (const bool is_in_place : {false, true}) {
          Random random(8);
          const int64_t stride = is_in_place ? hidden : hidden + 3;
          const int32_t max_rows = num_rows + 1;
          std::vector<float> x = random.normals(max_rows * stride);
          const std::vector<float> x_before = x;
          const std::vector<float> residual_before = random.normals(int64_t{max_rows} * hidden);
          std::vector<float> residual = residual_before;
          const std::vector<float> weight = random.normals(hidden);
          std::vector<float> separate(static_cast<size_t>(max_rows * (hidden + 1)), -7.0f);
          float* const y = is_in_place ? x.data() : separate.data();
          const int64_t y_stride = is_in_place ? stride : hidden + 1;
          CpuContext ctx = context_of(2);
          rms_norm(ctx, {.num_rows = &num_rows,
                         .max_rows = max_rows,
                         .x = x.data(),
                         .x_stride = stride,
                         .residual = has_residual ? residual.data() : nullptr,
                         .weight = weight.data(),
                         .weight_offset = 1.0f,
                         .eps = 1e-6f,
                         .y = y,
                         .y_stride = y_stride,
                         .hidden = hidden});
          for (int32_t row = 0; row < num_rows; ++row) {
            std::vector<double> sum(static_cast<size_t>(hidden));
            double squares = 0.0;
            for (size_t i = 0; i < sum.size(); ++i) {
              const float from = x_before[static_cast<size_t>(row * stride) + i];
              const size_t at = static_cast<size_t>(row * hidden) + i;
              sum[i] = has_residual ? residual_before[at] + from : from;
              if (has_residual) {
                ASSERT_EQ(residual[at], static_cast<float>(sum[i]));
              }
              squares += sum[i] * sum[i];
            }
            const double factor = 1.0 / std::sqrt(squares / hidden + 1e-6);
            for (size_t i = 0; i < sum.size(); ++i) {
              ASSERT_TRUE(is_near(y[row * y_stride + static_cast<int64_t>(i)],
                                  sum[i] * factor * (double{weight[i]} + 1.0), 1e-6, 2e-6))
                  << "row " << row << ", " << i;
            }
          }
          if (!is_in_place) {
            ASSERT_EQ(separate[static_cast<size_t>(num_rows * y_stride)], -7.0f);
          }
        }
      }
    }
  }
}

TEST(RmsNorm, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  for (const int32_t hidden : {33, 100, 256, 1000}) {
    Random random(9);
    const std::vector<float> weight = random.normals(hidden);
    auto run = [&](std::vector<float> x, std::vector<float>* residual, int num_threads) {
      const int32_t num_rows = static_cast<int32_t>(x.size()) / hidden;
      std::vector<float> y(x.size());
      CpuContext ctx = context_of(num_threads);
      rms_norm(ctx, {.num_rows = &num_rows,
                     .max_rows = num_rows,
                     .x = x.data(),
                     .x_stride = hidden,
                     .residual = residual->data(),
                     .weight = weight.data(),
                     .weight_offset = 0.0f,
                     .eps = 1e-5f,
                     .y = y.data(),
                     .y_stride = hidden,
                     .hidden = hidden});
      return y;
    };
    for (const int32_t num_rows : kBatchSizes) {
      // A new probe each time: one row's sum may round alike in two orders.
      const std::vector<float> probe = random.normals(hidden);
      const std::vector<float> probe_residual = random.normals(hidden);
      std::vector<float> residual_alone = probe_residual;
      const std::vector<float> alone = run(probe, &residual_alone, 1);
      for (const int num_threads : {1, 2, 3}) {
        std::vector<float> x = random.normals(int64_t{num_rows} * hidden);
        std::vector<float> residual = random.normals(int64_t{num_rows} * hidden);
        const int64_t place = random.below(num_rows);
        std::copy(probe.begin(), probe.end(), x.begin() + place * hidden);
        std::copy(probe_residual.begin(), probe_residual.end(), residual.begin() + place * hidden);
        const std::vector<float> y = run(x, &residual, num_threads);
        ASSERT_TRUE(same_bits(alone.data(), y.data() + place * hidden, hidden))
            << "hidden " << hidden << " rows " << num_rows << " threads " << num_threads;
        ASSERT_TRUE(same_bits(residual_alone.data(), residual.data() + place * hidden, hidden));
      }
    }
  }
}

}  // namespace
}  // namespace paceline::testing
