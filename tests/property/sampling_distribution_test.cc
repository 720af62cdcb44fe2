// SPDX-License-Identifier: Apache-2.0
//
// Tokens are drawn from the distribution that the request asks for, at every temperature and with
// every parameter of the logits pipeline, and draws are independent. G-tests against exact
// distributions; together they raise a false alarm with a probability of 1 % (Bonferroni).
// PACELINE_SEED overrides the seed; failures print it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/cpu_context.h"
#include "ops/ops.h"
#include "sample/logits.h"
#include "support/g_test.h"
#include "support/logits_reference.h"
#include "support/sampling_arrays.h"
#include "support/seed.h"
#include "wire/limits.h"

namespace paceline::testing {
namespace {

constexpr int32_t kVocab = 64;
constexpr int32_t kNumSeeds = 20;
constexpr int32_t kDrawsPerSeed = 1 << 16;  // 20 seeds: more than 2^20 of each distribution
constexpr int32_t kManyDraws = 1 << 20;     // of a seed, without parameters
constexpr double kFalseAlarm = 0.01;

CpuContext context() {
  static ThreadPool threads(2);
  return {.num_threads = 2, .threads = &threads};
}

TEST(SamplingDistribution, ChiSquareTail) {
  EXPECT_NEAR(chi_square_tail(3.841458820694124, 1), 0.05, 1e-9);
  EXPECT_NEAR(chi_square_tail(82.52872654147169, 63), 0.05, 1e-9);
  // With an even number of degrees it is a sum of terms of the Poisson distribution.
  for (const double x : {3.0, 20.0, 60.0, 90.0, 250.0}) {
    double sum = 0;
    double term = std::exp(-x / 2);
    for (int k = 0; k < 31; ++k) {
      sum += term;
      term *= x / 2 / (k + 1);
    }
    EXPECT_NEAR(chi_square_tail(x, 62) / sum, 1.0, 1e-9) << x;
  }
}

// Draws at consecutive positions, from logits that `sampling` has processed after `tokens`.
std::vector<int32_t> draws(const Sampling& sampling, const std::vector<int32_t>& tokens,
                           std::vector<float> logits, uint64_t seed, int32_t num_draws) {
  SamplingArrays arrays(1, kVocab);
  arrays.set(0, sampling);
  arrays.settle(0, tokens);
  const int32_t one = 1;
  const std::vector<int32_t> slots(static_cast<size_t>(num_draws), 0);
  std::vector<int32_t> known_len = {static_cast<int32_t>(tokens.size())};
  std::vector<int32_t> history = tokens;
  std::vector<int32_t> no_stops = {0};
  std::vector<int32_t> stop_ids(kMaxStopIds);
  const int32_t newest = known_len[0] - 1;
  CpuContext ctx = context();
  adjust_logits(ctx, {.num_rows = &one,
                      .max_rows = 1,
                      .logits = logits.data(),
                      .logits_stride = kVocab,
                      .row_index = slots.data(),
                      .seq_slot = slots.data(),
                      .positions = &newest,
                      .token_ids = history.data(),
                      .sequences = {.known_len = known_len.data(),
                                    .num_stop_ids = no_stops.data(),
                                    .stop_ids = stop_ids.data(),
                                    .history = history.data(),
                                    .history_stride = newest + 1},
                      .sampling = arrays.state()});
  truncate_logits(ctx, {.num_rows = &one,
                        .max_rows = 1,
                        .logits = logits.data(),
                        .logits_stride = kVocab,
                        .vocab_limit = kVocab,
                        .row_index = slots.data(),
                        .seq_slot = slots.data(),
                        .temperatures = arrays.temperature.data(),
                        .sampling = arrays.state()});
  // Every row draws from the same logits, at a position of its own.
  std::vector<int32_t> identity(static_cast<size_t>(num_draws));
  std::iota(identity.begin(), identity.end(), 0);
  std::vector<int32_t> drawn(identity.size(), -99);
  draw(ctx, {.num_rows = &num_draws,
             .max_rows = num_draws,
             .logits = logits.data(),
             .logits_stride = 0,
             .vocab_limit = kVocab,
             .row_index = identity.data(),
             .seq_slot = slots.data(),
             .positions = identity.data(),
             .seeds = &seed,
             .temperatures = arrays.temperature.data(),
             .tokens = drawn.data()});
  return drawn;
}

void add_counts(const std::vector<int32_t>& drawn, std::vector<int64_t>& counts) {
  for (const int32_t token : drawn) ++counts.at(static_cast<size_t>(token));
}

std::vector<float> random_logits(uint64_t seed, float spread) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> logits(kVocab);
  for (float& logit : logits) logit = normal(engine);
  return logits;
}

struct Distribution {
  const char* name;
  Sampling sampling;
  std::vector<int32_t> tokens = {0};
};

std::vector<Distribution> distributions() {
  const std::vector<int32_t> tokens = {3, 9, 9, 17, 60, 9, 17, 5, 5, 5};
  const auto penalised = [](Sampling s) {
    s.bias = {{1, 1.5f}, {9, -0.5f}, {40, 0.75f}};
    s.repetition_penalty = 1.3f;
    s.presence_penalty = 0.4f;
    s.frequency_penalty = 0.2f;
    s.bad_words = {{7}, {5, 5, 8}, {17, 5, 11}};
    s.prompt_len = 4;
    return s;
  };
  return {{"plain", {}},
          {"top_k", {.top_k = 12}},
          {"top_p", {.top_p = 0.85f}},
          {"min_p", {.min_p = 0.1f}},
          {"all", {.top_k = 30, .top_p = 0.93f, .min_p = 0.02f}},
          {"adjusted", penalised({}), tokens},
          {"adjusted_all", penalised({.top_k = 40, .top_p = 0.95f, .min_p = 0.01f}), tokens}};
}

constexpr float kTemperatures[] = {0.7f, 1.0f, 1.5f};

TEST(SamplingDistribution, DrawsFollowTheDistributionAtEverySeed) {
  TRACE_SEED();
  const std::vector<Distribution> all = distributions();
  const double num_tests =
      static_cast<double>(all.size() * std::size(kTemperatures)) * (kNumSeeds + 1);
  for (size_t l = 0; l < all.size(); ++l) {
    for (const float temperature : kTemperatures) {
      Sampling sampling = all[l].sampling;
      sampling.temperature = temperature;
      const std::vector<float> logits = random_logits(base_seed() + l, 2.0f);
      const std::vector<double> distribution =
          reference_distribution(sampling, reference_adjusted(sampling, all[l].tokens, logits));
      std::vector<int64_t> together(kVocab, 0);
      const int32_t num_draws = all[l].name == std::string("plain") ? kManyDraws : kDrawsPerSeed;
      for (int32_t i = 0; i < kNumSeeds; ++i) {
        // Consecutive seeds: the samples of one request.
        std::vector<int64_t> counts(kVocab, 0);
        add_counts(draws(sampling, all[l].tokens, logits, base_seed() + static_cast<uint64_t>(i),
                         num_draws),
                   counts);
        EXPECT_GT(g_test(counts, distribution), kFalseAlarm / num_tests)
            << all[l].name << " at " << temperature << ", seed " << i;
        for (size_t id = 0; id < counts.size(); ++id) together[id] += counts[id];
      }
      EXPECT_GT(g_test(together, distribution), kFalseAlarm / num_tests)
          << all[l].name << " at " << temperature << ", all seeds";
    }
  }
}

// Classes of tokens with about equal probabilities.
constexpr int32_t kClasses = 8;
std::vector<int32_t> classes_of(const std::vector<double>& distribution) {
  std::vector<int32_t> classes(distribution.size());
  double sum = 0;
  for (size_t id = 0; id < distribution.size(); ++id) {
    classes[id] = std::min(static_cast<int32_t>(sum * kClasses), kClasses - 1);
    sum += distribution[id];
  }
  return classes;
}

TEST(SamplingDistribution, DrawsAreIndependent) {
  TRACE_SEED();
  const std::vector<float> logits = random_logits(base_seed() + 77, 1.0f);
  for (const float temperature : kTemperatures) {
    const Sampling sampling = {.temperature = temperature};
    const std::vector<double> distribution = reference_distribution(sampling, logits);
    const std::vector<int32_t> classes = classes_of(distribution);
    std::vector<double> class_distribution(kClasses, 0.0);
    for (size_t id = 0; id < distribution.size(); ++id)
      class_distribution[static_cast<size_t>(classes[id])] += distribution[id];
    std::vector<double> pair_law;
    for (const double a : class_distribution) {
      for (const double b : class_distribution) pair_law.push_back(a * b);
    }
    std::vector<std::vector<int32_t>> of_seed;
    for (uint64_t i = 0; i < kNumSeeds; ++i) {
      of_seed.push_back(draws(sampling, {0}, logits, base_seed() + i, kDrawsPerSeed));
    }
    // Draws of a seed and of another (or the same), `lag` positions further on; no draw of either
    // is in two pairs.
    const auto expect_independent = [&](size_t seed, size_t other, int32_t lag, double num_tests) {
      std::vector<int64_t> counts(kClasses * kClasses, 0);
      const int32_t block = std::max(lag, 1);
      for (int32_t first = 0; first + lag < kDrawsPerSeed; ++first) {
        if (seed == other && first / block % 2 == 1) continue;
        const auto class_at = [&](size_t of, int32_t at) {
          return classes[static_cast<size_t>(of_seed[of][static_cast<size_t>(at)])];
        };
        ++counts[static_cast<size_t>(class_at(seed, first) * kClasses +
                                     class_at(other, first + lag))];
      }
      EXPECT_GT(g_test(counts, pair_law), kFalseAlarm / num_tests)
          << "seeds " << seed << " and " << other << ", lag " << lag << ", at " << temperature;
    };
    constexpr int32_t kLags[] = {1, 2, 4, 64};
    constexpr double kNumTests = std::size(kTemperatures) * kNumSeeds * (std::size(kLags) + 3);
    for (size_t seed = 0; seed < kNumSeeds; ++seed) {
      for (const int32_t lag : kLags) expect_independent(seed, seed, lag, kNumTests);
      const size_t next = (seed + 1) % kNumSeeds;
      expect_independent(seed, next, 0, kNumTests);
      expect_independent(seed, next, 1, kNumTests);
      expect_independent(next, seed, 1, kNumTests);
    }
  }
}

}  // namespace
}  // namespace paceline::testing
