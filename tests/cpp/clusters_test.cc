// SPDX-License-Identifier: Apache-2.0
// The CPU ops of draft heads that score clusters of tokens first: select_clusters and
// cluster_logits.

#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "support/failing_allocations.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

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
      // The second row's scores ascend; the third row is not computed.
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

// An op that runs out of memory would end its engine, so this one needs none.
TEST(SelectClusters, AllocatesNothing) {
  constexpr int32_t kNumClusters = 2048;
  constexpr int32_t kTop = 32;
  std::vector<float> scores(kNumClusters);
  std::vector<int32_t> order(kNumClusters);
  std::iota(order.begin(), order.end(), 0);
  for (int32_t i = 0; i < kNumClusters; ++i) {
    scores[static_cast<size_t>(i)] = static_cast<float>(i * 7919 % 512);
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  std::vector<int32_t> clusters(kTop, -9);
  CpuContext ctx = context_of(1);
  const int32_t num_rows = 1;
  is_test_thread = true;
  fail_allocations(Side::kTest, 0);
  EXPECT_NO_THROW(select_clusters(ctx, {.num_rows = &num_rows,
                                        .max_rows = 1,
                                        .scores = scores.data(),
                                        .num_clusters = kNumClusters,
                                        .top = kTop,
                                        .clusters = clusters.data()}));
  fault_side = Side::kNone;
  order.resize(kTop);
  EXPECT_EQ(clusters, order);
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

}  // namespace
}  // namespace paceline::testing
