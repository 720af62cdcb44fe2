// SPDX-License-Identifier: Apache-2.0
// The CPU ops of a block drafter's heads: join_parts, gate_embeddings, advance_markov and
// estimate_acceptance.

#include "ops/markov.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

constexpr int32_t kRows = 5;
constexpr int32_t kComputed = 4;  // the last row is beyond num_rows
constexpr int32_t kRanks[] = {1, 8, 16, 20, 256};
constexpr float kUntouched = -7.0f;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

size_t at(int64_t index) { return static_cast<size_t>(index); }

TEST(JoinParts, PutsPartsSideBySideAndZerosWhereOneIsAbsent) {
  TRACE_SEED();
  Random random(61);
  constexpr int32_t kWidths[3] = {3, 20, 37};
  constexpr int32_t kStrides[3] = {5, 20, 40};
  std::vector<std::vector<float>> parts;
  for (const int32_t stride : kStrides) parts.push_back(random.normals(kRows * stride));
  for (const bool has_first : {true, false}) {
    for (const bool has_third : {true, false}) {
      const int32_t third = has_third ? kWidths[2] : 0;
      const int32_t width = kWidths[0] + kWidths[1] + third;
      std::vector<float> y(at(kRows * width), kUntouched);
      CpuContext ctx = context_of(2);
      join_parts(ctx, {.num_rows = &kComputed,
                       .max_rows = kRows,
                       .parts = {{.x = has_first ? parts[0].data() : nullptr,
                                  .stride = kStrides[0],
                                  .width = kWidths[0]},
                                 {.x = parts[1].data(), .stride = kStrides[1], .width = kWidths[1]},
                                 {.x = parts[2].data(), .stride = kStrides[2], .width = third}},
                       .y = y.data()});
      for (int32_t row = 0; row < kRows; ++row) {
        for (int32_t i = 0; i < width; ++i) {
          float want = kUntouched;
          if (row < kComputed) {
            if (i < kWidths[0]) {
              want = has_first ? parts[0][at(row * kStrides[0] + i)] : 0.0f;
            } else if (i < kWidths[0] + kWidths[1]) {
              want = parts[1][at(row * kStrides[1] + i - kWidths[0])];
            } else {
              want = parts[2][at(row * kStrides[2] + i - kWidths[0] - kWidths[1])];
            }
          }
          ASSERT_EQ(y[at(row * width + i)], want) << row << ", " << i;
        }
      }
    }
  }
}

TEST(GateEmbeddings, MatchesReference) {
  TRACE_SEED();
  for (const int32_t rank : kRanks) {
    Random random(62);
    std::vector<float> gate = random.normals(kRows * rank, 3.0f);
    gate[0] = -200.0f;
    gate[at(rank)] = 200.0f;
    const std::vector<float> e = random.normals(kRows * rank);
    std::vector<float> y(at(kRows * rank), kUntouched);
    CpuContext ctx = context_of(2);
    gate_embeddings(ctx, {.num_rows = &kComputed,
                          .max_rows = kRows,
                          .gate = gate.data(),
                          .e = e.data(),
                          .y = y.data(),
                          .rank = rank});
    for (int64_t i = 0; i < int64_t{kRows} * rank; ++i) {
      const double want =
          i < kComputed * rank ? sigmoid(gate[at(i)]) * double{e[at(i)]} : kUntouched;
      ASSERT_TRUE(is_near(y[at(i)], want, 1e-7, 2e-6)) << rank << ", " << i;
    }
  }
}

// States and outputs after some steps, from random mixes.
struct Advanced {
  std::vector<float> state;
  std::vector<float> y;
};
Advanced advance(const std::vector<std::vector<float>>& mixes, int32_t num_rows, int32_t max_rows,
                 int32_t rank, int num_threads) {
  Advanced result{.state = std::vector<float>(at(max_rows * rank), kNan),
                  .y = std::vector<float>(at(max_rows * rank), kUntouched)};
  CpuContext ctx = context_of(num_threads);
  for (size_t step = 0; step < mixes.size(); ++step) {
    advance_markov(ctx, {.num_rows = &num_rows,
                         .max_rows = max_rows,
                         .mix = mixes[step].data(),
                         .state = result.state.data(),
                         .is_first = step == 0,
                         .y = result.y.data(),
                         .rank = rank});
  }
  return result;
}

TEST(AdvanceMarkov, MatchesReferenceOverSeveralDrafts) {
  TRACE_SEED();
  constexpr int32_t kSteps = 3;
  for (const int32_t rank : kRanks) {
    Random random(63);
    std::vector<std::vector<float>> mixes;
    for (int32_t step = 0; step < kSteps; ++step) {
      mixes.push_back(random.normals(kRows * 3 * rank, 2.0f));
    }
    mixes[1][0] = 200.0f;  // a gate that keeps the state
    mixes[1][at(3 * rank)] = -200.0f;
    const Advanced got = advance(mixes, kComputed, kRows, rank, /*num_threads=*/2);
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t i = 0; i < rank; ++i) {
        const float got_state = got.state[at(row * rank + i)];
        const float got_y = got.y[at(row * rank + i)];
        if (row >= kComputed) {
          ASSERT_TRUE(std::isnan(got_state));
          ASSERT_EQ(got_y, kUntouched);
          continue;
        }
        double state = 0.0;  // whatever was there
        double y = 0.0;
        for (const std::vector<float>& mix : mixes) {
          const float* const own = mix.data() + int64_t{row} * 3 * rank + i;
          const double gate = sigmoid(own[0]);
          state = gate * state + (1.0 - gate) * std::tanh(double{own[rank]});
          y = std::tanh(double{own[2 * rank]});
        }
        ASSERT_TRUE(is_near(got_state, state, 1e-6, 2e-6)) << rank << ": " << row << ", " << i;
        ASSERT_TRUE(is_near(got_y, y, 1e-6, 2e-6)) << rank << ": " << row << ", " << i;
      }
    }
  }
}

TEST(EstimateAcceptance, MatchesReference) {
  TRACE_SEED();
  for (const int32_t hidden : {1, 16, 33, 4096}) {
    for (const int32_t rank : {0, 8, 20, 256}) {
      const bool has_bias = rank != 20;
      Random random(64);
      const std::vector<float> h = random.normals(kRows * hidden);
      const std::vector<float> e = random.normals(kRows * rank);
      const std::vector<float> weight = random.normals(hidden + rank, 0.1f);
      const float bias = has_bias ? 0.7f : 0.0f;
      std::vector<float> probability(kRows, kUntouched);
      CpuContext ctx = context_of(2);
      estimate_acceptance(ctx, {.num_rows = &kComputed,
                                .max_rows = kRows,
                                .h = h.data(),
                                .e = rank > 0 ? e.data() : nullptr,
                                .weight = weight.data(),
                                .bias = has_bias ? &bias : nullptr,
                                .probability = probability.data(),
                                .hidden = hidden,
                                .rank = rank});
      for (int32_t row = 0; row < kRows; ++row) {
        double sum = bias;
        for (int32_t i = 0; i < hidden; ++i) {
          sum += double{h[at(row * hidden + i)]} * weight[at(i)];
        }
        for (int32_t i = 0; i < rank; ++i) {
          sum += double{e[at(row * rank + i)]} * weight[at(hidden + i)];
        }
        const double want = row < kComputed ? sigmoid(sum) : kUntouched;
        ASSERT_TRUE(is_near(probability[at(row)], want, 1e-6, 2e-5))
            << hidden << " + " << rank << ", row " << row;
      }
    }
  }
}

// `run(ids, num_threads)` computes the rows of the identities; the result has `width` floats a row.
template <class Run>
void expect_row_bits(int32_t width, const Run& run) {
  for (const int32_t count : kBatchSizes) {
    std::vector<int32_t> ids(at(count));
    for (int32_t i = 0; i < count; ++i) ids[at(i)] = (7 * i + count) % 64;
    for (const int num_threads : {1, 2}) {
      const std::vector<float> got = run(ids, num_threads);
      for (const int32_t row : {0, count / 2, count - 1}) {
        const std::vector<float> alone = run(std::vector<int32_t>{ids[at(row)]}, 1);
        ASSERT_TRUE(same_bits(got.data() + int64_t{row} * width, alone.data(), width))
            << "row " << row << " of " << count;
      }
    }
  }
}

TEST(MarkovOps, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  constexpr int32_t kRank = 20;
  constexpr int32_t kHidden = 100;
  constexpr int32_t kIds = 64;
  Random random(65);
  const std::vector<float> mix = random.normals(kIds * 3 * kRank);
  const std::vector<float> h = random.normals(kIds * kHidden);
  const std::vector<float> weight = random.normals(kHidden + kRank);
  const float bias = 0.1f;
  const auto rows_of = [](const std::vector<float>& values, int32_t width,
                          std::span<const int32_t> ids) {
    std::vector<float> rows;
    for (const int32_t id : ids) {
      const auto first = values.begin() + int64_t{id} * width;
      rows.insert(rows.end(), first, first + width);
    }
    return rows;
  };
  expect_row_bits(2 * kRank, [&](std::span<const int32_t> ids, int num_threads) {
    const std::vector<float> own = rows_of(mix, 3 * kRank, ids);
    const auto count = static_cast<int32_t>(ids.size());
    const Advanced got = advance({own, own}, count, count, kRank, num_threads);
    std::vector<float> both;
    for (int32_t row = 0; row < count; ++row) {
      for (const std::vector<float>* values : {&got.state, &got.y}) {
        const auto first = values->begin() + int64_t{row} * kRank;
        both.insert(both.end(), first, first + kRank);
      }
    }
    return both;
  });
  expect_row_bits(1, [&](std::span<const int32_t> ids, int num_threads) {
    const std::vector<float> own_h = rows_of(h, kHidden, ids);
    const std::vector<float> own_e = rows_of(mix, kRank, ids);
    const auto count = static_cast<int32_t>(ids.size());
    std::vector<float> probability(ids.size());
    CpuContext ctx = context_of(num_threads);
    estimate_acceptance(ctx, {.num_rows = &count,
                              .max_rows = count,
                              .h = own_h.data(),
                              .e = own_e.data(),
                              .weight = weight.data(),
                              .bias = &bias,
                              .probability = probability.data(),
                              .hidden = kHidden,
                              .rank = kRank});
    return probability;
  });
}

}  // namespace
}  // namespace paceline::testing
