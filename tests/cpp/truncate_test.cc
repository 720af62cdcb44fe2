// SPDX-License-Identifier: Apache-2.0
//
// Top-k, top-p and min-p, on literal cases and against a reference in double precision.
// PACELINE_SEED overrides the seed of random cases; failures print it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "sample/logits.h"
#include "sample/truncate_rules.h"
#include "support/logits_reference.h"
#include "support/op_checks.h"
#include "support/sampling_arrays.h"

namespace paceline::testing {
namespace {

using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;

Logits truncate(Logits logits, const Sampling& sampling, int32_t padding = 0) {
  SamplingArrays arrays(2, static_cast<int32_t>(logits.size()));
  arrays.set(1, sampling);
  const int32_t one = 1;
  const int32_t zero = 0;
  const int32_t slot = 1;
  CpuContext ctx = context_of(1);
  truncate_logits(ctx, {.num_rows = &one,
                        .max_rows = 1,
                        .logits = logits.data(),
                        .logits_stride = static_cast<int64_t>(logits.size()),
                        .vocab_limit = static_cast<int32_t>(logits.size()) - padding,
                        .row_index = &zero,
                        .seq_slot = &slot,
                        .temperatures = arrays.temperature.data(),
                        .sampling = arrays.state()});
  return logits;
}

// Ids that are kept; their logits have not changed.
Tokens kept(const Logits& logits, const Sampling& sampling) {
  const Logits after = truncate(logits, sampling);
  Tokens ids;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (after[id] == -kInf || std::isnan(after[id])) continue;
    EXPECT_EQ(after[id], logits[id]);
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

Logits of_probabilities(const std::vector<double>& probabilities, double temperature = 1.0) {
  Logits logits;
  for (const double p : probabilities) {
    logits.push_back(static_cast<float>(3.0 + temperature * std::log(p)));
  }
  return logits;
}

TEST(TruncateLogits, TopKKeepsTiesAtItsEdge) {
  const Logits logits = {1, 5, 3, 3, -2, 3, 7};
  EXPECT_EQ(kept(logits, {.top_k = 1}), (Tokens{6}));
  EXPECT_EQ(kept(logits, {.top_k = 2}), (Tokens{1, 6}));
  for (const int32_t k : {3, 4, 5}) {
    EXPECT_EQ(kept(logits, {.top_k = k}), (Tokens{1, 2, 3, 5, 6})) << k;
  }
  EXPECT_EQ(kept(logits, {.top_k = 6}), (Tokens{0, 1, 2, 3, 5, 6}));
  for (const int32_t k : {0, 7, 8, 1 << 30}) {
    EXPECT_EQ(kept(logits, {.top_k = k}), (Tokens{0, 1, 2, 3, 4, 5, 6})) << k;
  }
  EXPECT_EQ(kept({-0.0f, 0.0f, -1.0f}, {.top_k = 1}), (Tokens{0, 1})) << "zeros are equal";
  EXPECT_EQ(kept({-3, -kInf, -2, kNan, -kInf}, {.top_k = 4}), (Tokens{0, 2}));
  // Adjacent floats are distinguished.
  const float below = std::nextafter(5.0f, 0.0f);
  EXPECT_EQ(kept({below, 5, std::nextafter(below, 0.0f)}, {.top_k = 1}), (Tokens{1}));
  EXPECT_EQ(kept({below, 5, std::nextafter(below, 0.0f)}, {.top_k = 2}), (Tokens{0, 1}));
}

TEST(TruncateLogits, TopPKeepsTheFewestThatReachIt) {
  const Logits logits = of_probabilities({0.1, 0.4, 0.2, 0.05, 0.25});
  EXPECT_EQ(kept(logits, {.top_p = 1e-9f}), (Tokens{1}));
  EXPECT_EQ(kept(logits, {.top_p = 0.399f}), (Tokens{1}));
  EXPECT_EQ(kept(logits, {.top_p = 0.401f}), (Tokens{1, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 0.649f}), (Tokens{1, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 0.651f}), (Tokens{1, 2, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 0.949f}), (Tokens{0, 1, 2, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 0.951f}), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 1.0f}), (Tokens{0, 1, 2, 3, 4}));
  const Logits ties = of_probabilities({0.2, 0.4, 0.2, 0.2});
  EXPECT_EQ(kept(ties, {.top_p = 0.5f}), (Tokens{0, 1, 2, 3})) << "equals go together";
  EXPECT_EQ(kept({-0.0f, 0.0f, -1.0f}, {.top_p = 0.1f}), (Tokens{0, 1}));
  // Two halves, exactly: the first reaches one half, and the other equals it.
  EXPECT_EQ(kept({2, 2}, {.top_p = 0.5f}), (Tokens{0, 1}));
}

TEST(TruncateLogits, TopPIsReachedByASumThatEqualsIt) {
  // At this temperature integer logits have weights that are exact powers of two.
  const auto with = [](float top_p) {
    return Sampling{.temperature = 1.44269504f, .top_p = top_p};
  };
  const auto above = [](float top_p) { return std::nextafter(top_p, 1.0f); };
  const Logits halves = {-1, 0, -1};  // 1/4, 1/2, 1/4
  EXPECT_EQ(kept(halves, with(0.5f)), (Tokens{1}));
  EXPECT_EQ(kept(halves, with(above(0.5f))), (Tokens{0, 1, 2}));
  const Logits eighths = {-3, -1, -3, -2};  // 1/8, 1/2, 1/8, 1/4
  EXPECT_EQ(kept(eighths, with(0.5f)), (Tokens{1}));
  EXPECT_EQ(kept(eighths, with(above(0.5f))), (Tokens{1, 3}));
  EXPECT_EQ(kept(eighths, with(0.75f)), (Tokens{1, 3}));
  EXPECT_EQ(kept(eighths, with(above(0.75f))), (Tokens{0, 1, 2, 3}));
  // Weights 2^40, 2^16 and 1: the sum must be 0.996 more than the first, so the second is kept.
  EXPECT_EQ(kept({0, -24, -40}, with(std::nextafter(1.0f, 0.0f))), (Tokens{0, 1}));
}

TEST(TruncateLogits, TopPIsAShareOfTheTokensThatTopKKeeps) {
  const Logits logits = of_probabilities({0.1, 0.4, 0.2, 0.05, 0.25});
  // The first two have 0.65 together; the first alone has 0.615 of that.
  EXPECT_EQ(kept(logits, {.top_k = 2, .top_p = 0.61f}), (Tokens{1}));
  EXPECT_EQ(kept(logits, {.top_k = 2, .top_p = 0.62f}), (Tokens{1, 4}));
  EXPECT_EQ(kept(logits, {.top_k = 2, .top_p = 0.99f}), (Tokens{1, 4}));
}

TEST(TruncateLogits, MinPIsRelativeToTheHighest) {
  const Logits logits = of_probabilities({0.1, 0.4, 0.2, 0.05, 0.25});
  EXPECT_EQ(kept(logits, {.min_p = 1e-9f}), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept(logits, {.min_p = 0.249f}), (Tokens{0, 1, 2, 4}));
  EXPECT_EQ(kept(logits, {.min_p = 0.251f}), (Tokens{1, 2, 4}));
  EXPECT_EQ(kept(logits, {.min_p = 1.0f}), (Tokens{1}));
  EXPECT_EQ(kept({2, 1, 2}, {.min_p = 1.0f}), (Tokens{0, 2}));
  EXPECT_EQ(kept(logits, {.top_k = 4, .top_p = 0.9f, .min_p = 0.6f}), (Tokens{1, 4}));
  // Top-p does not change the highest logit, so min-p is the same after it.
  EXPECT_EQ(kept(logits, {.top_p = 0.6f, .min_p = 0.1f}), (Tokens{1, 4}));
}

TEST(TruncateLogits, MinPIsExactToTheLastBit) {
  TRACE_SEED();
  Random random(31);
  int32_t num_checked = 0;
  for (int i = 0; i < 2000; ++i) {
    const float highest = random.normal(10.0f);
    const float temperature = random.one_of({0.1f, 0.7f, 1.0f, 3.0f});
    const float min_p = random.one_of({0.9f, 0.5f, 0.1f, 0.03f, 1e-4f});
    // A token is kept if exp((logit - highest) / temperature) >= min_p.
    const long double lowest = highest + temperature * std::log(static_cast<long double>(min_p));
    auto kept_one = static_cast<float>(lowest);
    if (kept_one < lowest) kept_one = std::nextafter(kept_one, kInf);
    const float cut_one = std::nextafter(kept_one, -kInf);
    // Double precision cannot tell which side the edge itself is on.
    const long double error = 1e-14L * (std::fabs(lowest) + 1);
    if (kept_one - lowest < error || lowest - cut_one < error) continue;
    ++num_checked;
    EXPECT_EQ(kept({cut_one, highest, kept_one}, {.temperature = temperature, .min_p = min_p}),
              (Tokens{1, 2}))
        << "highest " << highest << " T " << temperature << " min_p " << min_p;
  }
  EXPECT_GT(num_checked, 1900);
}

TEST(TruncateLogits, ProbabilitiesAreThoseAtTheTemperature) {
  const Logits logits = of_probabilities({0.1, 0.4, 0.2, 0.05, 0.25}, 0.5);
  const Sampling half = {.temperature = 0.5f, .top_p = 0.651f};
  EXPECT_EQ(kept(logits, half), (Tokens{1, 2, 4}));
  EXPECT_EQ(kept(logits, {.temperature = 0.5f, .min_p = 0.251f}), (Tokens{1, 2, 4}));
  EXPECT_EQ(kept(logits, {.temperature = 0.1f, .top_p = 0.651f}), (Tokens{1}));
  EXPECT_EQ(kept(logits, {.temperature = 100.0f, .top_p = 0.651f}), (Tokens{0, 1, 2, 4}));
  EXPECT_EQ(kept(logits, {.temperature = 0.0f, .top_k = 1, .top_p = 0.1f, .min_p = 1.0f}),
            (Tokens{0, 1, 2, 3, 4}));
}

TEST(TruncateLogits, ExtremeTemperaturesAndLogits) {
  for (const float temperature : {1e-45f, 1e-38f, 1e-10f, 1e-5f}) {
    for (const float scale : {1e-3f, 1.0f, 1e30f}) {
      const Logits logits = {1 * scale, 3 * scale, 3 * scale, -2 * scale};
      EXPECT_EQ(kept(logits, {.temperature = temperature, .top_p = 0.999f}), (Tokens{1, 2}));
      EXPECT_EQ(kept(logits, {.temperature = temperature, .min_p = 1e-6f}), (Tokens{1, 2}));
    }
  }
  for (const float temperature : {1e10f, 3e38f}) {
    const Logits logits = {1, 3, 3, -2};
    EXPECT_EQ(kept(logits, {.temperature = temperature, .top_p = 0.9f}), (Tokens{0, 1, 2, 3}));
    EXPECT_EQ(kept(logits, {.temperature = temperature, .min_p = 0.9f}), (Tokens{0, 1, 2, 3}));
  }
  EXPECT_EQ(kept({3e38f, -3e38f, 2.9e38f}, {.top_p = 0.999f}), (Tokens{0}));
  EXPECT_EQ(kept({3e38f, -3e38f, 2.9e38f}, {.min_p = 1e-9f}), (Tokens{0}));
  EXPECT_EQ(kept({-3e38f, -3e38f}, {.top_p = 0.1f}), (Tokens{0, 1}));
}

TEST(TruncateLogits, RowsWithoutAFiniteHighestAreLeftAlone) {
  const Sampling all = {.top_k = 1, .top_p = 0.1f, .min_p = 1.0f};
  for (const Logits& logits :
       {Logits{-kInf, kNan, -kInf}, Logits{1, kInf, 2, kInf}, Logits{kNan}, Logits{}}) {
    expect_same(truncate(logits, all), logits);
  }
  expect_same(truncate({kNan, 2, -kInf, 1, 9, 9}, all, /*padding=*/2),
              {-kInf, 2, -kInf, -kInf, 9, 9});
  expect_same(truncate({kNan, 2}, {}), {kNan, 2});
}

TEST(TruncateLogits, WeightsAreExponentials) {
  TRACE_SEED();
  Random random(3);
  for (const float temperature : {1e-20f, 0.01f, 0.7f, 1.0f, 1.7f, 50.0f, 1e20f}) {
    const float highest = random.normal(5.0f) * temperature;
    const SoftmaxWeights weights = softmax_weights_of(highest, temperature);
    EXPECT_EQ(weight_of(weights, highest), uint64_t{1} << 40);
    for (int i = 0; i < 20000; ++i) {
      const float logit = highest - temperature * 0.0015f * static_cast<float>(i);
      const double power = (double{logit} - highest) / double{temperature};
      const double exact = std::exp(power) * 0x1p40;
      // 1 for truncation; the rounding of the rate counts in proportion to the exponent.
      ASSERT_NEAR(static_cast<double>(weight_of(weights, logit)), exact,
                  1.0 + (2.5e-7 - 1.2e-7 * power) * exact)
          << temperature << " " << i;
    }
  }
}

TEST(TruncateLogits, MatchesTheReference) {
  TRACE_SEED();
  Random random(4);
  int64_t num_close = 0;
  int64_t num_checked = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const int32_t vocab = random.one_of({1, 2, 7, 64, 65, 700, 5003});
    if (vocab > 1000 && !random.one_in(8)) continue;
    const float spread = random.one_of({0.1f, 1.0f, 3.0f, 30.0f});
    const int32_t kind = random.below(4);
    Logits logits(static_cast<size_t>(vocab));
    for (float& logit : logits) {
      logit = random.normal(spread);
      if (kind == 1) logit = std::round(logit);  // ties
      if (kind == 2 && random.one_in(3)) logit = random.one_in(2) ? kNan : -kInf;
    }
    logits[static_cast<size_t>(random.below(vocab))] = 0.5f;
    Sampling s{.temperature = random.one_of({0.05f, 0.7f, 1.0f, 1.5f, 4.0f})};
    if (random.one_in(2)) s.top_k = 1 + random.below(random.one_in(2) ? 10 : vocab + 2);
    if (random.one_in(2)) s.top_p = random.one_of({0.05f, 0.5f, 0.8f, 0.9f, 0.95f, 0.99f, 0.9999f});
    if (random.one_in(2)) s.min_p = random.one_of({1e-4f, 0.01f, 0.05f, 0.3f, 0.9f});
    const Logits after = truncate(logits, s);
    const ReferenceKept want = reference_kept(s, logits);
    const bool is_any = s.top_k > 0 || s.top_p < 1.0f || s.min_p > 0.0f;
    for (size_t id = 0; id < logits.size(); ++id) {
      if (!is_any) break;
      ++num_checked;
      num_close += want.is_close[id];
      if (want.is_close[id] || std::isnan(logits[id])) continue;
      ASSERT_EQ(after[id] != -kInf, want.is_kept[id])
          << "trial " << trial << " id " << id << " logit " << logits[id] << " k " << s.top_k
          << " p " << s.top_p << " min_p " << s.min_p << " T " << s.temperature;
      if (want.is_kept[id]) {
        ASSERT_EQ(after[id], logits[id]);
      }
    }
  }
  EXPECT_LT(num_close * 100, num_checked);
}

TEST(TruncateLogits, RowsAreIndependent) {
  TRACE_SEED();
  Random random(5);
  constexpr int32_t kVocab = 501;
  constexpr int32_t kStride = kVocab + 2;
  constexpr int32_t kRows = 24;
  SamplingArrays arrays(kRows, kVocab);
  Logits logits(kRows * kStride);
  for (float& logit : logits) logit = random.normal(3.0f);
  Logits want;
  Tokens row_index(kRows);
  Tokens seq_slot(kRows);
  for (int32_t row = 0; row < kRows; ++row) {
    const Sampling s = {.temperature = random.one_of({0.0f, 0.5f, 1.0f}),
                        .top_k = random.below(3) * 20,
                        .top_p = random.one_of({1.0f, 0.8f}),
                        .min_p = random.one_of({0.0f, 0.02f})};
    const int32_t slot = kRows - 1 - row;
    arrays.set(slot, s);
    row_index[static_cast<size_t>(row)] = (row * 5) % kRows;
    seq_slot[static_cast<size_t>((row * 5) % kRows)] = slot;
    const Logits alone = truncate(
        Logits(logits.begin() + row * kStride, logits.begin() + (row + 1) * kStride), s, 2);
    want.insert(want.end(), alone.begin(), alone.end());
  }
  for (const int num_threads : {1, 3}) {
    Logits together = logits;
    const int32_t num_rows = kRows;
    CpuContext ctx = context_of(num_threads);
    truncate_logits(ctx, {.num_rows = &num_rows,
                          .max_rows = kRows,
                          .logits = together.data(),
                          .logits_stride = kStride,
                          .vocab_limit = kVocab,
                          .row_index = row_index.data(),
                          .seq_slot = seq_slot.data(),
                          .temperatures = arrays.temperature.data(),
                          .sampling = arrays.state()});
    expect_same(together, want);
  }
}

}  // namespace
}  // namespace paceline::testing
