// SPDX-License-Identifier: Apache-2.0
// The routers with scores on the CPU: which experts they choose, by correction, group or token, and
// with what weights.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>
#include <paceline/error.h>

#include "device/cpu_context.h"
#include "ops/moe.h"
#include "support/expert_rows.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

double score(RouterRule rule, double logit) {
  if (std::isnan(logit)) return 0;
  if (rule == RouterRule::kSigmoid) return 1 / (1 + std::exp(-logit));
  if (logit <= -87) return 0;
  return std::sqrt(std::max(logit, 0.0) + std::log1p(std::exp(-std::fabs(logit))));
}

// A row of a rule with scores in double precision, from the equations. `is_clear` is false where
// float32 cannot tell candidates apart, or may tell sums apart that are equal.
struct ScoreReference {
  std::vector<int32_t> experts;
  std::vector<double> weights;
  bool is_clear = true;
};
ScoreReference route_by_score(RouterRule rule, const float* logits,
                              const std::vector<float>& correction, int32_t top_k,
                              const ScoreRouting& routing) {
  const auto num_experts = std::ssize(correction);
  std::vector<double> choice(correction.size());
  for (size_t e = 0; e < choice.size(); ++e) {
    choice[e] = score(rule, logits[e]) + double{correction[e]};
  }
  ScoreReference reference;
  // The best numbers of a list, best first.
  const auto best_of = [&](const std::vector<double>& values, int64_t count, bool may_tie) {
    std::vector<int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    const auto value = [&](int32_t i) { return values[static_cast<size_t>(i)]; };
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return value(a) > value(b); });
    for (int64_t i = 0; i < count && i + 1 < std::ssize(order); ++i) {
      const double above = value(order[static_cast<size_t>(i)]);
      const double below = value(order[static_cast<size_t>(i) + 1]);
      const bool is_tie = above == below && may_tie;
      if (!is_tie && above - below < 1e-6) reference.is_clear = false;
    }
    order.resize(static_cast<size_t>(count));
    return order;
  };
  const int64_t size = num_experts / routing.num_groups;
  if (routing.num_groups > 1) {
    std::vector<double> sums;
    for (int64_t begin = 0; begin < num_experts; begin += size) {
      std::vector<double> group(choice.begin() + begin, choice.begin() + begin + size);
      std::sort(group.rbegin(), group.rend());
      sums.push_back(group[0] + group[1]);
    }
    const std::vector<int32_t> groups = best_of(sums, routing.top_groups, /*may_tie=*/false);
    for (int64_t e = 0; e < num_experts; ++e) {
      const bool is_open = std::find(groups.begin(), groups.end(), e / size) != groups.end();
      if (!is_open) choice[static_cast<size_t>(e)] = -kInf;
    }
  }
  reference.experts = best_of(choice, top_k, /*may_tie=*/true);
  double sum = 1e-20;
  for (const int32_t e : reference.experts) {
    reference.weights.push_back(score(rule, logits[e]));
    sum += reference.weights.back();
  }
  for (double& weight : reference.weights) {
    weight = weight / (routing.normalises ? sum : 1) * routing.scale;
  }
  return reference;
}

TEST(RouteByScore, MatchesReference) {
  TRACE_SEED();
  Random random(103);
  int64_t num_clear = 0;
  int64_t num_moved = 0;  // rows whose experts are not those of the best logits
  int64_t num_rows_of_all = 0;
  for (int32_t round = 0; round < 200; ++round) {
    const int32_t num_groups = random.one_of({1, 1, 2, 4, 8, kMaxExpertGroups});
    const int32_t size = random.one_of({2, 3, 8, 32});
    const int32_t num_experts = num_groups * size;
    const ScoreRouting routing = {.num_groups = num_groups,
                                  .top_groups = 1 + random.below(num_groups),
                                  .normalises = random.one_in(2),
                                  .scale = random.one_of({1.0f, 1.8f, 2.5f})};
    const int32_t most = std::min(routing.top_groups * size, kMaxTopK);
    const int32_t top_k = random.one_of({1, most, std::min(4, most), 1 + random.below(most)});
    const int32_t num_rows = random.one_of({0, 1, 2, 7, 100});
    std::vector<float> logits = random.normals(int64_t{num_rows} * num_experts, 3.0f);
    std::vector<float> correction = random.normals(num_experts, 0.2f);
    const RouterRule rule = random.one_of({RouterRule::kSigmoid, RouterRule::kSqrtSoftplus});
    const int32_t kind = random.below(4);
    if (kind == 1) {  // ties
      for (float& logit : logits) logit = std::round(logit);
      for (float& value : correction) value = std::round(4 * value) / 4;
    }
    for (float& logit : logits) {
      if (kind == 2 && random.one_in(3))
        logit = random.one_of({kNan, -kInf, rule == RouterRule::kSigmoid ? kInf : kNan});
      if (kind == 3) logit *= 30.0f;
    }
    const Routing got =
        route(logits, num_rows, num_experts, top_k, /*num_threads=*/2, routing, correction, rule);
    SCOPED_TRACE(::testing::Message() << "round " << round << " kind " << kind);
    for (int32_t row = 0; row < num_rows; ++row) {
      const float* const of_row = logits.data() + int64_t{row} * num_experts;
      const ScoreReference want = route_by_score(rule, of_row, correction, top_k, routing);
      ++num_rows_of_all;
      if (!want.is_clear) continue;
      ++num_clear;
      const ScoreReference plain = route_by_score(
          rule, of_row, std::vector<float>(correction.size()), top_k, {.scale = routing.scale});
      num_moved += plain.experts != want.experts ? 1 : 0;
      for (int32_t i = 0; i < top_k; ++i) {
        const auto at = static_cast<size_t>(row * top_k + i);
        const auto place = static_cast<size_t>(i);
        ASSERT_EQ(got.experts[at], want.experts[place]) << "row " << row << " place " << i;
        // Scores below the normal numbers are 0, and their sum may be 1e-20.
        ASSERT_TRUE(is_near(got.weights[at], want.weights[place], 1e-17, 2e-6))
            << "row " << row << " place " << i << ": " << got.weights[at] << " for "
            << want.weights[place];
      }
    }
  }
  EXPECT_GT(num_clear, num_rows_of_all * 9 / 10);
  EXPECT_GT(num_moved, num_clear / 4);
}

TEST(RouteByScore, ATableChoosesTheExpertsOfATokenAndScoresWeighThem) {
  const std::vector<float> logits = {0, 1, 2, 3, kNan, 0, 1, 2, 3, kNan, 0, 1, 2, 3};
  const std::vector<int32_t> table = {3, 0, 1, 2};  // of tokens 0 and 1
  const std::vector<int32_t> tokens = {1, 0, 2};    // token 2 is outside
  constexpr int32_t kRows = 3;
  std::vector<int32_t> experts(6);
  std::vector<float> weights(6);
  CpuContext ctx = context_of(1);
  RouteExpertsParams p = {.num_rows = &kRows,
                          .max_rows = kRows,
                          .logits = logits.data(),
                          .logits_stride = 5,
                          .num_experts = 4,
                          .top_k = 2,
                          .rule = RouterRule::kSqrtSoftplus,
                          .experts = experts.data(),
                          .weights = weights.data(),
                          .scoring = {.normalises = true, .scale = 1.5f},
                          .token_experts = table.data(),
                          .token_ids = tokens.data(),
                          .vocab_size = 2};
  route_experts(ctx, p);
  EXPECT_EQ(experts, (std::vector<int32_t>{1, 2, 3, 0, 3, 0}));
  for (size_t row = 0; row < kRows; ++row) {
    const auto of = [&](size_t place) {
      return score(RouterRule::kSqrtSoftplus,
                   logits[static_cast<size_t>(experts[2 * row + place])]);
    };
    for (const size_t place : {0, 1}) {
      EXPECT_NEAR(weights[2 * row + place], of(place) / (of(0) + of(1)) * 1.5, 1e-6);
    }
  }
  p.logits_stride = 3;
  EXPECT_THROW(route_experts(ctx, p), InternalError);
  p.logits_stride = 5;
  p.rule = RouterRule::kSigmoid;
  EXPECT_THROW(route_experts(ctx, p), InternalError);
}

TEST(RouteBySigmoid, TheCorrectionChoosesAndDoesNotWeigh) {
  const Routing routing = route({0, 0, 0, 0}, 1, 4, 2, 1, {.scale = 2}, {0, 0.25f, 0.25f, 0.5f});
  EXPECT_EQ(routing.experts, (std::vector<int32_t>{3, 1}));
  EXPECT_EQ(routing.weights, (std::vector<float>{1, 1}));
}

TEST(RouteBySigmoid, ChoosesWithinTheBestGroups) {
  // Group 1 has the best expert. Groups 0 and 2 have the best sums of two, the same; their third
  // experts, which are good in group 1, count for nothing.
  const std::vector<float> correction = {0.2f, 0.2f, -1, 0.375f, 0, 0.375f, 0.2f, 0.2f, -9};
  const std::vector<float> logits(9);
  EXPECT_EQ(route(logits, 1, 9, 4, 1, {.num_groups = 3, .top_groups = 2}, correction).experts,
            (std::vector<int32_t>{3, 5, 0, 1}));
  EXPECT_EQ(route(logits, 1, 9, 3, 1, {.num_groups = 3, .top_groups = 1}, correction).experts,
            (std::vector<int32_t>{3, 5, 4}));
  // A chosen group's worst expert comes before the best of the others.
  EXPECT_EQ(route(logits, 1, 9, 6, 1, {.num_groups = 3, .top_groups = 2}, correction).experts,
            (std::vector<int32_t>{3, 5, 0, 1, 4, 2}));
}

TEST(RouteBySigmoid, RowsAreInvariant) {
  Random random(104);
  const ScoreRouting routing = {
      .num_groups = 8, .top_groups = 4, .normalises = true, .scale = 2.5f};
  const std::vector<float> logits = random.normals(int64_t{40} * 64);
  const std::vector<float> correction = random.normals(64);
  const Routing all = route(logits, 40, 64, 6, 2, routing, correction);
  for (int32_t row = 0; row < 40; ++row) {
    const std::vector<float> own(logits.begin() + row * 64, logits.begin() + (row + 1) * 64);
    const Routing alone = route(own, 1, 64, 6, 1, routing, correction);
    for (int32_t i = 0; i < 6; ++i) {
      const auto at = static_cast<size_t>(row * 6 + i);
      ASSERT_EQ(all.experts[at], alone.experts[static_cast<size_t>(i)]);
      ASSERT_EQ(all.weights[at], alone.weights[static_cast<size_t>(i)]);
    }
  }
}

TEST(RouteBySigmoid, RefusesGroupsThatDoNotFit) {
  const auto refuses = [](int32_t top_k, const ScoreRouting& routing) {
    const std::vector<float> twelve(12);
    EXPECT_THROW((void)route(twelve, 1, 12, top_k, 1, routing, twelve), InternalError);
  };
  refuses(2, {.num_groups = 5});
  refuses(2, {.num_groups = 3, .top_groups = 4});
  refuses(5, {.num_groups = 3, .top_groups = 1});
  refuses(2, {.num_groups = 12, .top_groups = 12});
}

}  // namespace
}  // namespace paceline::testing
