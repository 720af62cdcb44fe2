// SPDX-License-Identifier: Apache-2.0
// The ops of residual streams on the CPU against their equations in double precision; a row has the
// bits that it has alone.

#include "ops/streams.h"

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

constexpr float kEps = 1e-3f;  // large, so that it is seen

struct Shape {
  int32_t num_streams;
  int32_t hidden;
  int32_t sinkhorn_iterations;
  bool is_end;

  [[nodiscard]] int64_t width() const { return int64_t{num_streams} * hidden; }
  [[nodiscard]] int32_t mix() const { return mix_width(num_streams, is_end); }
};

struct Weights {
  std::vector<float> weight;
  std::vector<float> base;
  std::vector<float> scale;
  std::vector<float> norm;
};

Weights random_weights(const Shape& s, Random& random) {
  return {.weight = random.normals(s.mix() * s.width(), 1.0f / std::sqrt(float(s.width()))),
          .base = random.normals(s.mix()),
          .scale = random.normals(s.is_end ? 1 : 3),
          .norm = random.normals(s.hidden)};
}

std::vector<float> mix_of(const Shape& s, const Weights& w, const float* x, int32_t num_rows,
                          int num_threads = 1) {
  std::vector<float> mix(static_cast<size_t>(num_rows) * static_cast<size_t>(s.mix()));
  CpuContext ctx = context_of(num_threads);
  mix_streams(ctx, {.num_rows = &num_rows,
                    .max_rows = num_rows,
                    .x = x,
                    .weight = w.weight.data(),
                    .base = w.base.data(),
                    .scale = w.scale.data(),
                    .mix = mix.data(),
                    .num_streams = s.num_streams,
                    .hidden = s.hidden,
                    .is_end = s.is_end,
                    .sinkhorn_iterations = s.sinkhorn_iterations,
                    .norm_eps = kEps,
                    .eps = kEps});
  return mix;
}

std::vector<float> read_of(const Shape& s, const Weights& w, const float* x,
                           const std::vector<float>& mix, int32_t num_rows, int num_threads = 1) {
  std::vector<float> y(static_cast<size_t>(num_rows) * static_cast<size_t>(s.hidden));
  CpuContext ctx = context_of(num_threads);
  read_streams(ctx, {.num_rows = &num_rows,
                     .max_rows = num_rows,
                     .x = x,
                     .mix = mix.data(),
                     .mix_stride = s.mix(),
                     .weight = w.norm.data(),
                     .eps = kEps,
                     .y = y.data(),
                     .num_streams = s.num_streams,
                     .hidden = s.hidden});
  return y;
}

std::vector<float> sum_of(const Shape& s, const float* x, const std::vector<float>& mix,
                          int32_t num_rows, int num_threads = 1) {
  std::vector<float> y(static_cast<size_t>(num_rows) * static_cast<size_t>(s.hidden) + 1, -7.0f);
  CpuContext ctx = context_of(num_threads);
  sum_streams(ctx, {.num_rows = &num_rows,
                    .max_rows = num_rows + 1,
                    .x = x,
                    .mix = mix.data(),
                    .mix_stride = s.mix(),
                    .y = y.data(),
                    .num_streams = s.num_streams,
                    .hidden = s.hidden});
  EXPECT_EQ(y.back(), -7.0f);  // a row that does not exist
  y.pop_back();
  return y;
}

std::vector<float> write_of(const Shape& s, std::vector<float> streams, const float* branch,
                            const std::vector<float>& mix, int32_t num_rows, int num_threads = 1) {
  CpuContext ctx = context_of(num_threads);
  write_streams(ctx, {.num_rows = &num_rows,
                      .max_rows = num_rows,
                      .x = branch,
                      .mix = mix.data(),
                      .y = streams.data(),
                      .num_streams = s.num_streams,
                      .hidden = s.hidden});
  return streams;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The mix of one row in double precision, from the equations.
std::vector<double> mix_reference(const Shape& s, const Weights& w, const float* x) {
  const auto size = static_cast<size_t>(s.num_streams);
  double squares = 0;
  for (int64_t i = 0; i < s.width(); ++i) squares += double{x[i]} * x[i];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(s.width()) + kEps);
  std::vector<double> m(static_cast<size_t>(s.mix()));
  for (size_t o = 0; o < m.size(); ++o) {
    for (int64_t i = 0; i < s.width(); ++i) {
      m[o] += double{x[i]} * w.weight[o * static_cast<size_t>(s.width()) + static_cast<size_t>(i)];
    }
    m[o] = m[o] * factor * w.scale[std::min<size_t>(o / size, 2)] + w.base[o];
  }
  for (size_t i = 0; i < size; ++i) m[i] = sigmoid(m[i]) + kEps;
  if (s.is_end) return m;
  for (size_t i = size; i < 2 * size; ++i) m[i] = 2 * sigmoid(m[i]);
  const auto c = [&](size_t i, size_t j) -> double& { return m[2 * size + i * size + j]; };
  for (size_t i = 0; i < size; ++i) {
    double sum = 0;
    for (size_t j = 0; j < size; ++j) sum += std::exp(c(i, j));
    for (size_t j = 0; j < size; ++j) c(i, j) = std::exp(c(i, j)) / sum + kEps;
  }
  for (int32_t step = 0; step < 2 * s.sinkhorn_iterations - 1; ++step) {
    const bool is_by_column = step % 2 == 0;
    for (size_t i = 0; i < size; ++i) {
      double sum = 0;
      for (size_t j = 0; j < size; ++j) sum += is_by_column ? c(j, i) : c(i, j);
      for (size_t j = 0; j < size; ++j) (is_by_column ? c(j, i) : c(i, j)) /= sum + kEps;
    }
  }
  return m;
}

std::vector<Shape> shapes() {
  return {{4, 64, 20, false}, {4, 64, 20, true}, {2, 7, 1, false}, {3, 33, 2, false},
          {8, 100, 3, false}, {8, 5, 1, true},   {1, 16, 4, false}};
}

TEST(Streams, MatchTheirEquations) {
  TRACE_SEED();
  Random random(211);
  constexpr int32_t kRows = 9;
  for (const Shape& s : shapes()) {
    SCOPED_TRACE(::testing::Message() << s.num_streams << " streams of " << s.hidden);
    const Weights w = random_weights(s, random);
    const std::vector<float> x = random.normals(kRows * s.width(), 3.0f);
    const std::vector<float> branch = random.normals(int64_t{kRows} * s.hidden);
    const std::vector<float> mix = mix_of(s, w, x.data(), kRows);
    const std::vector<float> y = read_of(s, w, x.data(), mix, kRows);
    const std::vector<float> summed = sum_of(s, x.data(), mix, kRows);
    const std::vector<float> written =
        s.is_end ? std::vector<float>() : write_of(s, x, branch.data(), mix, kRows);
    const auto size = static_cast<size_t>(s.num_streams);
    const auto hidden = static_cast<size_t>(s.hidden);
    for (size_t row = 0; row < kRows; ++row) {
      const float* const of_row = x.data() + row * size * hidden;
      const std::vector<double> m = mix_reference(s, w, of_row);
      for (size_t i = 0; i < m.size(); ++i) {
        ASSERT_TRUE(is_near(mix[row * m.size() + i], m[i], 2e-6, 2e-5)) << row << ", factor " << i;
      }
      std::vector<double> sum(hidden);
      double squares = 0;
      for (size_t i = 0; i < hidden; ++i) {
        for (size_t t = 0; t < size; ++t) sum[i] += m[t] * of_row[t * hidden + i];
        squares += sum[i] * sum[i];
        ASSERT_TRUE(is_near(summed[row * hidden + i], sum[i], 3e-5, 3e-5)) << row << ", sum " << i;
      }
      const double factor = 1 / std::sqrt(squares / s.hidden + kEps);
      for (size_t i = 0; i < hidden; ++i) {
        ASSERT_TRUE(is_near(y[row * hidden + i], sum[i] * factor * w.norm[i], 3e-5, 3e-5))
            << row << ", element " << i;
      }
      for (size_t j = 0; j < size && !s.is_end; ++j) {
        for (size_t i = 0; i < hidden; ++i) {
          double want = m[size + j] * branch[row * hidden + i];
          for (size_t t = 0; t < size; ++t) {
            want += m[(2 + t) * size + j] * of_row[t * hidden + i];
          }
          ASSERT_TRUE(is_near(written[(row * size + j) * hidden + i], want, 1e-4, 3e-5))
              << row << ", stream " << j;
        }
      }
    }
  }
}

TEST(Streams, ARowHasTheBitsThatItHasAlone) {
  TRACE_SEED();
  Random random(223);
  for (const Shape& s : {Shape{4, 64, 20, false}, Shape{3, 1001, 2, false}}) {
    const Weights w = random_weights(s, random);
    constexpr int32_t kRows = 33;
    const std::vector<float> x = random.normals(kRows * s.width(), 3.0f);
    const std::vector<float> branch = random.normals(int64_t{kRows} * s.hidden);
    const std::vector<float> mix = mix_of(s, w, x.data(), kRows, 2);
    const std::vector<float> y = read_of(s, w, x.data(), mix, kRows, 2);
    const std::vector<float> summed = sum_of(s, x.data(), mix, kRows, 2);
    const std::vector<float> written = write_of(s, x, branch.data(), mix, kRows, 2);
    for (int64_t row = 0; row < kRows; ++row) {
      const std::vector<float> alone(x.begin() + row * s.width(),
                                     x.begin() + (row + 1) * s.width());
      const std::vector<float> its_mix = mix_of(s, w, alone.data(), 1);
      ASSERT_TRUE(same_bits(its_mix.data(), mix.data() + row * s.mix(), s.mix()));
      const std::vector<float> its_y = read_of(s, w, alone.data(), its_mix, 1);
      ASSERT_TRUE(same_bits(its_y.data(), y.data() + row * s.hidden, s.hidden));
      const std::vector<float> its_sum = sum_of(s, alone.data(), its_mix, 1);
      ASSERT_TRUE(same_bits(its_sum.data(), summed.data() + row * s.hidden, s.hidden));
      const std::vector<float> its = write_of(s, alone, branch.data() + row * s.hidden, its_mix, 1);
      ASSERT_TRUE(same_bits(its.data(), written.data() + row * s.width(), s.width()));
    }
  }
}

TEST(Streams, BeginAsCopiesAndAddToWhatIsThere) {
  constexpr int32_t kRows = 2;
  constexpr int32_t kHidden = 3;
  const std::vector<float> x = {1, 2, 3, 4, 5, 6};
  std::vector<float> y(2 * 2 * 3 + 1, -7.0f);
  CpuContext ctx = context_of(1);
  SpreadStreamsParams p = {.num_rows = &kRows,
                           .max_rows = kRows,
                           .x = x.data(),
                           .y = y.data(),
                           .num_streams = 2,
                           .hidden = kHidden};
  spread_streams(ctx, p);
  EXPECT_EQ(y, (std::vector<float>{1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6, -7}));
  p.adds = true;
  spread_streams(ctx, p);
  EXPECT_EQ(y, (std::vector<float>{2, 4, 6, 2, 4, 6, 8, 10, 12, 8, 10, 12, -7}));
}

TEST(Streams, HaveAMean) {
  constexpr int32_t kRows = 2;
  constexpr int32_t kStride = 5;  // rows of y are parts of wider ones
  const std::vector<float> x = {1, 2, 3, 7, 9, 12, 10, 20, 30, 30, 20, 10};
  std::vector<float> y(2 * kStride, -7.0f);
  CpuContext ctx = context_of(1);
  mean_streams(ctx, {.num_rows = &kRows,
                     .max_rows = kRows + 1,
                     .x = x.data(),
                     .y = y.data(),
                     .y_stride = kStride,
                     .num_streams = 2,
                     .hidden = 3});
  EXPECT_EQ(y, (std::vector<float>{4, 5.5, 7.5, -7, -7, 20, 20, 20, -7, -7}));
}

TEST(Streams, AreNormedEachForItself) {
  TRACE_SEED();
  Random random(227);
  constexpr int32_t kStreams = 4;
  constexpr int32_t kHidden = 33;
  const std::vector<float> x = random.normals(5 * kStreams * kHidden);
  const std::vector<float> weight = random.normals(kHidden);
  const std::vector<int32_t> row_index = {4, 0, 0};
  const auto num_rows = static_cast<int32_t>(row_index.size());
  std::vector<float> y(row_index.size() * kStreams * kHidden);
  int32_t num_stream_rows = -1;
  CpuContext ctx = context_of(2);
  norm_streams(ctx, {.num_rows = &num_rows,
                     .max_rows = num_rows + 2,
                     .row_index = row_index.data(),
                     .x = x.data(),
                     .weight = weight.data(),
                     .eps = kEps,
                     .y = y.data(),
                     .num_streams = kStreams,
                     .hidden = kHidden,
                     .num_stream_rows = &num_stream_rows});
  EXPECT_EQ(num_stream_rows, 3 * kStreams);
  for (size_t stream = 0; stream < row_index.size() * kStreams; ++stream) {
    const size_t row = stream / kStreams;
    const float* const from =
        x.data() + (static_cast<size_t>(row_index[row]) * kStreams + stream % kStreams) * kHidden;
    double squares = 0;
    for (int32_t i = 0; i < kHidden; ++i) squares += double{from[i]} * from[i];
    for (size_t i = 0; i < kHidden; ++i) {
      const double want = from[i] / std::sqrt(squares / kHidden + kEps) * weight[i];
      ASSERT_TRUE(is_near(y[stream * kHidden + i], want, 1e-6, 1e-5));
    }
  }
}

}  // namespace
}  // namespace paceline::testing
