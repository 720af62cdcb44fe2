// SPDX-License-Identifier: Apache-2.0
// The products of experts, in every format of weights, and the mixture that they are a part of.

#include "ops/moe.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "ops/ops.h"
#include "support/expert_rows.h"
#include "support/failing_allocations.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

// A format of weights, with the scales that test it.
struct Format {
  const char* name;
  DType dtype;
  WeightFormat format = WeightFormat::kPlain;
  int32_t scale_rows = 0;
  int32_t scale_cols = 0;  // 0: k
  bool has_exact_scales = false;
  bool has_order = false;  // of kInt4
};
constexpr DType kF = DType::kFloat32;
constexpr DType kB = DType::kBFloat16;
constexpr Format kFormats[] = {{"float32", kF},
                               {"bfloat16", kB},
                               {"mxfp4", kB, WeightFormat::kMxfp4},
                               {"mxfp4 in float32", kF, WeightFormat::kMxfp4},
                               {"nvfp4", kB, WeightFormat::kNvfp4, 1, kNvfp4Columns},
                               {"nvfp4 in float32", kF, WeightFormat::kNvfp4, 1, kNvfp4Columns},
                               {"fp8, scale a row", kB, WeightFormat::kFp8, 1},
                               {"fp8, exact tiles", kB, WeightFormat::kFp8, 16, 32, true},
                               {"fp8, tiles", kB, WeightFormat::kFp8, 8, 64},
                               {"fp8, tiles in float32", kF, WeightFormat::kFp8, 8, 64},
                               {"int4", kB, WeightFormat::kInt4, 1, 32},
                               {"int4 in float32", kF, WeightFormat::kInt4, 1, 32},
                               {.name = "int4 with an order",
                                .dtype = kB,
                                .format = WeightFormat::kInt4,
                                .scale_rows = 1,
                                .has_order = true}};

void PrintTo(const Format& f, std::ostream* out) { *out << f.name; }

std::string test_name(const ::testing::TestParamInfo<Format>& info) {
  std::string name = info.param.name;
  std::erase(name, ',');
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

// Random matrices of a format, with a gap between the experts that holds other bits.
struct Matrices {
  std::vector<std::byte> data;
  std::vector<std::byte> scales;
  std::vector<uint8_t> zeros;
  std::vector<int32_t> order;
  ExpertMatrices experts;

  [[nodiscard]] WeightMatrix of(int32_t expert) const {
    WeightMatrix matrix = experts.first;
    matrix.data += expert * experts.data_stride;
    if (matrix.scales != nullptr) matrix.scales += expert * experts.scales_stride;
    if (matrix.zeros != nullptr) matrix.zeros += expert * matrix.zeros_bytes();
    if (matrix.order != nullptr) matrix.order += expert * matrix.k;
    return matrix;
  }
};

Matrices random_matrices(Random& random, const Format& f, int32_t num_experts, int32_t n,
                         int32_t k) {
  Matrices m;
  WeightMatrix& first = m.experts.first;
  first = {.n = n, .k = k, .dtype = f.dtype, .format = f.format, .scale_rows = f.scale_rows};
  const bool has_tiles = f.scale_rows > 0;
  first.scale_cols = !has_tiles ? 0 : f.scale_cols > 0 ? std::min(f.scale_cols, k) : k;
  first.has_exact_scales = f.has_exact_scales;
  m.experts.num_experts = num_experts;
  m.experts.data_stride = (n * first.row_bytes() + 63) / 64 * 64 + 64;
  const auto bytes = static_cast<size_t>(num_experts * m.experts.data_stride);
  if (f.format == WeightFormat::kPlain) {
    const int64_t count = static_cast<int64_t>(bytes) / dtype_bytes(f.dtype);
    m.data = typed_array(f.dtype, random.normals(count, 0.2f)).bytes;
  } else {
    for (size_t i = 0; i < bytes; ++i) {
      const int32_t bits = random.below(256);
      // e4m3 has no infinity, and its NaN is all ones.
      const bool is_nan = f.format == WeightFormat::kFp8 && (bits & 0x7f) == 0x7f;
      m.data.push_back(static_cast<std::byte>(is_nan ? 0 : bits));
    }
  }
  if (f.format == WeightFormat::kMxfp4) {
    m.experts.scales_stride = int64_t{n} * (k / kMxfp4Columns) + 5;
    for (int64_t i = 0; i < num_experts * m.experts.scales_stride; ++i) {
      m.scales.push_back(static_cast<std::byte>(120 + random.below(8)));
    }
  } else if (f.format == WeightFormat::kNvfp4) {
    const int64_t num_scales = first.num_scale_rows() * first.num_scale_cols();
    m.experts.scales_stride = (num_scales + 3) * 4;
    m.scales = typed_array(kF, random.normals(num_experts * (num_scales + 3), 0.02f)).bytes;
  } else if (f.format == WeightFormat::kInt4) {
    const int64_t num_scales = first.num_scale_rows() * first.num_scale_cols();
    m.experts.scales_stride = (num_scales + 3) * 2;
    m.scales = typed_array(kB, random.normals(num_experts * (num_scales + 3), 0.02f)).bytes;
    for (int64_t i = 0; i < num_experts * num_scales; ++i) {
      m.zeros.push_back(static_cast<uint8_t>(random.below(16)));
    }
    first.has_zeros = true;
    first.zeros = m.zeros.data();
    first.has_order = f.has_order;
    for (int32_t expert = 0; f.has_order && expert < num_experts; ++expert) {
      for (int32_t i = 0; i < k; ++i) m.order.push_back((i * 5 + expert) % k);
    }
    if (f.has_order) first.order = m.order.data();
  } else if (f.format == WeightFormat::kFp8) {
    const int64_t num_tiles = int64_t{(n + first.scale_rows - 1) / first.scale_rows} *
                              ((k + first.scale_cols - 1) / first.scale_cols);
    m.experts.scales_stride = (num_tiles + 3) * 4;
    std::vector<float> scales;
    for (int64_t i = 0; i < num_experts * (num_tiles + 3); ++i) {
      scales.push_back(f.has_exact_scales ? std::ldexp(1.0f, -4 - random.below(6))
                                          : 0.01f * (1.0f + std::fabs(random.normal())));
    }
    m.scales = typed_array(kF, scales).bytes;
  }
  first.data = m.data.data();
  first.scales = m.scales.empty() ? nullptr : m.scales.data();
  return m;
}

// One row by the dense product.
std::vector<float> gemm_alone(const float* x, const WeightMatrix& weight, const float* bias) {
  const int32_t num_rows = 1;
  std::vector<float> y(static_cast<size_t>(weight.n));
  CpuContext ctx = context_of(1);
  gemm(ctx, {.num_rows = &num_rows,
             .max_rows = 1,
             .x = x,
             .x_stride = weight.k,
             .weight = weight,
             .bias = bias,
             .y = y.data(),
             .y_stride = weight.n});
  return y;
}

struct ExpertShape {
  int32_t num_rows = 0;
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t n = 0;
  int32_t k = 0;
};

// A row of every expert product has the bits of `gemm` on that row and its expert's matrix.
void expect_rows_of_gemm(Random& random, const Format& format, const ExpertShape& s,
                         const std::vector<int32_t>& experts) {
  const Sorted sorted = sort(experts, s.num_rows, s.num_experts, s.top_k);
  const Matrices matrices = random_matrices(random, format, s.num_experts, s.n, s.k);
  const std::vector<float> biases = random.normals(int64_t{s.num_experts} * s.n);
  const int32_t num_expert_rows = s.num_rows * s.top_k;
  for (const bool is_gathered : {true, false}) {
    const int32_t num_x_rows = is_gathered ? s.num_rows : num_expert_rows;
    const int64_t x_stride = s.k + 3;
    const int64_t y_stride = s.n + (is_gathered ? 0 : 5);
    const std::vector<float> x = random.normals(num_x_rows * x_stride);
    const float* const bias = is_gathered ? biases.data() : nullptr;
    const int num_threads = 1 + random.below(3);
    std::vector<float> y(static_cast<size_t>((num_expert_rows + 1) * y_stride), 77.0f);
    CpuContext ctx = context_of(num_threads);
    expert_gemm(ctx, {.expert_begin = sorted.expert_begin.data(),
                      .max_rows = num_expert_rows + 1,
                      .x = x.data(),
                      .x_stride = x_stride,
                      .x_rows = is_gathered ? sorted.source_row.data() : nullptr,
                      .num_x_rows = num_x_rows,
                      .weight = matrices.experts,
                      .bias = bias,
                      .y = y.data(),
                      .y_stride = y_stride});
    for (int32_t e = 0; e < s.num_experts; ++e) {
      for (int32_t i = sorted.expert_begin[static_cast<size_t>(e)];
           i < sorted.expert_begin[static_cast<size_t>(e) + 1]; ++i) {
        const int32_t x_row = is_gathered ? sorted.source_row[static_cast<size_t>(i)] : i;
        const std::vector<float> want =
            gemm_alone(x.data() + x_row * x_stride, matrices.of(e),
                       bias == nullptr ? nullptr : bias + int64_t{e} * s.n);
        ASSERT_TRUE(same_bits(y.data() + i * y_stride, want.data(), s.n))
            << "expert " << e << " expert row " << i << " of " << num_expert_rows << ", n " << s.n
            << " k " << s.k << ", threads " << num_threads << ", gathered " << is_gathered;
        for (int64_t j = s.n; j < y_stride; ++j) {
          ASSERT_EQ(y[static_cast<size_t>(i * y_stride + j)], 77.0f) << "written beyond n";
        }
      }
    }
    for (int64_t j = num_expert_rows * y_stride; j < std::ssize(y); ++j) {
      ASSERT_EQ(y[static_cast<size_t>(j)], 77.0f) << "written beyond the expert rows";
    }
  }
}

class ExpertGemm : public ::testing::TestWithParam<Format> {};

TEST_P(ExpertGemm, ARowHasTheBitsOfGemmAlone) {
  TRACE_SEED();
  Random random(103);
  for (int32_t round = 0; round < 24; ++round) {
    ExpertShape s = {.num_rows = random.one_of({0, 1, 2, 5, 13, 40}),
                     .num_experts = random.one_of({1, 3, 8, 32})};
    s.top_k = std::min(s.num_experts, random.one_of({1, 2, 4}));
    s.n = random.one_of({1, 7, 16, 50, 96});
    s.k = 32 * random.one_of({1, 2, 3, 6});
    if (GetParam().format == WeightFormat::kPlain) s.k -= random.below(20);
    SCOPED_TRACE(::testing::Message() << "round " << round);
    ASSERT_NO_FATAL_FAILURE(expect_rows_of_gemm(
        random, GetParam(), s, random_experts(random, s.num_rows, s.num_experts, s.top_k)));
  }
}

// The same op serves a batch that all goes to one expert, and a chunk that spreads over all.
TEST_P(ExpertGemm, TakesAnySplitOfALargeBatch) {
  TRACE_SEED();
  Random random(104);
  const ExpertShape one = {.num_rows = 300, .num_experts = 32, .top_k = 1, .n = 72, .k = 96};
  for (const int32_t expert : {0, 17, 31}) {
    ASSERT_NO_FATAL_FAILURE(
        expect_rows_of_gemm(random, GetParam(), one, std::vector<int32_t>(300, expert)));
  }
  const ExpertShape all = {.num_rows = 2048, .num_experts = 128, .top_k = 4, .n = 16, .k = 32};
  std::vector<int32_t> spread(static_cast<size_t>(all.num_rows * all.top_k));
  for (size_t i = 0; i < spread.size(); ++i) spread[i] = static_cast<int32_t>(i % 128);
  ASSERT_NO_FATAL_FAILURE(expect_rows_of_gemm(random, GetParam(), all, spread));
}

INSTANTIATE_TEST_SUITE_P(Formats, ExpertGemm, ::testing::ValuesIn(kFormats), test_name);

// --- a mixture -----------------------------------------------------------------------------------

struct MixtureShape {
  int32_t hidden = 96;
  int32_t num_experts = 8;
  int32_t top_k = 3;
  int32_t intermediate = 64;
};

// A whole mixture: router, experts and combination.
class Mixture {
 public:
  Mixture(Random& random, const MixtureShape& shape, const Format& format)
      : s_(shape),
        router_(
            typed_array(kB, random.normals(int64_t{shape.num_experts} * shape.hidden,
                                           1.0f / std::sqrt(static_cast<float>(shape.hidden))))),
        router_bias_(random.normals(shape.num_experts, 0.1f)),
        gate_up_(random_matrices(random, format, shape.num_experts, 2 * shape.intermediate,
                                 shape.hidden)),
        gate_up_bias_(random.normals(int64_t{shape.num_experts} * 2 * shape.intermediate, 0.1f)),
        down_(random_matrices(random, format, shape.num_experts, shape.hidden, shape.intermediate)),
        down_bias_(random.normals(int64_t{shape.num_experts} * shape.hidden, 0.1f)) {}

  // x and the result: [num_rows, hidden]. Allocations of the ops fail on `side`.
  [[nodiscard]] std::vector<float> run(const std::vector<float>& x, int num_threads,
                                       Side side = Side::kNone) const {
    const auto num_rows = static_cast<int32_t>(std::ssize(x) / s_.hidden);
    const int32_t num_expert_rows = num_rows * s_.top_k;
    std::vector<float> logits(static_cast<size_t>(num_rows * s_.num_experts));
    std::vector<float> gate_up(static_cast<size_t>(num_expert_rows * 2 * s_.intermediate));
    std::vector<float> activated(static_cast<size_t>(num_expert_rows * s_.intermediate));
    std::vector<float> expert_out(static_cast<size_t>(num_expert_rows * s_.hidden));
    const auto num_places = static_cast<size_t>(num_expert_rows);
    Routing routing = {.experts = std::vector<int32_t>(num_places),
                       .weights = std::vector<float>(num_places)};
    Sorted sorted = {.expert_begin = std::vector<int32_t>(static_cast<size_t>(s_.num_experts) + 1),
                     .source_row = std::vector<int32_t>(num_places),
                     .expert_row = std::vector<int32_t>(num_places)};
    std::vector<float> y(x.size());
    CpuContext ctx = context_of(num_threads);
    is_test_thread = true;
    fail_allocations(side, 0);
    gemm(ctx, {.num_rows = &num_rows,
               .max_rows = num_rows,
               .x = x.data(),
               .x_stride = s_.hidden,
               .weight = plain_matrix(router_.bytes.data(), s_.num_experts, s_.hidden, kB),
               .bias = router_bias_.data(),
               .y = logits.data(),
               .y_stride = s_.num_experts});
    route_and_sort(ctx, {.route = {.num_rows = &num_rows,
                                   .max_rows = num_rows,
                                   .logits = logits.data(),
                                   .logits_stride = s_.num_experts,
                                   .num_experts = s_.num_experts,
                                   .top_k = s_.top_k,
                                   .rule = RouterRule::kSoftmaxOfChosen,
                                   .experts = routing.experts.data(),
                                   .weights = routing.weights.data()},
                         .sort = {.num_rows = &num_rows,
                                  .max_rows = num_rows,
                                  .experts = routing.experts.data(),
                                  .num_experts = s_.num_experts,
                                  .top_k = s_.top_k,
                                  .expert_begin = sorted.expert_begin.data(),
                                  .source_row = sorted.source_row.data(),
                                  .expert_row = sorted.expert_row.data(),
                                  .counters = nullptr}});
    expert_gemm(ctx, {.expert_begin = sorted.expert_begin.data(),
                      .max_rows = num_expert_rows,
                      .x = x.data(),
                      .x_stride = s_.hidden,
                      .x_rows = sorted.source_row.data(),
                      .num_x_rows = num_rows,
                      .weight = gate_up_.experts,
                      .bias = gate_up_bias_.data(),
                      .y = gate_up.data(),
                      .y_stride = 2 * s_.intermediate});
    gated_activation(ctx, {.num_rows = &sorted.expert_begin.back(),
                           .max_rows = num_expert_rows,
                           .x = gate_up.data(),
                           .y = activated.data(),
                           .intermediate = s_.intermediate,
                           .activation = Activation::kSwigluOai,
                           .alpha = 1.702f,
                           .limit = 7.0f,
                           .is_interleaved = true});
    expert_gemm(ctx, {.expert_begin = sorted.expert_begin.data(),
                      .max_rows = num_expert_rows,
                      .x = activated.data(),
                      .x_stride = s_.intermediate,
                      .x_rows = nullptr,
                      .num_x_rows = num_expert_rows,
                      .weight = down_.experts,
                      .bias = down_bias_.data(),
                      .y = expert_out.data(),
                      .y_stride = s_.hidden});
    combine_experts(ctx, {.num_rows = &num_rows,
                          .max_rows = num_rows,
                          .top_k = s_.top_k,
                          .x = expert_out.data(),
                          .expert_row = sorted.expert_row.data(),
                          .weights = routing.weights.data(),
                          .y = y.data(),
                          .hidden = s_.hidden});
    fault_side = Side::kNone;
    return y;
  }

 private:
  MixtureShape s_;
  TypedArray router_;
  std::vector<float> router_bias_;
  Matrices gate_up_;
  std::vector<float> gate_up_bias_;
  Matrices down_;
  std::vector<float> down_bias_;
};

class MixtureTest : public ::testing::TestWithParam<Format> {};

TEST_P(MixtureTest, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  Random random(105);
  for (const MixtureShape& shape :
       {MixtureShape{}, MixtureShape{.hidden = 64, .num_experts = 32, .top_k = 4},
        MixtureShape{.num_experts = 2, .top_k = 2}}) {
    const Mixture mixture(random, shape, GetParam());
    const int32_t hidden = shape.hidden;
    for (const int32_t num_rows : {1, 2, 3, 8, 32, 33, 128, 256}) {
      const std::vector<float> probe = random.normals(hidden);
      const std::vector<float> alone = mixture.run(probe, 1);
      std::vector<float> x = random.normals(int64_t{num_rows} * hidden);
      if (random.one_in(3)) {  // all other rows go where one of them goes
        for (int32_t row = 1; row < num_rows; ++row) {
          std::copy_n(x.begin(), hidden, x.begin() + int64_t{row} * hidden);
        }
      }
      const int32_t positions[] = {0, num_rows - 1, random.below(num_rows)};
      for (const int32_t row : positions) {
        std::copy(probe.begin(), probe.end(), x.begin() + int64_t{row} * hidden);
      }
      const std::vector<float> y = mixture.run(x, 1 + random.below(3));
      for (const int32_t row : positions) {
        ASSERT_TRUE(same_bits(alone.data(), y.data() + int64_t{row} * hidden, hidden))
            << "row " << row << " of " << num_rows << ", " << shape.num_experts << " experts";
      }
    }
  }
}

// An op that runs out of memory would end its engine, so these need none, on any thread.
TEST_P(MixtureTest, AllocatesNothing) {
  TRACE_SEED();
  Random random(106);
  const MixtureShape shape = {.hidden = 128, .num_experts = 32, .top_k = 4, .intermediate = 96};
  const Mixture mixture(random, shape, GetParam());
  for (const int32_t num_rows : {1, 100}) {
    const std::vector<float> x = random.normals(int64_t{num_rows} * shape.hidden);
    const std::vector<float> expected = mixture.run(x, 2);
    for (const Side side : {Side::kTest, Side::kEngine}) {
      EXPECT_EQ(mixture.run(x, 2, side), expected);
      EXPECT_EQ(num_faults, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, MixtureTest, ::testing::ValuesIn(kFormats), test_name);

}  // namespace
}  // namespace paceline::testing
