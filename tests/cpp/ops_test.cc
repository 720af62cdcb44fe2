// SPDX-License-Identifier: Apache-2.0
//
// The CPU ops against naive references in double precision, and the property that the runtime
// rests on: a row's bits depend on that row's inputs alone. PACELINE_SEED overrides the seed of the
// random inputs; failures print it.

#include "ops/ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/float_types.h"
#include "device/cpu_context.h"
#include "ops/vector_math.h"
#include "sample/philox.h"

namespace paceline {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kFloatEpsilon = 0x1p-24;

constexpr int32_t kBatchSizes[] = {1,  2,  3,  4,  5,  7,  8,  9,   16,
                                   17, 31, 32, 33, 63, 64, 65, 128, 256};

uint64_t base_seed() {
  static const uint64_t seed = [] {
    const char* const text = std::getenv("PACELINE_SEED");
    return text == nullptr ? uint64_t{20240607} : std::strtoull(text, nullptr, 10);
  }();
  return seed;
}

#define TRACE_SEED() SCOPED_TRACE(testing::Message() << "PACELINE_SEED=" << base_seed())

CpuContext context_of(int num_threads) {
  static std::map<int, ThreadPool> pools;
  return {.num_threads = num_threads,
          .threads = &pools.try_emplace(num_threads, num_threads).first->second};
}

class Random {
 public:
  explicit Random(uint64_t salt) : engine_(base_seed() * 1000003 + salt) {}
  float normal() { return std::normal_distribution<float>()(engine_); }
  int32_t below(int32_t n) { return static_cast<int32_t>(engine_() % static_cast<uint64_t>(n)); }
  std::vector<float> normals(int64_t n, float scale = 1.0f) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = scale * normal();
    return values;
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

// Values as an array of float32 or bfloat16 bytes; `rounded` is what the array then holds.
struct TypedArray {
  std::vector<std::byte> bytes;
  std::vector<float> rounded;
};

TypedArray typed_array(DType dtype, const std::vector<float>& values) {
  TypedArray array = {
      .bytes = std::vector<std::byte>(values.size() * static_cast<size_t>(dtype_bytes(dtype))),
      .rounded = values};
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kFloat32) {
      std::memcpy(array.bytes.data() + 4 * i, &values[i], 4);
    } else {
      const uint16_t bits = float_to_bf16(values[i]);
      std::memcpy(array.bytes.data() + 2 * i, &bits, 2);
      array.rounded[i] = bf16_to_float(bits);
    }
  }
  return array;
}

float element(DType dtype, const std::byte* from, int64_t index) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, from + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from + 2 * index, 2);
  return bf16_to_float(bits);
}

void set_element(DType dtype, std::byte* to, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to + 4 * index, &value, 4);
  } else {
    const uint16_t bits = float_to_bf16(value);
    std::memcpy(to + 2 * index, &bits, 2);
  }
}

// Absolute or relative, whichever is wider; NaN and infinities must agree exactly.
testing::AssertionResult is_near(double got, double want, double absolute, double relative) {
  if (std::isnan(want) || std::isnan(got)) {
    if (std::isnan(want) && std::isnan(got)) return testing::AssertionSuccess();
  } else if (got == want ||
             std::fabs(got - want) <= std::max(absolute, relative * std::fabs(want))) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "got " << got << ", want " << want;
}

bool same_bits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0;
}

// --- vector_math -------------------------------------------------------------------------------

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

// --- gemm --------------------------------------------------------------------------------------

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

class GemmTest : public testing::TestWithParam<GemmCase> {};

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
  // With bfloat16 weights some machines round x as well: what is rounded already stays exact.
  if (c.dtype == DType::kBFloat16) x = typed_array(c.dtype, x).rounded;
  const TypedArray weight = typed_array(c.dtype, random.normals(int64_t{c.n} * c.k, 0.05f));
  const std::vector<float> bias = random.normals(c.n);
  std::vector<float> y(static_cast<size_t>(max_rows * y_stride), -77.0f);
  CpuContext ctx = context_of(c.num_threads);
  gemm(ctx, {.num_rows = &c.num_rows,
             .max_rows = max_rows,
             .x = x.data(),
             .x_stride = x_stride,
             .weight = weight.bytes.data(),
             .weight_dtype = c.dtype,
             .bias = c.has_bias ? bias.data() : nullptr,
             .y = y.data(),
             .y_stride = y_stride,
             .n = c.n,
             .k = c.k});
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
INSTANTIATE_TEST_SUITE_P(Cases, GemmTest, testing::ValuesIn(gemm_cases()));

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
             .weight = weight.data(),
             .weight_dtype = DType::kFloat32,
             .bias = nullptr,
             .y = &y,
             .y_stride = 1,
             .n = 1,
             .k = 32});
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
             .weight = weight,
             .weight_dtype = dtype,
             .bias = nullptr,
             .y = &y,
             .y_stride = 1,
             .n = 1,
             .k = k});
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
    // How the dot product adds a pair is the processor's own: there the 1x1 tile is the reference.
    const bool has_own_order = dtype == DType::kBFloat16 && rounds_x;
    for (const int32_t k : {1, 15, 16, 17, 31, 32, 33, 48, 63, 100, 256, 1007}) {
      // Rows: every tile height and what is left over. Columns: wide tiles with and without a next
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
                     .weight = weight.bytes.data(),
                     .weight_dtype = dtype,
                     .bias = nullptr,
                     .y = y.data(),
                     .y_stride = n,
                     .n = n,
                     .k = k});
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
                   .weight = weight.bytes.data(),
                   .weight_dtype = dtype,
                   .bias = bias.data(),
                   .y = y.data(),
                   .y_stride = n,
                   .n = n,
                   .k = k});
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

// --- embed, add, gated_activation, gather_rows, soft_cap ----------------------------------------

TEST(Embed, ScalesRowsAndZeroesTokensOutsideTheTable) {
  TRACE_SEED();
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t hidden : {1, 16, 33, 256}) {
      Random random(3);
      const int32_t vocab_size = 11;
      const TypedArray table = typed_array(dtype, random.normals(int64_t{vocab_size} * hidden));
      const std::vector<int32_t> tokens = {0, 10, 11, -1, 5, kMin, kMax, 3};
      const int32_t max_rows = static_cast<int32_t>(tokens.size());
      for (const int32_t num_rows : {0, 1, max_rows}) {
        std::vector<float> y(static_cast<size_t>(max_rows) * static_cast<size_t>(hidden), -7.0f);
        CpuContext ctx = context_of(2);
        embed(ctx, {.num_rows = &num_rows,
                    .max_rows = max_rows,
                    .token_ids = tokens.data(),
                    .table = table.bytes.data(),
                    .table_dtype = dtype,
                    .scale = 1.5f,
                    .y = y.data(),
                    .vocab_size = vocab_size,
                    .hidden = hidden});
        for (int32_t row = 0; row < max_rows; ++row) {
          const int32_t token = tokens[static_cast<size_t>(row)];
          for (int32_t i = 0; i < hidden; ++i) {
            float want = 0.0f;
            if (token >= 0 && token < vocab_size) {
              want = 1.5f * table.rounded[static_cast<size_t>(token * hidden + i)];
            }
            if (row >= num_rows) want = -7.0f;
            ASSERT_EQ(y[static_cast<size_t>(row * hidden + i)], want) << row << ", " << i;
          }
        }
      }
    }
  }
}

TEST(RmsNorm, AddsOnlyToTheResidualWhereNothingElseIsAsked) {
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

TEST(PerLayerInputs, MatchesReference) {
  TRACE_SEED();
  constexpr int32_t kVocab = 7;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t size : {1, 8, 16, 20, 256}) {
      for (const int num_threads : {1, 2}) {
        Random random(43);
        const int32_t num_layers = 5;
        const int32_t num_rows = 4;
        const int64_t width = int64_t{num_layers} * size;
        const std::vector<int32_t> tokens = {3, -1, 0, kVocab, 6};  // the last is beyond num_rows
        const std::vector<float> before = random.normals(5 * width, 3.0f);
        const std::vector<float> weight = random.normals(size);
        const std::vector<float> table = random.normals(kVocab * width);
        std::vector<uint16_t> narrow;
        for (const float value : table) narrow.push_back(float_to_bf16(value));
        std::vector<float> x = before;
        CpuContext ctx = context_of(num_threads);
        const bool is_bf16 = dtype == DType::kBFloat16;
        per_layer_inputs(ctx, {.num_rows = &num_rows,
                               .max_rows = 5,
                               .x = x.data(),
                               .token_ids = tokens.data(),
                               .table = is_bf16 ? static_cast<const void*>(narrow.data())
                                                : static_cast<const void*>(table.data()),
                               .table_dtype = dtype,
                               .vocab_size = kVocab,
                               .weight = weight.data(),
                               .weight_offset = 1,
                               .eps = 1e-3f,
                               .x_scale = 0.3f,
                               .table_scale = 2.5f,
                               .scale = 0.7f,
                               .num_layers = num_layers,
                               .size = size});
        for (int64_t i = 0; i < 5 * width; ++i) {
          const int64_t row = i / width;
          if (row >= num_rows) {
            ASSERT_EQ(x[static_cast<size_t>(i)], before[static_cast<size_t>(i)]);
            continue;
          }
          double squares = 0.0;
          const int64_t first = i / size * size;
          for (int64_t j = first; j < first + size; ++j) {
            const double value = 0.3f * double{before[static_cast<size_t>(j)]};
            squares += value * value;
          }
          const double normed = 0.3f * double{before[static_cast<size_t>(i)]} /
                                std::sqrt(squares / size + 1e-3f) *
                                (double{weight[static_cast<size_t>(i % size)]} + 1);
          const int32_t token = tokens[static_cast<size_t>(row)];
          double entry = 0.0;
          if (token >= 0 && token < kVocab) {
            const auto at = static_cast<size_t>(token * width + i % width);
            entry = is_bf16 ? bf16_to_float(narrow[at]) : table[at];
          }
          ASSERT_TRUE(
              is_near(x[static_cast<size_t>(i)], 0.7f * (normed + 2.5 * entry), 2e-6, 2e-6));
        }
      }
    }
  }
}

TEST(PerLayerInputs, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  Random random(44);
  constexpr int32_t kVocab = 50;
  const int32_t num_layers = 4;
  const int32_t size = 24;
  const int64_t width = int64_t{num_layers} * size;
  const std::vector<float> weight = random.normals(size);
  const std::vector<float> table = random.normals(kVocab * width);
  const auto run = [&](std::vector<float> x, std::vector<int32_t> tokens, int num_threads) {
    const auto num_rows = static_cast<int32_t>(tokens.size());
    CpuContext ctx = context_of(num_threads);
    per_layer_inputs(ctx, {.num_rows = &num_rows,
                           .max_rows = num_rows,
                           .x = x.data(),
                           .token_ids = tokens.data(),
                           .table = table.data(),
                           .table_dtype = DType::kFloat32,
                           .vocab_size = kVocab,
                           .weight = weight.data(),
                           .weight_offset = 0,
                           .eps = 1e-6f,
                           .x_scale = 0.2f,
                           .table_scale = 4,
                           .scale = 0.7f,
                           .num_layers = num_layers,
                           .size = size});
    return x;
  };
  const std::vector<float> probe = random.normals(width);
  const std::vector<float> alone = run(probe, {11}, 1);
  for (const int32_t num_rows : kBatchSizes) {
    std::vector<float> x = random.normals(num_rows * width);
    std::vector<int32_t> tokens(static_cast<size_t>(num_rows));
    for (int32_t& token : tokens) token = random.below(kVocab);
    const int32_t place = random.below(num_rows);
    std::copy(probe.begin(), probe.end(), x.begin() + place * width);
    tokens[static_cast<size_t>(place)] = 11;
    const std::vector<float> y = run(x, tokens, 3);
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(), y.begin() + place * width));
  }
}

TEST(GatedActivation, TakesAnUpFromElsewhere) {
  TRACE_SEED();
  for (const int32_t intermediate : {1, 16, 33}) {
    Random random(45);
    const int32_t num_rows = 3;
    const int64_t up_stride = 4 * int64_t{intermediate} + 5;
    const std::vector<float> gate = random.normals(num_rows * int64_t{intermediate});
    const std::vector<float> up = random.normals(num_rows * up_stride);
    std::vector<float> fused;
    for (int32_t row = 0; row < num_rows; ++row) {
      fused.insert(fused.end(), gate.begin() + row * intermediate,
                   gate.begin() + (row + 1) * intermediate);
      const auto first = up.begin() + row * up_stride + 5;
      fused.insert(fused.end(), first, first + intermediate);
    }
    std::vector<float> expected(gate.size());
    std::vector<float> y(gate.size());
    CpuContext ctx = context_of(1);
    GatedActivationParams params = {.num_rows = &num_rows,
                                    .max_rows = num_rows,
                                    .x = fused.data(),
                                    .y = expected.data(),
                                    .intermediate = intermediate,
                                    .activation = Activation::kGeluTanh};
    gated_activation(ctx, params);
    params.x = gate.data();
    params.y = y.data();
    params.up = up.data() + 5;
    params.up_stride = up_stride;
    gated_activation(ctx, params);
    ASSERT_EQ(y, expected);
  }
}

TEST(GatedActivation, MatchesReference) {
  TRACE_SEED();
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
    for (const int32_t intermediate : {1, 16, 33, 250, 3000}) {
      Random random(5);
      const int32_t num_rows = 6;
      std::vector<float> x = random.normals(int64_t{num_rows} * 2 * intermediate, 3.0f);
      x[0] = -150.0f;
      x[static_cast<size_t>(2 * intermediate)] = 150.0f;
      x[static_cast<size_t>(4 * intermediate)] = 0.0f;
      x[static_cast<size_t>(6 * intermediate)] = -1e-6f;
      std::vector<float> y(static_cast<size_t>(num_rows * intermediate));
      CpuContext ctx = context_of(2);
      gated_activation(ctx, {.num_rows = &num_rows,
                             .max_rows = num_rows,
                             .x = x.data(),
                             .y = y.data(),
                             .intermediate = intermediate,
                             .activation = activation});
      for (int32_t row = 0; row < num_rows; ++row) {
        for (int32_t i = 0; i < intermediate; ++i) {
          const double gate = x[static_cast<size_t>(row * 2 * intermediate + i)];
          const double up = x[static_cast<size_t>((row * 2 + 1) * intermediate + i)];
          const double cube = gate + 0.044715 * gate * gate * gate;
          const double want = activation == Activation::kSilu
                                  ? gate / (1.0 + std::exp(-gate)) * up
                                  : 0.5 * gate * up * (1.0 + std::tanh(std::sqrt(2 / M_PI) * cube));
          // 1 + tanh cancels below: an ulp of 1 times |gate * up| is what float can give.
          ASSERT_TRUE(is_near(y[static_cast<size_t>(row * intermediate + i)], want,
                              4e-7 * std::fabs(gate * up) + 1e-30, 1e-6))
              << "gate " << gate << " up " << up;
        }
      }
    }
  }
}

TEST(GatherRows, CopiesRowsInAnyOrder) {
  TRACE_SEED();
  Random random(6);
  const int32_t hidden = 37;
  const std::vector<float> x = random.normals(9 * hidden);
  const std::vector<int32_t> index = {8, 0, 0, 3, 7};
  for (const int32_t num_rows : {0, 1, 5}) {
    std::vector<float> y(5 * hidden, -1.0f);
    CpuContext ctx = context_of(2);
    gather_rows(ctx, {.num_rows = &num_rows,
                      .max_rows = 5,
                      .row_index = index.data(),
                      .x = x.data(),
                      .y = y.data(),
                      .hidden = hidden});
    for (int32_t row = 0; row < 5; ++row) {
      for (int32_t i = 0; i < hidden; ++i) {
        const float want =
            row < num_rows ? x[static_cast<size_t>(index[static_cast<size_t>(row)] * hidden + i)]
                           : -1.0f;
        ASSERT_EQ(y[static_cast<size_t>(row * hidden + i)], want);
      }
    }
  }
}

TEST(SoftCap, MatchesReference) {
  TRACE_SEED();
  Random random(7);
  const int32_t num_rows = 3;
  const int32_t n = 1003;
  const std::vector<float> before = random.normals(num_rows * n, 40.0f);
  std::vector<float> logits = before;
  CpuContext ctx = context_of(2);
  soft_cap(ctx,
           {.num_rows = &num_rows, .max_rows = 4, .logits = logits.data(), .cap = 30.0f, .n = n});
  for (size_t i = 0; i < logits.size(); ++i) {
    ASSERT_TRUE(is_near(logits[i], 30.0 * std::tanh(before[i] / 30.0), 1e-30, 5e-7));
  }
}

// --- select_clusters, cluster_logits -------------------------------------------------------------

TEST(SelectClusters, TakesTheBestInOrder) {
  struct Case {
    std::vector<float> scores;
    std::vector<int32_t> order;  // of all clusters
  };
  const Case cases[] = {{{1, 5, -2, 3}, {1, 3, 0, 2}},
                        {{7}, {0}},
                        // Among equals the lower number comes first.
                        {{2, 4, 2, 4, 4}, {1, 3, 4, 0, 2}},
                        {{0.0f, -0.0f, 0.0f, -0.0f}, {0, 1, 2, 3}},
                        {{-0.0f, 0.0f, -1.0f, -0.0f}, {0, 1, 3, 2}},
                        // NaN is as bad as -inf, with either sign.
                        {{kNan, -kInf, -kNan, -1e38f, kInf}, {4, 3, 0, 1, 2}},
                        {{kNan, kNan, -kInf}, {0, 1, 2}},
                        {{kInf, 1, kInf}, {0, 2, 1}}};
  for (const Case& c : cases) {
    const auto num_clusters = static_cast<int32_t>(c.scores.size());
    for (int32_t top = 1; top <= num_clusters; ++top) {
      // The second row's scores ascend; nothing asks for the third.
      std::vector<float> scores = c.scores;
      scores.resize(c.scores.size() * 3);
      std::iota(scores.begin() + num_clusters, scores.begin() + 2 * num_clusters, 0.0f);
      for (const int32_t num_rows : {0, 1, 2, 5}) {
        const int32_t max_rows = num_rows == 5 ? 2 : 3;
        std::vector<int32_t> clusters(static_cast<size_t>(3 * top), -9);
        CpuContext ctx = context_of(1);
        select_clusters(ctx, {.num_rows = &num_rows,
                              .max_rows = max_rows,
                              .scores = scores.data(),
                              .num_clusters = num_clusters,
                              .top = top,
                              .clusters = clusters.data()});
        std::vector<int32_t> expected(clusters.size(), -9);
        for (int32_t rank = 0; rank < top; ++rank) {
          const auto at = static_cast<size_t>(rank);
          if (num_rows > 0) expected[at] = c.order[at];
          if (num_rows > 1) expected[static_cast<size_t>(top) + at] = num_clusters - 1 - rank;
        }
        EXPECT_EQ(clusters, expected) << "top " << top << " of " << num_rows << " rows";
      }
    }
  }
}

TEST(ClusterLogits, KnownAnswers) {
  // Token t is the vector (t, 1); clusters are {4, 0}, {5, 2} and {1, 3}.
  const std::vector<int32_t> ordering = {4, 0, 5, 2, 1, 3};
  const TypedArray weights[] = {
      typed_array(DType::kFloat32, {0, 1, 1, 1, 2, 1, 3, 1, 4, 1, 5, 1}),
      typed_array(DType::kBFloat16, {0, 1, 1, 1, 2, 1, 3, 1, 4, 1, 5, 1})};
  const std::vector<float> x = {1, 0, 10, 0.5f, kNan, kNan};
  const std::vector<int32_t> clusters = {2, 0, 1, 2, 99, 99};
  for (const TypedArray& weight : weights) {
    for (const int num_threads : {1, 2}) {
      for (const int32_t num_rows : {0, 1, 2, 7}) {
        std::vector<float> logits(12, -9.0f);
        std::vector<int32_t> tokens(12, -9);
        CpuContext ctx = context_of(num_threads);
        cluster_logits(ctx,
                       {.num_rows = &num_rows,
                        .max_rows = num_rows == 7 ? 2 : 3,
                        .x = x.data(),
                        .clusters = clusters.data(),
                        .top = 2,
                        .token_ordering = ordering.data(),
                        .cluster_size = 2,
                        .weight = weight.bytes.data(),
                        .logits = logits.data(),
                        .tokens = tokens.data(),
                        .hidden = 2,
                        .weight_dtype = &weight == weights ? DType::kFloat32 : DType::kBFloat16});
        std::vector<float> expected_logits(12, -9.0f);
        std::vector<int32_t> expected_tokens(12, -9);
        const float all_logits[] = {1, 3, 4, 0, 50.5f, 20.5f, 10.5f, 30.5f};
        const int32_t all_tokens[] = {1, 3, 4, 0, 5, 2, 1, 3};
        const int32_t num_logits = 4 * std::min(num_rows, 2);
        std::copy_n(all_logits, num_logits, expected_logits.begin());
        std::copy_n(all_tokens, num_logits, expected_tokens.begin());
        EXPECT_EQ(logits, expected_logits);
        EXPECT_EQ(tokens, expected_tokens);
      }
    }
  }
}

TEST(ClusterLogits, MatchesReference) {
  TRACE_SEED();
  constexpr int32_t kClusters = 5;
  constexpr int32_t kTop = 3;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [hidden, cluster_size] : {std::pair{1, 1}, {33, 4}, {256, 7}, {1024, 2}}) {
      Random random(44);
      const int32_t num_rows = 4;
      const int32_t num_logits = kTop * cluster_size;
      const TypedArray weight =
          typed_array(dtype, random.normals(int64_t{kClusters} * cluster_size * hidden, 0.05f));
      const std::vector<float> x = random.normals(int64_t{num_rows} * hidden);
      std::vector<int32_t> ordering(static_cast<size_t>(kClusters * cluster_size));
      std::iota(ordering.begin(), ordering.end(), 0);
      std::shuffle(ordering.begin(), ordering.end(), random.engine());
      std::vector<int32_t> clusters;
      for (int32_t row = 0; row < num_rows; ++row) {
        for (int32_t rank = 0; rank < kTop; ++rank)
          clusters.push_back((3 * row + rank) % kClusters);
      }
      std::vector<float> logits(static_cast<size_t>(num_rows * num_logits));
      std::vector<int32_t> tokens(logits.size());
      CpuContext ctx = context_of(2);
      cluster_logits(ctx, {.num_rows = &num_rows,
                           .max_rows = num_rows,
                           .x = x.data(),
                           .clusters = clusters.data(),
                           .top = kTop,
                           .token_ordering = ordering.data(),
                           .cluster_size = cluster_size,
                           .weight = weight.bytes.data(),
                           .logits = logits.data(),
                           .tokens = tokens.data(),
                           .hidden = hidden,
                           .weight_dtype = dtype});
      for (int32_t at = 0; at < num_rows * num_logits; ++at) {
        const int32_t row = at / num_logits;
        const int32_t cluster = clusters[static_cast<size_t>(at / cluster_size)];
        const int32_t token =
            ordering[static_cast<size_t>(cluster * cluster_size + at % cluster_size)];
        ASSERT_EQ(tokens[static_cast<size_t>(at)], token);
        double want = 0;
        double magnitude = 0;
        for (int32_t i = 0; i < hidden; ++i) {
          const double product = double{x[static_cast<size_t>(row * hidden + i)]} *
                                 weight.rounded[static_cast<size_t>(token * hidden + i)];
          want += product;
          magnitude += std::fabs(product);
        }
        // Of one sum in a row.
        ASSERT_TRUE(is_near(logits[static_cast<size_t>(at)], want,
                            (hidden + 1) * kFloatEpsilon * magnitude, 0.0));
      }
    }
  }
}

// --- rms_norm ----------------------------------------------------------------------------------

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

// --- a KV pool whose every unwritten byte is NaN -------------------------------------------------

struct Pool {
  std::vector<std::byte> bytes;
  KvLayerView view;
  int32_t num_kv_heads;
  int32_t head_dim;

  Pool(DType dtype, int32_t block_size, int32_t num_blocks, int32_t kv_heads, int32_t dim)
      : num_kv_heads(kv_heads), head_dim(dim) {
    const int64_t part = int64_t{block_size} * kv_heads * dim * dtype_bytes(dtype);
    // A gap before, between and behind K and V: other layers' bytes.
    const int64_t block_bytes = 2 * part + 3 * 64;
    bytes.assign(static_cast<size_t>(num_blocks * block_bytes), std::byte{0xff});
    view = {.base = bytes.data(),
            .block_bytes = block_bytes,
            .k_offset = 64,
            .v_offset = 128 + part,
            .block_size = block_size,
            .dtype = dtype};
  }

  std::byte* token(int64_t slot, bool is_value) {
    const int64_t token_bytes = int64_t{num_kv_heads} * head_dim * dtype_bytes(view.dtype);
    return view.base + slot / view.block_size * view.block_bytes +
           (is_value ? view.v_offset : view.k_offset) + slot % view.block_size * token_bytes;
  }
};

// --- qk_norm_rope_append -------------------------------------------------------------------------

struct RopeCase {
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  DType dtype;
  bool has_norm;
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  bool has_v_norm = false;
};

class RopeTest : public testing::TestWithParam<RopeCase> {};

std::vector<float> rope_table(int32_t max_positions, int32_t half, bool is_sin) {
  std::vector<float> table;
  for (int32_t position = 0; position < max_positions; ++position) {
    for (int32_t i = 0; i < half; ++i) {
      const double angle = position * std::pow(10000.0, -double(i) / half);
      table.push_back(static_cast<float>(is_sin ? std::sin(angle) : std::cos(angle)));
    }
  }
  return table;
}

std::vector<double> reference_rope(const float* head, const float* norm, float offset, double eps,
                                   const float* cos, const float* sin, int32_t dim) {
  std::vector<double> x(head, head + dim);
  if (norm != nullptr) {
    double squares = 0.0;
    for (const double value : x) squares += value * value;
    const double factor = 1.0 / std::sqrt(squares / dim + eps);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= factor * (double{norm[i]} + offset);
  }
  std::vector<double> y(x.size());
  const size_t half = x.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
  return y;
}

TEST_P(RopeTest, MatchesReferenceAndWritesOnlyItsSlots) {
  TRACE_SEED();
  const RopeCase& c = GetParam();
  constexpr int32_t kBlockSize = 5;
  constexpr int32_t kNumBlocks = 8;
  constexpr int32_t kMaxPositions = 50;
  Random random(10);
  const int32_t row_heads = qkv_heads(c.num_qo_heads, c.num_kv_heads, c.kv_inputs);
  const int64_t width = int64_t{row_heads} * c.head_dim;
  const bool has_kv = c.kv_inputs != KvInputs::kNone;
  const int32_t num_rows = 6;
  const std::vector<float> before = random.normals(num_rows * width);
  std::vector<float> qkv = before;
  const std::vector<int32_t> positions = {0, 49, 7, 7, 13, 2};
  const std::vector<int64_t> slots = {5, 39, 0, 12, 24, 0};  // 0: inert
  const std::vector<float> q_norm = random.normals(c.head_dim);
  const std::vector<float> k_norm = random.normals(c.head_dim);
  const std::vector<float> cos = rope_table(kMaxPositions, c.head_dim / 2, false);
  const std::vector<float> sin = rope_table(kMaxPositions, c.head_dim / 2, true);
  Pool pool(c.dtype, kBlockSize, kNumBlocks, c.num_kv_heads, c.head_dim);
  CpuContext ctx = context_of(2);
  qk_norm_rope_append(ctx, {.num_rows = &num_rows,
                            .max_rows = num_rows,
                            .qkv = qkv.data(),
                            .positions = positions.data(),
                            .slot_mapping = has_kv ? slots.data() : nullptr,
                            .q_norm = c.has_norm ? q_norm.data() : nullptr,
                            .k_norm = c.has_norm ? k_norm.data() : nullptr,
                            .norm_weight_offset = 1.0f,
                            .norm_eps = 1e-6f,
                            .rope_cos = cos.data(),
                            .rope_sin = sin.data(),
                            .kv = pool.view,
                            .num_qo_heads = c.num_qo_heads,
                            .num_kv_heads = c.num_kv_heads,
                            .head_dim = c.head_dim,
                            .kv_inputs = c.kv_inputs,
                            .has_v_norm = c.has_v_norm});
  const double kv_relative = c.dtype == DType::kFloat32 ? 1e-6 : 0x1p-8;
  for (int32_t row = 0; row < num_rows; ++row) {
    const int64_t slot = slots[static_cast<size_t>(row)];
    const int64_t table_row = int64_t{positions[static_cast<size_t>(row)]} * (c.head_dim / 2);
    for (int32_t h = 0; h < c.num_qo_heads + (has_kv ? 2 * c.num_kv_heads : 0); ++h) {
      const int32_t source = h < row_heads ? h : h - c.num_kv_heads;  // v may be the raw k
      const int64_t at = row * width + int64_t{source} * c.head_dim;
      const float* const in = before.data() + at;
      const bool is_query = h < c.num_qo_heads;
      const bool is_value = h >= c.num_qo_heads + c.num_kv_heads;
      const float* norm = is_query ? q_norm.data() : k_norm.data();
      if (!c.has_norm) norm = nullptr;
      std::vector<double> want = is_value
                                     ? std::vector<double>(in, in + c.head_dim)
                                     : reference_rope(in, norm, 1.0f, 1e-6, cos.data() + table_row,
                                                      sin.data() + table_row, c.head_dim);
      if (is_value && c.has_v_norm) {
        double squares = 0.0;
        for (const double value : want) squares += value * value;
        for (double& value : want) value /= std::sqrt(squares / c.head_dim + 1e-6);
      }
      for (int32_t i = 0; i < c.head_dim; ++i) {
        if (is_query) {
          ASSERT_TRUE(
              is_near(qkv[static_cast<size_t>(at + i)], want[static_cast<size_t>(i)], 4e-6, 1e-6))
              << "q row " << row << " head " << h << " " << i;
          continue;
        }
        ASSERT_EQ(qkv[static_cast<size_t>(at + i)], in[i]) << "k and v are only read";
        if (slot == 0) continue;
        const int64_t head = (h - c.num_qo_heads) % c.num_kv_heads;
        std::byte* const token = pool.token(slot, is_value);
        const int64_t index = head * c.head_dim + i;
        ASSERT_TRUE(is_near(element(c.dtype, token, index), want[static_cast<size_t>(i)], 4e-6,
                            kv_relative))
            << "kv row " << row << " head " << h << " " << i;
        set_element(c.dtype, token, index, kNan);
        std::memset(token + index * dtype_bytes(c.dtype), 0xff,
                    static_cast<size_t>(dtype_bytes(c.dtype)));
      }
    }
  }
  // What was written has been poisoned again above: nothing else may have changed.
  for (const std::byte byte : pool.bytes) ASSERT_EQ(byte, std::byte{0xff});
}

INSTANTIATE_TEST_SUITE_P(
    Cases, RopeTest,
    testing::Values(
        RopeCase{4, 4, 16, DType::kFloat32, false}, RopeCase{4, 2, 64, DType::kBFloat16, true},
        RopeCase{5, 1, 128, DType::kFloat32, true}, RopeCase{8, 2, 256, DType::kBFloat16, false},
        RopeCase{3, 3, 10, DType::kFloat32, true}, RopeCase{2, 1, 32, DType::kBFloat16, true},
        RopeCase{2, 1, 2, DType::kFloat32, true},
        RopeCase{4, 2, 64, DType::kBFloat16, true, KvInputs::kKeysAndValues, true},
        RopeCase{4, 2, 34, DType::kFloat32, true, KvInputs::kKeys, true},
        RopeCase{4, 1, 512, DType::kBFloat16, true, KvInputs::kKeys, false},
        RopeCase{4, 2, 64, DType::kFloat32, true, KvInputs::kNone}));

TEST(QkNormRopeAppend, ZeroFrequenciesLeaveTheirPairsAlone) {
  TRACE_SEED();
  constexpr int32_t kHeadDim = 64;
  constexpr int32_t kRotated = 8;  // pairs
  Random random(12);
  const int32_t num_rows = 1;
  const std::vector<int32_t> positions = {37};
  std::vector<float> cos = rope_table(50, kHeadDim / 2, false);
  std::vector<float> sin = rope_table(50, kHeadDim / 2, true);
  for (size_t i = 0; i < cos.size(); ++i) {
    if (i % (kHeadDim / 2) < kRotated) continue;
    cos[i] = 1.0f;
    sin[i] = 0.0f;
  }
  const std::vector<float> before = random.normals(2 * kHeadDim);
  std::vector<float> qkv = before;
  CpuContext ctx = context_of(1);
  qk_norm_rope_append(ctx, {.num_rows = &num_rows,
                            .max_rows = num_rows,
                            .qkv = qkv.data(),
                            .positions = positions.data(),
                            .slot_mapping = nullptr,
                            .q_norm = nullptr,
                            .k_norm = nullptr,
                            .norm_weight_offset = 0.0f,
                            .norm_eps = 1e-6f,
                            .rope_cos = cos.data(),
                            .rope_sin = sin.data(),
                            .kv = {},
                            .num_qo_heads = 2,
                            .num_kv_heads = 1,
                            .head_dim = kHeadDim,
                            .kv_inputs = KvInputs::kNone});
  for (size_t i = 0; i < qkv.size(); ++i) {
    if (i % (kHeadDim / 2) < kRotated) {
      ASSERT_NE(qkv[i], before[i]) << i;
    } else {
      ASSERT_EQ(qkv[i], before[i]) << i;
    }
  }
}

TEST(QkNormRopeAppend, AnOffsetTurnsRowsAsIfTheyWereFurtherOn) {
  TRACE_SEED();
  constexpr int32_t kHeadDim = 64;
  constexpr int32_t kPositions = 50;
  constexpr int32_t kRows = 3;
  constexpr int32_t kWidth = 4 * kHeadDim;  // two of q, one of k, one of v
  Random random(13);
  const std::vector<float> cos = rope_table(kPositions, kHeadDim / 2, false);
  const std::vector<float> sin = rope_table(kPositions, kHeadDim / 2, true);
  const std::vector<float> q_norm = random.normals(kHeadDim);
  const std::vector<float> k_norm = random.normals(kHeadDim);
  const std::vector<float> before = random.normals(kRows * kWidth);
  const std::vector<int64_t> slots = {1, 2, 3};  // blocks of one token
  // q, then the pool.
  const auto turn = [&](const std::vector<int32_t>& positions, int32_t offset) {
    std::vector<float> qkv = before;
    std::vector<float> pool(4 * 2 * kHeadDim, -9.0f);
    const int32_t num_rows = kRows;
    CpuContext ctx = context_of(1);
    qk_norm_rope_append(ctx, {.num_rows = &num_rows,
                              .max_rows = num_rows,
                              .qkv = qkv.data(),
                              .positions = positions.data(),
                              .slot_mapping = slots.data(),
                              .q_norm = q_norm.data(),
                              .k_norm = k_norm.data(),
                              .norm_weight_offset = 0.0f,
                              .norm_eps = 1e-6f,
                              .rope_cos = cos.data(),
                              .rope_sin = sin.data(),
                              .kv = {.base = reinterpret_cast<std::byte*>(pool.data()),
                                     .block_bytes = 2 * kHeadDim * 4,
                                     .k_offset = 0,
                                     .v_offset = kHeadDim * 4,
                                     .block_size = 1,
                                     .dtype = DType::kFloat32},
                              .num_qo_heads = 2,
                              .num_kv_heads = 1,
                              .head_dim = kHeadDim,
                              .position_offset = offset});
    qkv.insert(qkv.end(), pool.begin(), pool.end());
    return qkv;
  };
  for (const int32_t offset : {1, 5}) {
    const int32_t last = kPositions - 1;
    EXPECT_EQ(turn({0, 37, last - offset}, offset), turn({offset, 37 + offset, last}, 0));
    EXPECT_NE(turn({0, 37, last - offset}, offset), turn({0, 37, last - offset}, 0));
  }
}

TEST(QkNormRopeAppend, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t head_dim : {40, 64}) {
      constexpr int32_t kQoHeads = 4;
      constexpr int32_t kKvHeads = 2;
      const int64_t width = (kQoHeads + 2 * kKvHeads) * head_dim;
      Random random(11);
      const std::vector<float> norm = random.normals(head_dim);
      const std::vector<float> cos = rope_table(100, head_dim / 2, false);
      const std::vector<float> sin = rope_table(100, head_dim / 2, true);
      const int64_t token_bytes = kKvHeads * head_dim * dtype_bytes(dtype);
      // q of the row at `place`, then its K and V bytes.
      auto run = [&](std::vector<float> qkv, int32_t place, int num_threads) {
        const int32_t num_rows = static_cast<int32_t>(static_cast<int64_t>(qkv.size()) / width);
        Pool pool(dtype, 16, 40, kKvHeads, head_dim);
        std::vector<int32_t> positions(static_cast<size_t>(num_rows));
        std::vector<int64_t> slots(static_cast<size_t>(num_rows));
        for (int32_t row = 0; row < num_rows; ++row) {
          positions[static_cast<size_t>(row)] = row == place ? 77 : random.below(100);
          slots[static_cast<size_t>(row)] = 16 + 2 * row + 1;
        }
        CpuContext ctx = context_of(num_threads);
        qk_norm_rope_append(ctx, {.num_rows = &num_rows,
                                  .max_rows = num_rows,
                                  .qkv = qkv.data(),
                                  .positions = positions.data(),
                                  .slot_mapping = slots.data(),
                                  .q_norm = norm.data(),
                                  .k_norm = norm.data(),
                                  .norm_weight_offset = 0.0f,
                                  .norm_eps = 1e-6f,
                                  .rope_cos = cos.data(),
                                  .rope_sin = sin.data(),
                                  .kv = pool.view,
                                  .num_qo_heads = kQoHeads,
                                  .num_kv_heads = kKvHeads,
                                  .head_dim = head_dim});
        std::vector<std::byte> bits(static_cast<size_t>(kQoHeads * head_dim * 4 + 2 * token_bytes));
        std::memcpy(bits.data(), qkv.data() + place * width,
                    static_cast<size_t>(kQoHeads * head_dim * 4));
        for (const bool is_value : {false, true}) {
          std::memcpy(bits.data() + kQoHeads * head_dim * 4 + (is_value ? token_bytes : 0),
                      pool.token(slots[static_cast<size_t>(place)], is_value),
                      static_cast<size_t>(token_bytes));
        }
        return bits;
      };
      for (const int32_t num_rows : kBatchSizes) {
        const std::vector<float> probe = random.normals(width);
        const std::vector<std::byte> alone = run(probe, 0, 1);
        for (const int num_threads : {1, 2, 3}) {
          std::vector<float> qkv = random.normals(num_rows * width);
          const int32_t place = random.below(num_rows);
          std::copy(probe.begin(), probe.end(), qkv.begin() + place * width);
          ASSERT_EQ(alone, run(qkv, place, num_threads))
              << dtype_name(dtype) << " rows " << num_rows << " threads " << num_threads;
        }
      }
    }
  }
}

// --- attention -----------------------------------------------------------------------------------

struct AttentionShape {
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  DType dtype;
};

// Sequences in a pool, in blocks handed out at random; every byte that no sequence owns is NaN, the
// null block included.
class Sequences {
 public:
  Sequences(const AttentionShape& shape, const std::vector<int32_t>& lengths, uint64_t salt)
      : shape_(shape),
        stride_((*std::max_element(lengths.begin(), lengths.end()) + shape.block_size - 1) /
                    shape.block_size +
                2),
        pool_(shape.dtype, shape.block_size, stride_ * static_cast<int32_t>(lengths.size()) + 1,
              shape.num_kv_heads, shape.head_dim) {
    Random random(salt);
    std::vector<int32_t> free(static_cast<size_t>(stride_) * lengths.size());
    std::iota(free.begin(), free.end(), 1);
    std::shuffle(free.begin(), free.end(), random.engine());
    block_table_.assign(static_cast<size_t>(stride_) * lengths.size(), 0);
    const int64_t token = int64_t{shape.num_kv_heads} * shape.head_dim;
    for (size_t s = 0; s < lengths.size(); ++s) {
      keys_.push_back(random.normals(lengths[s] * token));
      values_.push_back(random.normals(lengths[s] * token));
      for (int32_t b = 0; b * shape.block_size < lengths[s]; ++b) {
        block_table_[s * static_cast<size_t>(stride_) + static_cast<size_t>(b)] = free.back();
        free.pop_back();
      }
      for (int32_t position = 0; position < lengths[s]; ++position) {
        write(static_cast<int32_t>(s), position);
      }
    }
  }

  [[nodiscard]] int64_t slot(int32_t sequence, int32_t position) const {
    const int32_t block =
        block_table_[static_cast<size_t>(sequence * stride_ + position / shape_.block_size)];
    return int64_t{block} * shape_.block_size + position % shape_.block_size;
  }

  // The float values of one token, rounded to the cache's dtype.
  float* key(int32_t sequence, int32_t position) { return token(&keys_, sequence, position); }
  float* value(int32_t sequence, int32_t position) { return token(&values_, sequence, position); }

  // Puts a token into the pool again after its floats were changed.
  void write(int32_t sequence, int32_t position) {
    const int64_t at = slot(sequence, position);
    for (const bool is_value : {false, true}) {
      float* const from = is_value ? value(sequence, position) : key(sequence, position);
      std::byte* const to = pool_.token(at, is_value);
      for (int64_t i = 0; i < int64_t{shape_.num_kv_heads} * shape_.head_dim; ++i) {
        set_element(shape_.dtype, to, i, from[i]);
        from[i] = element(shape_.dtype, to, i);
      }
    }
  }

  void poison(int32_t sequence, int32_t position) {
    for (const bool is_value : {false, true}) {
      std::memset(pool_.token(slot(sequence, position), is_value), 0xff,
                  static_cast<size_t>(int64_t{shape_.num_kv_heads} * shape_.head_dim *
                                      dtype_bytes(shape_.dtype)));
    }
  }

  [[nodiscard]] const AttentionShape& shape() const { return shape_; }
  [[nodiscard]] const std::vector<int32_t>& block_table() const { return block_table_; }
  [[nodiscard]] int32_t stride() const { return stride_; }
  [[nodiscard]] const KvLayerView& view() const { return pool_.view; }

 private:
  float* token(std::vector<std::vector<float>>* from, int32_t sequence, int32_t position) {
    return (*from)[static_cast<size_t>(sequence)].data() +
           int64_t{position} * shape_.num_kv_heads * shape_.head_dim;
  }

  AttentionShape shape_;
  int32_t stride_;
  Pool pool_;
  std::vector<int32_t> block_table_;
  std::vector<std::vector<float>> keys_;
  std::vector<std::vector<float>> values_;
};

struct AttentionRow {
  int32_t sequence;  // -1: inert
  int32_t begin;
  int32_t end;
};

struct AttentionOptions {
  float soft_cap = 0.0f;
  const float* sinks = nullptr;
  int num_threads = 1;
};

int64_t qkv_width(const AttentionShape& s) {
  return int64_t{s.num_qo_heads + 2 * s.num_kv_heads} * s.head_dim;
}

float scale_of(const AttentionShape& s) { return 1.0f / std::sqrt(static_cast<float>(s.head_dim)); }

std::vector<float> run_attention(Sequences& sequences, const std::vector<AttentionRow>& rows,
                                 const std::vector<float>& qkv, const AttentionOptions& options) {
  const AttentionShape& s = sequences.shape();
  const int32_t num_rows = static_cast<int32_t>(rows.size());
  std::vector<int32_t> slots;
  std::vector<int32_t> begins;
  std::vector<int32_t> ends;
  for (const AttentionRow& row : rows) {
    slots.push_back(row.sequence);
    begins.push_back(row.begin);
    ends.push_back(row.end);
  }
  std::vector<float> y(static_cast<size_t>(int64_t{num_rows} * s.num_qo_heads * s.head_dim), kNan);
  const bool is_windowed =
      std::any_of(begins.begin(), begins.end(), [](int32_t begin) { return begin > 0; });
  CpuContext ctx = context_of(options.num_threads);
  paged_attention(ctx, {.num_rows = &num_rows,
                        .max_rows = num_rows,
                        .qkv = qkv.data(),
                        .seq_slot = slots.data(),
                        .kv_begin = is_windowed ? begins.data() : nullptr,
                        .kv_end = ends.data(),
                        .block_table = sequences.block_table().data(),
                        .block_table_stride = sequences.stride(),
                        .kv = sequences.view(),
                        .scale = scale_of(s),
                        .soft_cap = options.soft_cap,
                        .sinks = options.sinks,
                        .y = y.data(),
                        .num_qo_heads = s.num_qo_heads,
                        .num_kv_heads = s.num_kv_heads,
                        .head_dim = s.head_dim});
  return y;
}

// One head over the given positions, in double.
std::vector<double> reference_attention(Sequences& sequences, const AttentionRow& row,
                                        const float* q, int32_t head,
                                        const AttentionOptions& options) {
  const AttentionShape& s = sequences.shape();
  const int32_t kv_head = head / (s.num_qo_heads / s.num_kv_heads);
  std::vector<double> y(static_cast<size_t>(s.head_dim), 0.0);
  if (row.sequence < 0 || row.begin >= row.end) return y;
  std::vector<double> scores;
  double highest = options.sinks != nullptr ? options.sinks[head] : -1e300;
  for (int32_t position = row.begin; position < row.end; ++position) {
    const float* const key = sequences.key(row.sequence, position) + int64_t{kv_head} * s.head_dim;
    double score = 0.0;
    for (int32_t i = 0; i < s.head_dim; ++i) score += double{q[i]} * key[i];
    score *= scale_of(s);
    if (options.soft_cap > 0.0f) score = options.soft_cap * std::tanh(score / options.soft_cap);
    scores.push_back(score);
    highest = std::max(highest, score);
  }
  double sum = options.sinks != nullptr ? std::exp(options.sinks[head] - highest) : 0.0;
  for (int32_t position = row.begin; position < row.end; ++position) {
    const double weight = std::exp(scores[static_cast<size_t>(position - row.begin)] - highest);
    sum += weight;
    const float* const value =
        sequences.value(row.sequence, position) + int64_t{kv_head} * s.head_dim;
    for (int32_t i = 0; i < s.head_dim; ++i) y[static_cast<size_t>(i)] += weight * value[i];
  }
  for (double& out : y) out /= sum;
  return y;
}

void expect_attention(Sequences& sequences, const std::vector<AttentionRow>& rows,
                      const std::vector<float>& qkv, const std::vector<float>& y,
                      const AttentionOptions& options) {
  const AttentionShape& s = sequences.shape();
  for (size_t row = 0; row < rows.size(); ++row) {
    for (int32_t head = 0; head < s.num_qo_heads; ++head) {
      const float* const q =
          qkv.data() + static_cast<int64_t>(row) * qkv_width(s) + int64_t{head} * s.head_dim;
      const std::vector<double> want = reference_attention(sequences, rows[row], q, head, options);
      for (int32_t i = 0; i < s.head_dim; ++i) {
        const int64_t at = (static_cast<int64_t>(row) * s.num_qo_heads + head) * s.head_dim + i;
        // Scores of a few units with errors of 1e-6, values of order one.
        ASSERT_TRUE(is_near(y[static_cast<size_t>(at)], want[static_cast<size_t>(i)], 1e-5, 1e-5))
            << "row " << row << " [" << rows[row].begin << ", " << rows[row].end << ") head "
            << head << " element " << i;
      }
    }
  }
}

struct AttentionCase {
  AttentionShape shape;
  float soft_cap;
  bool has_sinks;
  int32_t window;  // 0: none
};

class AttentionTest : public testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionTest, MatchesReference) {
  TRACE_SEED();
  const AttentionCase& c = GetParam();
  const std::vector<int32_t> lengths = {1, 2, 17, 127, 128, 129, 255, 256, 257, 400};
  Sequences sequences(c.shape, lengths, 12);
  Random random(13);
  const std::vector<float> sinks = random.normals(c.shape.num_qo_heads);
  std::vector<AttentionRow> rows;
  for (size_t s = 0; s < lengths.size(); ++s) {
    const int32_t length = lengths[s];
    rows.push_back({.sequence = static_cast<int32_t>(s),
                    .begin = c.window == 0 ? 0 : std::max(0, length - c.window),
                    .end = length});
  }
  rows.insert(rows.begin() + 3, {.sequence = -1, .begin = 0, .end = 5});
  rows.insert(rows.begin() + 5, {.sequence = 2, .begin = 0, .end = 0});
  const std::vector<float> qkv =
      random.normals(static_cast<int64_t>(rows.size()) * qkv_width(c.shape));
  const AttentionOptions options = {
      .soft_cap = c.soft_cap, .sinks = c.has_sinks ? sinks.data() : nullptr, .num_threads = 2};
  // What lies before the window must not be read either.
  for (const AttentionRow& row : rows) {
    for (int32_t position = 0; position < row.begin; ++position) {
      sequences.poison(row.sequence, position);
    }
  }
  const std::vector<float> y = run_attention(sequences, rows, qkv, options);
  expect_attention(sequences, rows, qkv, y, options);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, AttentionTest,
    testing::Values(AttentionCase{{4, 4, 16, 16, DType::kFloat32}, 0.0f, false, 0},
                    AttentionCase{{4, 2, 32, 16, DType::kBFloat16}, 0.0f, false, 0},
                    AttentionCase{{8, 1, 64, 16, DType::kFloat32}, 0.0f, true, 0},
                    AttentionCase{{5, 1, 128, 32, DType::kBFloat16}, 5.0f, false, 0},
                    AttentionCase{{6, 2, 256, 16, DType::kFloat32}, 2.0f, true, 0},
                    AttentionCase{{3, 1, 10, 7, DType::kFloat32}, 0.0f, true, 0},
                    AttentionCase{{2, 2, 40, 1, DType::kBFloat16}, 0.0f, false, 0},
                    AttentionCase{{2, 1, 80, 200, DType::kFloat32}, 0.0f, false, 0},
                    AttentionCase{{4, 2, 64, 16, DType::kFloat32}, 0.0f, false, 1},
                    AttentionCase{{4, 1, 64, 16, DType::kBFloat16}, 0.0f, true, 128},
                    AttentionCase{{7, 1, 64, 16, DType::kFloat32}, 0.0f, false, 100},
                    AttentionCase{{4, 2, 128, 16, DType::kBFloat16}, 30.0f, false, 129}));

TEST(PagedAttention, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t head_dim : {40, 64}) {
      const AttentionShape shape = {4, 2, head_dim, 16, dtype};
      const std::vector<int32_t> lengths = {300, 200, 90, 129};
      Sequences sequences(shape, lengths, 14);
      Random random(15);
      const int64_t y_width = int64_t{shape.num_qo_heads} * head_dim;
      for (const AttentionRow& probe : {AttentionRow{0, 0, 300}, {1, 70, 200}, {3, 0, 129}}) {
        const std::vector<float> probe_qkv = random.normals(qkv_width(shape));
        const std::vector<float> alone = run_attention(sequences, {probe}, probe_qkv, {});
        for (const int32_t num_rows : kBatchSizes) {
          std::vector<AttentionRow> rows;
          for (int32_t row = 0; row < num_rows; ++row) {
            const int32_t s = random.below(5) - 1;
            const int32_t end = s < 0 ? 0 : 1 + random.below(lengths[static_cast<size_t>(s)]);
            rows.push_back({s, s < 0 ? 0 : random.below(end), end});
          }
          std::vector<float> qkv = random.normals(num_rows * qkv_width(shape));
          const int64_t place = random.below(num_rows);
          rows[static_cast<size_t>(place)] = probe;
          std::copy(probe_qkv.begin(), probe_qkv.end(), qkv.begin() + place * qkv_width(shape));
          for (const int num_threads : {1, 2, 3}) {
            const std::vector<float> y =
                run_attention(sequences, rows, qkv, {.num_threads = num_threads});
            ASSERT_TRUE(same_bits(alone.data(), y.data() + place * y_width, y_width))
                << dtype_name(dtype) << " rows " << num_rows << " place " << place << " threads "
                << num_threads;
          }
        }
      }
    }
  }
}

TEST(PagedAttention, BitsDoNotDependOnBlocks) {
  TRACE_SEED();
  Random random(16);
  std::vector<float> first;
  for (const int32_t block_size : {16, 1, 7, 128, 333}) {
    const AttentionShape shape = {4, 1, 64, block_size, DType::kFloat32};
    Sequences sequences(shape, {333, 20}, 17);
    // The same tokens in each layout.
    Random tokens(18);
    for (int32_t position = 0; position < 333; ++position) {
      std::generate_n(sequences.key(0, position), 64, [&] { return tokens.normal(); });
      std::generate_n(sequences.value(0, position), 64, [&] { return tokens.normal(); });
      sequences.write(0, position);
    }
    Random queries(19);
    const std::vector<float> qkv = queries.normals(qkv_width(shape));
    const std::vector<float> y = run_attention(sequences, {{0, 30, 333}}, qkv, {});
    if (first.empty()) first = y;
    ASSERT_TRUE(same_bits(first.data(), y.data(), static_cast<int64_t>(y.size())))
        << "block_size " << block_size;
  }
}

// A key of weight zero in front of the window adds nothing but shifts nothing either: chunks lie at
// absolute positions, so the bits are those of the window alone.
TEST(PagedAttention, ChunksLieAtAbsolutePositions) {
  TRACE_SEED();
  const AttentionShape shape = {1, 1, 64, 16, DType::kFloat32};
  for (const int32_t begin : {1, 15, 64, 100, 127, 128, 129, 200}) {
    Sequences sequences(shape, {400}, 20);
    Random random(21);
    const std::vector<float> qkv = random.normals(qkv_width(shape));
    const std::vector<float> windowed = run_attention(sequences, {{0, begin, 400}}, qkv, {});
    for (int32_t position = 0; position < begin; ++position) {
      for (int32_t i = 0; i < 64; ++i) {
        sequences.key(0, position)[i] = -1000.0f * qkv[static_cast<size_t>(i)];
      }
      sequences.write(0, position);
    }
    const std::vector<float> full = run_attention(sequences, {{0, 0, 400}}, qkv, {});
    EXPECT_TRUE(same_bits(windowed.data(), full.data(), 64)) << "kv_begin " << begin;
  }
}

TEST(PagedAttention, ZeroRowsTouchNothing) {
  const AttentionShape shape = {1, 1, 16, 16, DType::kFloat32};
  Sequences sequences(shape, {4}, 22);
  EXPECT_TRUE(run_attention(sequences, {}, {}, {}).empty());
}

TEST(ListAttention, ReadsTheListedSlotsInOrder) {
  TRACE_SEED();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const AttentionShape shape = {4, 2, 64, 16, dtype};
    constexpr int32_t kWindow = 200;
    constexpr int32_t kLength = 450;
    Sequences sequences(shape, {kLength}, 23);
    Random random(24);
    std::vector<AttentionRow> rows;
    std::vector<int64_t> slots;
    std::vector<int32_t> counts;
    for (const int32_t count : {1, 127, 128, 129, 200, 0}) {
      const int32_t begin = count == 0 ? 0 : random.below(kLength - count);
      rows.push_back({0, begin, begin + count});
      for (int32_t i = 0; i < kWindow; ++i) {
        slots.push_back(i < count ? sequences.slot(0, begin + i) : int64_t{1} << 50);
      }
      counts.push_back(count);
    }
    const int32_t num_rows = static_cast<int32_t>(rows.size());
    const std::vector<float> qkv = random.normals(num_rows * qkv_width(shape));
    std::vector<float> y(static_cast<size_t>(num_rows * 4 * 64), kNan);
    ListAttentionParams params = {.num_rows = &num_rows,
                                  .max_rows = num_rows,
                                  .qkv = qkv.data(),
                                  .window_slots = slots.data(),
                                  .window_count = counts.data(),
                                  .window = kWindow,
                                  .kv = sequences.view(),
                                  .scale = scale_of(shape),
                                  .y = y.data(),
                                  .num_qo_heads = 4,
                                  .num_kv_heads = 2,
                                  .head_dim = 64};
    CpuContext ctx = context_of(2);
    list_attention(ctx, params);
    expect_attention(sequences, rows, qkv, y, {});
    // A stale entry shows.
    slots[kWindow * 2 + 100] = sequences.slot(0, rows[2].begin);
    std::vector<float> stale(y.size(), kNan);
    params.y = stale.data();
    list_attention(ctx, params);
    EXPECT_FALSE(same_bits(y.data() + 2 * 256, stale.data() + 2 * 256, 256));
    EXPECT_TRUE(same_bits(y.data(), stale.data(), 2 * 256));
  }
}

// --- philox, draw --------------------------------------------------------------------------------

// Random123's kat_vectors for philox4x32-10: counter words, key words, result.
TEST(Philox, KnownAnswers) {
  struct Kat {
    std::array<uint32_t, 4> counter;
    std::array<uint32_t, 2> key;
    std::array<uint32_t, 4> result;
  };
  const Kat kats[] = {{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                       {0xffffffff, 0xffffffff},
                       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                       {0xa4093822, 0x299f31d0},
                       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const Kat& kat : kats) {
    const NoiseKey key = {.seed = kat.key[0] | uint64_t{kat.key[1]} << 32,
                          .stream = static_cast<NoiseStream>(kat.counter[2]),
                          .position = kat.counter[1],
                          .salt = kat.counter[3]};
    EXPECT_EQ(philox(key, kat.counter[0]), kat.result);
  }
}

TEST(Philox, UniformIsOpenAtBothEnds) {
  EXPECT_GT(uniform_open(0), 0.0f);
  EXPECT_LT(uniform_open(0xffffffffu), 1.0f);
  EXPECT_LT(uniform_open(0xffffff7fu), 1.0f);
}

int32_t reference_draw(const float* logits, int32_t n, float temperature, uint64_t seed,
                       int32_t position) {
  int32_t token = -2;
  double best = -std::numeric_limits<double>::infinity();
  for (int32_t id = 0; id < n; ++id) {
    double key = logits[id];
    if (temperature > 0.0f) {
      const NoiseKey noise = {.seed = seed,
                              .stream = NoiseStream::kTarget,
                              .position = static_cast<uint32_t>(position) + 1,
                              .salt = 0};
      const auto words = philox(noise, static_cast<uint32_t>(id) / 4);
      const double u = uniform_open(words[static_cast<size_t>(id % 4)]);
      key = key / double{temperature} - std::log(-std::log1p(-u));
    }
    if (key > best) {
      best = key;
      token = id;
    }
  }
  return token;
}

struct DrawRows {
  std::vector<float> logits;
  int64_t stride;
  int32_t vocab_limit;
  std::vector<int32_t> row_index;
  std::vector<int32_t> seq_slot;
  std::vector<int32_t> positions;
  std::vector<uint64_t> seeds;
  std::vector<float> temperatures;

  std::vector<int32_t> draw_all(int num_threads) const {
    const int32_t num_rows = static_cast<int32_t>(row_index.size());
    std::vector<int32_t> tokens(row_index.size(), -99);
    CpuContext ctx = context_of(num_threads);
    draw(ctx, {.num_rows = &num_rows,
               .max_rows = num_rows,
               .logits = logits.data(),
               .logits_stride = stride,
               .vocab_limit = vocab_limit,
               .row_index = row_index.data(),
               .seq_slot = seq_slot.data(),
               .positions = positions.data(),
               .seeds = seeds.data(),
               .temperatures = temperatures.data(),
               .tokens = tokens.data()});
    return tokens;
  }
};

TEST(Draw, PruningChangesNothing) {
  TRACE_SEED();
  Random random(25);
  for (const int32_t vocab : {1, 3, 17, 63, 64, 65, 1000, 5003}) {
    for (const float spread : {0.0f, 0.1f, 1.0f, 5.0f, 20.0f, 1000.0f, 1e6f, 1e31f}) {
      for (const float temperature : {0.0f, 1e-5f, 0.01f, 0.3f, 1.0f, 2.0f, 100.0f}) {
        const int32_t num_rows = vocab > 500 ? 3 : 8;
        DrawRows rows = {.logits = random.normals(int64_t{num_rows} * (vocab + 5), spread),
                         .stride = vocab + 5,
                         .vocab_limit = vocab,
                         .row_index = {},
                         .seq_slot = {},
                         .positions = {},
                         .seeds = {},
                         .temperatures = {}};
        for (float& logit : rows.logits) {
          const int32_t dice = random.below(40);
          if (dice == 0) logit = -kInf;
          if (dice == 1) logit = kNan;
          if (dice == 2) logit = rows.logits[0];  // ties at temperature 0
        }
        for (int32_t row = 0; row < num_rows; ++row) {
          rows.row_index.push_back(row);
          rows.seq_slot.push_back(row);
          rows.positions.push_back(random.below(100000));
          rows.seeds.push_back(random.engine()());
          rows.temperatures.push_back(temperature);
          for (int32_t i = 0; i < 5; ++i) {
            rows.logits[static_cast<size_t>(row * rows.stride + vocab + i)] = kInf;  // not drawable
          }
        }
        const std::vector<int32_t> tokens = rows.draw_all(2);
        for (int32_t row = 0; row < num_rows; ++row) {
          const size_t r = static_cast<size_t>(row);
          ASSERT_EQ(tokens[r], reference_draw(rows.logits.data() + row * rows.stride, vocab,
                                              temperature, rows.seeds[r], rows.positions[r]))
              << "vocab " << vocab << " spread " << spread << " temperature " << temperature;
        }
      }
    }
  }
}

TEST(Draw, ADraftVocabularyDrawsWhatItsLogitsDrawAmongAllTokens) {
  TRACE_SEED();
  Random random(27);
  constexpr int32_t kTokens = 300;
  constexpr int32_t kLimit = 280;  // tokens of the target
  for (int i = 0; i < 400; ++i) {
    std::vector<int32_t> map;
    for (int32_t token = 0; token < kTokens; ++token) {
      if (random.below(3) == 0) map.push_back(token);
    }
    const auto num_ids = static_cast<int32_t>(map.size());
    std::vector<float> logits = random.normals(num_ids, i % 2 == 0 ? 1.0f : 6.0f);
    for (float& logit : logits) {
      if (random.below(30) == 0) logit = random.below(2) == 0 ? kNan : -kInf;
      if (random.below(30) == 0) logit = logits[0];
    }
    std::vector<float> scattered(kLimit, -kInf);
    for (int32_t id = 0; id < num_ids; ++id) {
      const auto token = static_cast<size_t>(map[static_cast<size_t>(id)]);
      if (token < scattered.size()) scattered[token] = logits[static_cast<size_t>(id)];
    }
    const int32_t one = 1;
    const int32_t row = 0;
    const int32_t position = random.below(1000);
    const int32_t position_before = position - 1;
    const uint64_t seed = random.engine()();
    const float temperature = std::array{0.0f, 1e-5f, 0.3f, 1.0f, 3.0f}[static_cast<size_t>(i % 5)];
    CpuContext ctx = context_of(1);
    const auto draw_from = [&](const std::vector<float>& from, const int32_t* token_map) {
      int32_t token = -99;
      float probability = -1;
      // The row is one position earlier and draws one further on: the same token's place.
      draw(ctx, {.num_rows = &one,
                 .max_rows = 1,
                 .logits = from.data(),
                 .logits_stride = static_cast<int64_t>(from.size()),
                 .vocab_limit = static_cast<int32_t>(from.size()),
                 .row_index = &row,
                 .seq_slot = &row,
                 .positions = token_map != nullptr ? &position_before : &position,
                 .seeds = &seed,
                 .temperatures = &temperature,
                 .tokens = &token,
                 .probabilities = &probability,
                 .draw_ahead = token_map != nullptr ? 2 : 1,
                 .token_map = token_map,
                 .token_limit = token_map != nullptr ? kLimit : 0});
      return std::pair{token, probability};
    };
    const auto mapped = draw_from(logits, map.data());
    const auto all = draw_from(scattered, nullptr);
    ASSERT_EQ(mapped.first, all.first) << "temperature " << temperature;
    ASSERT_FLOAT_EQ(mapped.second, all.second);
  }
}

// Rows whose logits are those of a few tokens each, in any order, and which have not moved on.
TEST(Draw, RowsOfTheirOwnTokensDrawWhatTheirLogitsDrawAmongAllTokens) {
  TRACE_SEED();
  Random random(28);
  constexpr int32_t kTokens = 300;
  constexpr int32_t kLimit = 280;  // tokens of the target
  constexpr int32_t kIds = 90;     // of a row, and some more that are not drawable
  constexpr int32_t kStride = kIds + 6;
  constexpr int32_t kRows = 3;
  const std::vector<int32_t> identity = {0, 1, 2};
  for (int i = 0; i < 200; ++i) {
    DrawRows all = {.logits = std::vector<float>(kRows * kLimit, -kInf),
                    .stride = kLimit,
                    .vocab_limit = kLimit,
                    .row_index = identity,
                    .seq_slot = identity,
                    .positions = {},
                    .seeds = {},
                    .temperatures = {}};
    std::vector<float> logits(kRows * kStride, kInf);
    std::vector<int32_t> maps(kRows * kStride, 0);
    std::vector<int32_t> tokens(kTokens);
    std::iota(tokens.begin(), tokens.end(), 0);
    const int32_t steps = random.below(16);
    std::vector<int32_t> positions;
    for (int32_t row = 0; row < kRows; ++row) {
      std::shuffle(tokens.begin(), tokens.end(), random.engine());
      for (int32_t id = 0; id < kIds; ++id) {
        const int32_t token = tokens[static_cast<size_t>(id)];
        const float logit = random.below(30) == 0 ? kNan : random.normal();
        logits[static_cast<size_t>(row * kStride + id)] = logit;
        maps[static_cast<size_t>(row * kStride + id)] = token;
        if (token < kLimit) all.logits[static_cast<size_t>(row * kLimit + token)] = logit;
      }
      positions.push_back(random.below(1000));
      all.positions.push_back(positions.back() + 1 + steps);  // draw_ahead is 1 there
      all.seeds.push_back(random.engine()());
      all.temperatures.push_back(std::array{0.0f, 0.3f, 1.0f}[static_cast<size_t>((i + row) % 3)]);
    }
    const int32_t num_rows = kRows;
    std::vector<int32_t> drawn(kRows, -99);
    CpuContext ctx = context_of(2);
    draw(ctx, {.num_rows = &num_rows,
               .max_rows = kRows,
               .logits = logits.data(),
               .logits_stride = kStride,
               .vocab_limit = kIds,
               .row_index = identity.data(),
               .seq_slot = identity.data(),
               .positions = positions.data(),
               .seeds = all.seeds.data(),
               .temperatures = all.temperatures.data(),
               .tokens = drawn.data(),
               .draw_ahead = 2,
               .token_map = maps.data(),
               .token_limit = kLimit,
               .token_map_stride = kStride,
               .steps_ahead = &steps});
    ASSERT_EQ(drawn, all.draw_all(1));
  }
}

TEST(CopyRows, TakesRowsOfAnyStride) {
  const std::vector<float> x = {0, 1, 2, -1, 10, 11, 12, -1, 20, 21, 22, -1};
  const std::vector<int32_t> index = {2, 0};
  const int32_t two = 2;
  CpuContext ctx = context_of(1);
  for (const bool has_index : {false, true}) {
    std::vector<float> y(10, 9);
    copy_rows(ctx, {.num_rows = &two,
                    .max_rows = 3,
                    .row_index = has_index ? index.data() : nullptr,
                    .x = x.data(),
                    .x_stride = 4,
                    .y = y.data(),
                    .y_stride = 5,
                    .width = 3});
    EXPECT_EQ(y, has_index ? (std::vector<float>{20, 21, 22, 9, 9, 0, 1, 2, 9, 9})
                           : (std::vector<float>{0, 1, 2, 9, 9, 10, 11, 12, 9, 9}));
  }
}

TEST(Draw, EdgeCases) {
  const auto draw_one = [](std::vector<float> logits, float temperature, int32_t slot = 0) {
    DrawRows rows = {.logits = logits,
                     .stride = 0,
                     .vocab_limit = static_cast<int32_t>(logits.size()),
                     .row_index = {0},
                     .seq_slot = {slot},
                     .positions = {3},
                     .seeds = {7},
                     .temperatures = {temperature}};
    return rows.draw_all(1)[0];
  };
  for (const float temperature : {0.0f, 1.0f, 1e-6f}) {
    EXPECT_EQ(draw_one({-kInf, kNan, -kInf}, temperature), -2) << "no valid logit";
    EXPECT_EQ(draw_one({-kInf, kNan, -3e38f, -kInf}, temperature), 2);
    EXPECT_EQ(draw_one({0.0f, kInf, 5.0f, kInf}, temperature), 1) << "first infinity";
    EXPECT_EQ(draw_one({0.0f, 1.0f}, temperature, /*slot=*/-1), -1) << "inert";
    EXPECT_EQ(draw_one({}, temperature), -2);
  }
  std::vector<float> ties(100, 1.0f);
  ties[3] = ties[97] = ties[40] = ties[35] = 2.0f;
  EXPECT_EQ(draw_one(ties, 0.0f), 3) << "ties go to the lowest id";
  ties[3] = ties[35] = 1.0f;
  EXPECT_EQ(draw_one(ties, 0.0f), 40);
  EXPECT_EQ(draw_one({-0.0f, 0.0f}, 0.0f), 0);
  DrawRows none = {.logits = {},
                   .stride = 0,
                   .vocab_limit = 10,
                   .row_index = {},
                   .seq_slot = {},
                   .positions = {},
                   .seeds = {},
                   .temperatures = {}};
  EXPECT_TRUE(none.draw_all(2).empty());
}

TEST(Draw, FollowsTheSoftmax) {
  TRACE_SEED();
  constexpr int32_t kVocab = 64;
  constexpr int32_t kNumDraws = 1 << 18;
  for (const float temperature : {0.7f, 1.0f, 1.5f}) {
    Random random(26);
    // Spread evenly over [-3, 2], so that even the rarest id is expected a dozen times.
    std::vector<float> logits(kVocab);
    for (float& logit : logits) logit = -3.0f + 5e-4f * static_cast<float>(random.below(10001));
    DrawRows rows = {.logits = logits,
                     .stride = 0,
                     .vocab_limit = kVocab,
                     .row_index = std::vector<int32_t>(kNumDraws),
                     .seq_slot = std::vector<int32_t>(kNumDraws, 0),
                     .positions = std::vector<int32_t>(kNumDraws),
                     .seeds = {base_seed()},
                     .temperatures = {temperature}};
    std::iota(rows.row_index.begin(), rows.row_index.end(), 0);
    std::iota(rows.positions.begin(), rows.positions.end(), 0);
    std::vector<int64_t> counts(kVocab, 0);
    for (const int32_t token : rows.draw_all(2)) ++counts.at(static_cast<size_t>(token));
    double sum = 0.0;
    for (const float logit : rows.logits) sum += std::exp(double{logit} / temperature);
    double g = 0.0;
    for (size_t id = 0; id < kVocab; ++id) {
      const double expected = kNumDraws * std::exp(double{rows.logits[id]} / temperature) / sum;
      ASSERT_GT(expected, 5.0);
      if (counts[id] > 0) {
        g += 2.0 * static_cast<double>(counts[id]) *
             std::log(static_cast<double>(counts[id]) / expected);
      }
    }
    std::printf("temperature %.1f: G = %.1f on %d degrees of freedom\n", double{temperature}, g,
                kVocab - 1);
    // 139.6 has probability 1e-7 under chi-square(63); 22 has the same below.
    EXPECT_LT(g, 139.6);
    EXPECT_GT(g, 22.0) << "too good to be random";
  }
}

TEST(Draw, SameSeedPositionAndLogitsGiveTheSameToken) {
  TRACE_SEED();
  Random random(27);
  constexpr int32_t kVocab = 777;
  const std::vector<float> probe = random.normals(kVocab, 2.0f);
  int32_t num_distinct = 0;
  int32_t previous = -1;
  for (int32_t trial = 0; trial < 20; ++trial) {
    const uint64_t seed = random.engine()();
    const int32_t position = random.below(1 << 20);
    const int32_t want = reference_draw(probe.data(), kVocab, 0.8f, seed, position);
    num_distinct += want != previous;
    previous = want;
    for (const int32_t num_rows : kBatchSizes) {
      DrawRows rows = {.logits = random.normals(int64_t{num_rows} * kVocab, 2.0f),
                       .stride = kVocab,
                       .vocab_limit = kVocab,
                       .row_index = {},
                       .seq_slot = {},
                       .positions = {},
                       .seeds = {},
                       .temperatures = {}};
      // Logits row i belongs to pass row num_rows - 1 - i, which sits in slot 2 * that.
      const int32_t place = random.below(num_rows);
      rows.seeds.resize(static_cast<size_t>(2 * num_rows));
      rows.temperatures.resize(static_cast<size_t>(2 * num_rows));
      for (int32_t row = 0; row < num_rows; ++row) {
        const bool is_probe = num_rows - 1 - row == place;
        rows.row_index.push_back(num_rows - 1 - row);
        rows.seq_slot.push_back(2 * row);
        rows.positions.push_back(is_probe ? position : random.below(1000));
        rows.seeds[static_cast<size_t>(2 * row)] = is_probe ? seed : random.engine()();
        rows.temperatures[static_cast<size_t>(2 * row)] =
            is_probe ? 0.8f : 0.1f * static_cast<float>(random.below(20));
      }
      std::copy(probe.begin(), probe.end(), rows.logits.begin() + int64_t{place} * kVocab);
      // place is a logits row; its pass row is num_rows - 1 - place.
      for (const int num_threads : {1, 2, 3}) {
        ASSERT_EQ(rows.draw_all(num_threads)[static_cast<size_t>(place)], want)
            << "rows " << num_rows << " threads " << num_threads;
      }
    }
  }
  EXPECT_GT(num_distinct, 10);
}

}  // namespace
}  // namespace paceline
