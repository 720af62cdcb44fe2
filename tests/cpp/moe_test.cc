// SPDX-License-Identifier: Apache-2.0
// The CPU ops on the rows of a mixture of experts: which experts they choose, the order of expert
// rows, and the sum over the places of a row.

#include "ops/moe.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <paceline/error.h>

#include "device/cpu_context.h"
#include "support/expert_rows.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

// --- route_experts -------------------------------------------------------------------------------

void expect_routing(const std::vector<float>& logits, int32_t num_rows, int32_t num_experts,
                    int32_t top_k) {
  const Routing routing = route(logits, num_rows, num_experts, top_k, /*num_threads=*/2);
  for (int32_t row = 0; row < num_rows; ++row) {
    std::vector<double> of_row(static_cast<size_t>(num_experts));
    for (int32_t e = 0; e < num_experts; ++e) {
      const double logit = logits[static_cast<size_t>(row * num_experts + e)];
      of_row[static_cast<size_t>(e)] = std::isnan(logit) ? -kInf : logit;
    }
    std::vector<int32_t> order(of_row.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return of_row[static_cast<size_t>(a)] > of_row[static_cast<size_t>(b)];
    });
    double sum = 0;
    for (int32_t i = 0; i < top_k; ++i) {
      sum += std::exp(of_row[static_cast<size_t>(order[static_cast<size_t>(i)])] -
                      of_row[static_cast<size_t>(order[0])]);
    }
    for (int32_t i = 0; i < top_k; ++i) {
      const auto at = static_cast<size_t>(row * top_k + i);
      const int32_t expert = order[static_cast<size_t>(i)];
      ASSERT_EQ(routing.experts[at], expert) << "row " << row << " place " << i;
      const double difference =
          of_row[static_cast<size_t>(expert)] - of_row[static_cast<size_t>(order[0])];
      // The difference is rounded before its exponential is taken.
      const double bound =
          1e-6 + 0.5 * top_k * kFloatEpsilon - 2 * kFloatEpsilon * std::max(difference, -200.0);
      ASSERT_TRUE(is_near(routing.weights[at], std::exp(difference) / sum, 1e-37, bound))
          << "row " << row << " place " << i << " of " << top_k << " of " << num_experts;
    }
  }
}

TEST(RouteExperts, MatchesReference) {
  TRACE_SEED();
  Random random(100);
  for (int32_t round = 0; round < 200; ++round) {
    const int32_t num_experts = random.one_of({1, 2, 3, 4, 8, 31, 32, 33, 128, 1000, kMaxExperts});
    const int32_t most = std::min(num_experts, kMaxTopK);
    const int32_t top_k = random.one_of({1, most, std::min(4, most), 1 + random.below(most)});
    const int32_t num_rows = random.one_of({0, 1, 2, 7, 300});
    std::vector<float> logits = random.normals(int64_t{num_rows} * num_experts, 3.0f);
    const int32_t kind = random.below(4);
    for (float& logit : logits) {
      if (kind == 1) logit = std::round(logit);  // ties, among them of -0 and 0
      if (kind == 2 && random.one_in(3)) logit = random.one_in(2) ? kNan : -kInf;
      if (kind == 3) logit *= 100.0f;
    }
    SCOPED_TRACE(::testing::Message() << "round " << round << " kind " << kind);
    ASSERT_NO_FATAL_FAILURE(expect_routing(logits, num_rows, num_experts, top_k));
  }
}

TEST(RouteExperts, EqualLogitsGoToTheLowerNumber) {
  const Routing routing = route({1, 2, 2, 1, 2, 0, 0, 0, 0, 0}, 2, 5, 4);
  EXPECT_EQ(routing.experts, (std::vector<int32_t>{1, 2, 4, 0, 0, 1, 2, 3}));
  for (size_t i = 4; i < 8; ++i) EXPECT_EQ(routing.weights[i], 0.25f);
}

TEST(RouteExperts, NanIsTheWorstLogit) {
  const Routing routing = route({kNan, -kInf, 3, kNan, -1}, 1, 5, 4);
  EXPECT_EQ(routing.experts, (std::vector<int32_t>{2, 4, 0, 1}));
  EXPECT_EQ(routing.weights[2], 0.0f);
  EXPECT_EQ(routing.weights[3], 0.0f);
}

TEST(RouteExperts, WeightsAreNanWhereTheBestLogitIsInfinite) {
  for (const std::vector<float>& logits :
       {std::vector<float>{kNan, kNan, kNan}, {-kInf, -kInf, -kInf}, {0, kInf, 1}}) {
    const Routing routing = route(logits, 1, 3, 2);
    EXPECT_TRUE(std::isnan(routing.weights[0]) && std::isnan(routing.weights[1]));
    EXPECT_EQ(routing.experts[0], logits[1] == kInf ? 1 : 0);
  }
}

TEST(RouteExperts, SoftmaxOfAllExperts) {
  TRACE_SEED();
  Random random(102);
  for (const auto& [num_experts, top_k] : {std::pair{1, 1}, {5, 2}, {128, 8}, {1000, 32}}) {
    const int32_t num_rows = 50;
    std::vector<float> logits = random.normals(int64_t{num_rows} * num_experts, 2.0f);
    logits[0] = kNan;  // counts as -inf
    if (num_experts == 1) logits[0] = 3;
    const std::vector<float> scales = random.normals(num_experts);
    for (const RouterRule rule : {RouterRule::kSoftmaxOfChosen, RouterRule::kSoftmax}) {
      const Routing plain = route_by_softmax(logits, num_rows, num_experts, top_k, rule);
      const Routing scaled =
          route_by_softmax(logits, num_rows, num_experts, top_k, rule, 0.125f, scales);
      EXPECT_EQ(plain.experts, scaled.experts);
      EXPECT_EQ(plain.experts, route(logits, num_rows, num_experts, top_k).experts);
      for (const auto& [routing, factor] : {std::pair{&plain, 1.0}, {&scaled, 0.125}}) {
        for (int32_t row = 0; row < num_rows; ++row) {
          const auto power = [&](int32_t e) {
            const double logit = logits[static_cast<size_t>(row * num_experts + e)];
            return std::isnan(logit) ? 0.0 : std::exp(logit * factor);
          };
          double sum = 0;
          for (int32_t i = 0; i < (rule == RouterRule::kSoftmax ? num_experts : top_k); ++i) {
            const bool is_of_all = rule == RouterRule::kSoftmax;
            sum += power(is_of_all ? i : routing->experts[static_cast<size_t>(row * top_k + i)]);
          }
          for (int32_t i = 0; i < top_k; ++i) {
            const auto at = static_cast<size_t>(row * top_k + i);
            const int32_t expert = routing->experts[at];
            const double scale = routing == &scaled ? scales[static_cast<size_t>(expert)] : 1.0;
            EXPECT_NEAR(routing->weights[at], power(expert) / sum * scale, 1e-5)
                << "row " << row << " place " << i << " of " << top_k;
          }
        }
      }
    }
  }
}

// --- sort_expert_rows ----------------------------------------------------------------------------

TEST(SortExpertRows, SortsByExpertAndThenByRow) {
  TRACE_SEED();
  Random random(101);
  for (int32_t round = 0; round < 100; ++round) {
    const int32_t num_experts = random.one_of({1, 3, 32, 128, kMaxExperts});
    const int32_t most = std::min(num_experts, kMaxTopK);
    const int32_t top_k = random.one_of({1, most, std::min(4, most)});
    const int32_t num_rows = random.one_of({0, 1, 5, 64, 2048});
    const int32_t spare_rows = random.below(3);
    const bool has_shared = random.below(2) == 0;
    const std::vector<int32_t> experts = random_experts(random, num_rows, num_experts, top_k);
    const auto count = static_cast<size_t>(num_rows * top_k);
    std::vector<std::pair<int32_t, int32_t>> pairs;  // expert, row
    for (size_t i = 0; i < count; ++i) {
      pairs.emplace_back(experts[i], static_cast<int32_t>(i) / top_k);
    }
    std::sort(pairs.begin(), pairs.end());
    int64_t counters[] = {1000, 10};
    const Sorted sorted =
        sort(experts, num_rows, num_experts, top_k, spare_rows, counters, has_shared);
    int32_t num_hit = 0;
    for (int32_t e = 0; e <= num_experts; ++e) {
      const auto first = std::lower_bound(pairs.begin(), pairs.end(), std::pair{e, 0});
      ASSERT_EQ(sorted.expert_begin[static_cast<size_t>(e)], first - pairs.begin()) << e;
      num_hit += first != pairs.end() && first->first == e ? 1 : 0;
    }
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(sorted.source_row[i], pairs[i].second) << i;
      const auto at = static_cast<size_t>(sorted.expert_row[i]);
      ASSERT_EQ(pairs[at], (std::pair{experts[i], static_cast<int32_t>(i) / top_k})) << i;
    }
    const size_t num_shared = has_shared ? static_cast<size_t>(num_rows) : 0;
    if (has_shared) {
      ASSERT_EQ(sorted.expert_begin.back(), static_cast<int32_t>(count + num_shared));
    }
    for (size_t i = 0; i < num_shared; ++i) {
      ASSERT_EQ(sorted.source_row[count + i], static_cast<int32_t>(i));
    }
    // Nothing is written beyond the rows of the pass.
    for (size_t i = count + num_shared; i < sorted.source_row.size(); ++i) {
      ASSERT_EQ(sorted.source_row[i], -7);
    }
    for (size_t i = count; i < sorted.expert_row.size(); ++i) ASSERT_EQ(sorted.expert_row[i], -7);
    ASSERT_EQ(counters[0], 1000 + num_hit);
    ASSERT_EQ(counters[1], 11);
  }
}

TEST(SortExpertRows, TakesEveryRowToOneExpert) {
  const Sorted sorted = sort(std::vector<int32_t>(2048, 5), 2048, 32, 1);
  std::vector<int32_t> rows(2048);
  std::iota(rows.begin(), rows.end(), 0);
  EXPECT_EQ(sorted.source_row, rows);
  EXPECT_EQ(sorted.expert_row, rows);
  for (int32_t e = 0; e <= 32; ++e) {
    EXPECT_EQ(sorted.expert_begin[static_cast<size_t>(e)], e <= 5 ? 0 : 2048);
  }
}

TEST(RouteAndSort, IsBoth) {
  Random random(102);
  const int32_t num_rows = 40;
  const std::vector<float> logits = random.normals(int64_t{num_rows} * 32);
  const Routing routing = route(logits, num_rows, 32, 4);
  const Sorted sorted = sort(routing.experts, num_rows, 32, 4);
  Routing routing_of_both = {.experts = std::vector<int32_t>(160), .weights = {}};
  routing_of_both.weights.resize(160);
  Sorted sorted_of_both = {.expert_begin = std::vector<int32_t>(33),
                           .source_row = std::vector<int32_t>(160),
                           .expert_row = std::vector<int32_t>(160)};
  CpuContext ctx = context_of(1);
  route_and_sort(ctx, {.route = {.num_rows = &num_rows,
                                 .max_rows = num_rows,
                                 .logits = logits.data(),
                                 .logits_stride = 32,
                                 .num_experts = 32,
                                 .top_k = 4,
                                 .rule = RouterRule::kSoftmaxOfChosen,
                                 .experts = routing_of_both.experts.data(),
                                 .weights = routing_of_both.weights.data()},
                       .sort = {.num_rows = &num_rows,
                                .max_rows = num_rows,
                                .experts = routing_of_both.experts.data(),
                                .num_experts = 32,
                                .top_k = 4,
                                .expert_begin = sorted_of_both.expert_begin.data(),
                                .source_row = sorted_of_both.source_row.data(),
                                .expert_row = sorted_of_both.expert_row.data(),
                                .counters = nullptr}});
  EXPECT_EQ(routing_of_both.experts, routing.experts);
  EXPECT_EQ(routing_of_both.weights, routing.weights);
  EXPECT_EQ(sorted_of_both.expert_begin, sorted.expert_begin);
  EXPECT_EQ(sorted_of_both.source_row, sorted.source_row);
  EXPECT_EQ(sorted_of_both.expert_row, sorted.expert_row);
}

TEST(RunRouter, IsItsProductAndThenBoth) {
  Random random(103);
  const int32_t num_rows = 9;
  const int32_t k = 24;
  const std::vector<float> x = random.normals(int64_t{num_rows} * k);
  const int32_t n = 7;  // the last row of the matrix is no expert's
  const std::vector<float> weight = random.normals(int64_t{n} * k);
  const std::vector<float> bias = random.normals(n);
  std::vector<float> logits(static_cast<size_t>(num_rows * n));
  CpuContext ctx = context_of(1);
  const GemmParams product = {.num_rows = &num_rows,
                              .max_rows = num_rows,
                              .x = x.data(),
                              .x_stride = k,
                              .weight = plain_matrix(weight.data(), n, k, DType::kFloat32),
                              .bias = bias.data(),
                              .y = logits.data(),
                              .y_stride = n};
  gemm(ctx, product);
  std::vector<float> of_experts;
  for (auto row = logits.begin(); row != logits.end(); row += n) {
    of_experts.insert(of_experts.end(), row, row + 6);
  }
  const Routing routing = route(of_experts, num_rows, 6, 2);
  const Sorted sorted = sort(routing.experts, num_rows, 6, 2);
  const std::vector<float> products = logits;
  std::fill(logits.begin(), logits.end(), kNan);
  std::vector<int32_t> experts(18);
  std::vector<float> weights(18);
  std::vector<int32_t> expert_begin(7);
  std::vector<int32_t> source_row(18);
  std::vector<int32_t> expert_row(18);
  run_router(ctx, {.product = product,
                   .route = {.num_rows = &num_rows,
                             .max_rows = num_rows,
                             .logits = logits.data(),
                             .logits_stride = n,
                             .num_experts = 6,
                             .top_k = 2,
                             .rule = RouterRule::kSoftmaxOfChosen,
                             .experts = experts.data(),
                             .weights = weights.data()},
                   .sort = {.num_rows = &num_rows,
                            .max_rows = num_rows,
                            .experts = experts.data(),
                            .num_experts = 6,
                            .top_k = 2,
                            .expert_begin = expert_begin.data(),
                            .source_row = source_row.data(),
                            .expert_row = expert_row.data(),
                            .counters = nullptr}});
  EXPECT_EQ(logits, products);
  EXPECT_EQ(experts, routing.experts);
  EXPECT_EQ(weights, routing.weights);
  EXPECT_EQ(expert_begin, sorted.expert_begin);
  EXPECT_EQ(source_row, sorted.source_row);
  EXPECT_EQ(expert_row, sorted.expert_row);
}

// --- combine_experts -----------------------------------------------------------------------------

struct Combination {
  int32_t num_rows = 0;
  int32_t top_k = 0;
  int32_t hidden = 0;
  std::vector<float> x;
  std::vector<int32_t> expert_row;
  std::vector<float> weights;
  std::vector<float> base = {};       // empty: none
  bool has_shared = false;            // whose expert rows follow the others in x
  std::vector<float> base_gate = {};  // empty: none
  int64_t base_gate_stride = 1;
};

Combination random_combination(Random& random, int32_t num_rows, int32_t top_k, int32_t hidden) {
  Combination c = {.num_rows = num_rows, .top_k = top_k, .hidden = hidden};
  c.x = random.normals(int64_t{num_rows} * top_k * hidden);
  c.expert_row.resize(static_cast<size_t>(num_rows * top_k));
  std::iota(c.expert_row.begin(), c.expert_row.end(), 0);
  std::shuffle(c.expert_row.begin(), c.expert_row.end(), random.engine());
  for (size_t i = 0; i < c.expert_row.size(); ++i) {
    c.weights.push_back(std::fabs(random.normal()));
  }
  return c;
}

std::vector<float> combine(const Combination& c, int num_threads = 2) {
  std::vector<float> y = c.base;
  y.resize(static_cast<size_t>(c.num_rows * c.hidden));
  CpuContext ctx = context_of(num_threads);
  combine_experts(ctx, {.num_rows = &c.num_rows,
                        .max_rows = c.num_rows,
                        .top_k = c.top_k,
                        .x = c.x.data(),
                        .expert_row = c.expert_row.data(),
                        .weights = c.weights.data(),
                        .y = y.data(),
                        .hidden = c.hidden,
                        .base = c.base.empty() ? nullptr : y.data(),
                        .has_shared = c.has_shared,
                        .base_gate = c.base_gate.empty() ? nullptr : c.base_gate.data(),
                        .base_gate_stride = c.base_gate_stride});
  return y;
}

TEST(CombineExperts, SumsPlacesInOrderByFusedMultiplyAdds) {
  TRACE_SEED();
  Random random(102);
  for (const int32_t hidden : {1, 16, 63, 64, 200, 2880}) {
    for (const int32_t top_k : {1, 2, 4, 32}) {
      for (const int32_t num_rows : {0, 1, 9}) {
        const Combination c = random_combination(random, num_rows, top_k, hidden);
        const std::vector<float> y = combine(c);
        int64_t num_reversed = 0;  // sums that differ when places are added in the reverse order
        for (int32_t row = 0; row < num_rows; ++row) {
          for (int32_t i = 0; i < hidden; ++i) {
            float sum = 0;
            float reversed = 0;
            double exact = 0;
            double magnitude = 0;
            for (int32_t place = 0; place < top_k; ++place) {
              const auto term = [&](int32_t at) {
                const auto j = static_cast<size_t>(row * top_k + at);
                return std::pair{c.weights[j],
                                 c.x[static_cast<size_t>(c.expert_row[j] * hidden + i)]};
              };
              const auto [weight, x] = term(place);
              sum = std::fma(weight, x, sum);
              exact += double{weight} * x;
              magnitude += std::fabs(double{weight} * x);
              const auto [last_weight, last_x] = term(top_k - 1 - place);
              reversed = std::fma(last_weight, last_x, reversed);
            }
            const float got = y[static_cast<size_t>(row * hidden + i)];
            ASSERT_EQ(got, sum) << "row " << row << " column " << i << " top_k " << top_k;
            ASSERT_TRUE(is_near(got, exact, top_k * kFloatEpsilon * magnitude, 0.0));
            num_reversed += got != reversed ? 1 : 0;
          }
        }
        if (top_k >= 4 && int64_t{num_rows} * hidden >= 1000) {
          ASSERT_GT(num_reversed, 0);
        }
      }
    }
  }
}

TEST(CombineExperts, BeginsWithTheBase) {
  Random random(105);
  for (const int32_t hidden : {7, 64, 200}) {
    Combination c = random_combination(random, 5, 3, hidden);
    c.base = random.normals(int64_t{5} * hidden);
    const std::vector<float> y = combine(c);
    for (int32_t row = 0; row < 5; ++row) {
      for (int32_t i = 0; i < hidden; ++i) {
        const auto at = static_cast<size_t>(row * hidden + i);
        float sum = c.base[at];
        for (int32_t place = 0; place < 3; ++place) {
          const auto j = static_cast<size_t>(row * 3 + place);
          sum = std::fma(c.weights[j], c.x[static_cast<size_t>(c.expert_row[j] * hidden + i)], sum);
        }
        ASSERT_EQ(y[at], sum) << "row " << row << " column " << i;
      }
    }
    // The same base among the expert rows.
    c.has_shared = true;
    c.x.insert(c.x.end(), c.base.begin(), c.base.end());
    c.base.clear();
    EXPECT_EQ(combine(c), y);
  }
}

TEST(CombineExperts, AGateScalesTheBaseAlone) {
  Random random(106);
  for (const int32_t hidden : {7, 64, 200}) {
    Combination c = random_combination(random, 5, 3, hidden);
    const std::vector<float> without = combine(c);
    c.base = random.normals(int64_t{5} * hidden);
    c.base_gate = {-150.0f, -1.0f, 0.0f, 2.5f, 150.0f};
    const std::vector<float> y = combine(c);
    for (int32_t row = 0; row < 5; ++row) {
      for (int32_t i = 0; i < hidden; ++i) {
        const auto at = static_cast<size_t>(row * hidden + i);
        const double gate = c.base_gate[static_cast<size_t>(row)];
        const double want = without[at] + c.base[at] / (1 + std::exp(-gate));
        ASSERT_TRUE(is_near(y[at], want, 4e-6, 1e-6)) << "row " << row << " column " << i;
      }
    }
    // The same base among the expert rows, and gates that are no neighbours.
    c.has_shared = true;
    c.x.insert(c.x.end(), c.base.begin(), c.base.end());
    c.base.clear();
    c.base_gate_stride = 3;
    c.base_gate.resize(13, kNan);
    for (const size_t row : {4, 3, 2, 1}) std::swap(c.base_gate[3 * row], c.base_gate[row]);
    EXPECT_EQ(combine(c), y);
  }
}

}  // namespace
}  // namespace paceline::testing
