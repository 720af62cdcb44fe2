// SPDX-License-Identifier: Apache-2.0
//
// Logprobs on literal cases and against a reference in double precision. PACELINE_SEED overrides
// the seed of random cases; failures print it.

#include "sample/logprobs.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "support/jobs.h"
#include "support/sampling_arrays.h"
#include "wire/sequence_result.h"

namespace paceline::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

using Logits = std::vector<float>;
using Entries = std::vector<TokenLogprob>;

CpuContext context_of(int num_threads) {
  static ThreadPool threads(3);
  return {.num_threads = num_threads, .threads = num_threads > 1 ? &threads : nullptr};
}

struct Reference {
  std::vector<double> logprobs;
  std::vector<int32_t> order;  // ids, the most probable first
  std::vector<int32_t> ranks;
};

Reference reference_of(const Logits& logits) {
  std::vector<double> x(logits.begin(), logits.end());
  for (double& value : x) value = std::isnan(value) ? -INFINITY : value;
  const double highest = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double value : x) sum += value == highest ? 1 : std::exp(value - highest);
  Reference reference;
  for (const double value : x) {
    const double distance = value == highest ? 0 : value - highest;
    reference.logprobs.push_back(highest == -INFINITY ? double{kNan} : distance - std::log(sum));
    reference.ranks.push_back(
        1 + static_cast<int32_t>(
                std::count_if(x.begin(), x.end(), [&](double other) { return other > value; })));
  }
  reference.order.resize(x.size());
  std::iota(reference.order.begin(), reference.order.end(), 0);
  std::stable_sort(reference.order.begin(), reference.order.end(), [&](int32_t a, int32_t b) {
    return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
  });
  return reference;
}

void expect_entry(const TokenLogprob& entry, int32_t token, const Reference& reference) {
  const double want = reference.logprobs.at(static_cast<size_t>(token));
  EXPECT_EQ(entry.token, token);
  EXPECT_EQ(entry.rank, reference.ranks.at(static_cast<size_t>(token))) << "of token " << token;
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(entry.logprob)) << entry.logprob;
  } else if (std::isinf(want)) {
    EXPECT_EQ(entry.logprob, want);
  } else {
    // One rounding to float32, and the errors of the weights and their sum.
    EXPECT_NEAR(entry.logprob, want, 6e-8 * std::fabs(want) + 3e-7) << "of token " << token;
  }
}

// The logprobs of one row of logits.
Entries rate(const Logits& logits, int32_t token, int32_t num_best) {
  const auto vocab = static_cast<int32_t>(logits.size());
  SamplingArrays arrays(1, vocab);
  arrays.num_prompt_logprobs[0] = num_best;
  int32_t zero = 0;
  Entries entries(static_cast<size_t>(1 + num_best), TokenLogprob{-7, -7, -7});
  CpuContext ctx = context_of(1);
  IterationCounts counts = {.num_all_logit_rows = 1};
  token_logprobs(ctx, {.inputs = {.counts = &counts, .logit_rows = &zero, .prompt_targets = &token},
                       .seq_slot = &zero,
                       .logits = logits.data(),
                       .logits_stride = vocab,
                       .max_prompt_rows = 1,
                       .max_logprobs = num_best,
                       .sampling = arrays.state(),
                       .logprobs = entries.data()});
  return entries;
}

TEST(TokenLogprobs, AreOfTheSoftmax) {
  const Logits logits = {std::log(1.0f), std::log(5.0f), std::log(4.0f)};
  const Entries entries = rate(logits, 2, 3);
  EXPECT_NEAR(entries[0].logprob, std::log(0.4), 1e-6);
  EXPECT_EQ(entries[0].rank, 2);
  EXPECT_EQ(entries[1].token, 1);
  EXPECT_NEAR(entries[1].logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(entries[3].token, 0);
  EXPECT_NEAR(entries[3].logprob, std::log(0.1), 1e-6);
  EXPECT_EQ(entries[3].rank, 3);
}

TEST(TokenLogprobs, EqualsShareARankAndComeByTheirIds) {
  const Entries entries = rate({1, 3, -0.0f, 3, 0, 3}, 4, 6);
  const int32_t tokens[] = {4, 1, 3, 5, 0, 2, 4};
  const int32_t ranks[] = {5, 1, 1, 1, 4, 5, 5};
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(entries[i].token, tokens[i]) << i;
    EXPECT_EQ(entries[i].rank, ranks[i]) << i;
  }
}

TEST(TokenLogprobs, WithZeroTopTokensThereIsTheTokenAlone) {
  const Entries entries = rate({1, 2, 3}, 0, 0);
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].rank, 3);
}

TEST(TokenLogprobs, MoreThanThereAreTokensLeavesTheRestAlone) {
  const Entries entries = rate({1, 2}, 0, 4);
  EXPECT_EQ(entries[2].token, 0);
  EXPECT_EQ(entries[3].token, -7);
  EXPECT_EQ(entries[4].rank, -7);
}

TEST(TokenLogprobs, NanIsMinusInfinity) {
  const Logits logits = {kNan, 1, -kInf, 1, -kNan};
  const Reference reference = reference_of(logits);
  for (int32_t token = 0; token < 5; ++token) {
    const Entries entries = rate(logits, token, 5);
    expect_entry(entries[0], token, reference);
    for (size_t i = 0; i < 5; ++i) expect_entry(entries[1 + i], reference.order[i], reference);
  }
  EXPECT_EQ(rate(logits, 0, 0)[0].logprob, -kInf);
}

TEST(TokenLogprobs, InfiniteLogitsShareAllProbability) {
  const Entries entries = rate({kInf, 1, kInf, kNan}, 1, 3);
  EXPECT_EQ(entries[0].logprob, -kInf);
  EXPECT_EQ(entries[0].rank, 3);
  EXPECT_NEAR(entries[1].logprob, std::log(0.5), 1e-6);
  EXPECT_NEAR(entries[2].logprob, std::log(0.5), 1e-6);
}

TEST(TokenLogprobs, ARowWithoutLogitsHasNoProbabilities) {
  const Entries entries = rate({kNan, -kInf, kNan}, 2, 2);
  for (const TokenLogprob& entry : entries) EXPECT_TRUE(std::isnan(entry.logprob));
  EXPECT_EQ(entries[0].rank, 1);
  EXPECT_EQ(entries[1].token, 0);
  EXPECT_EQ(entries[2].token, 1);
}

// A batch with windows of every length, prompts behind them, sequences without logprobs, and some
// whose raw logits were saved; every row against the reference.
TEST(TokenLogprobs, MatchTheReferenceWhateverTheBatch) {
  const uint64_t seed = seed_from_env(1);
  SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](int32_t n) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(n));
  };
  std::normal_distribution<float> normal;
  constexpr int32_t kMost = 12;
  constexpr TokenLogprob kUntouched = {-7, -7, -7};
  for (int round = 0; round < 60; ++round) {
    const int32_t vocab = 1 + below(round % 10 == 0 ? 5000 : 300);
    const int64_t stride = vocab + below(3);
    int32_t num_seqs = below(6);
    const int32_t max_seqs = num_seqs + below(3);
    constexpr int32_t kWindowRows = 4;
    SamplingArrays arrays(max_seqs + 2, vocab);
    std::vector<SequenceResult> results(static_cast<size_t>(max_seqs) + 1);
    std::vector<int32_t> seq_slot(static_cast<size_t>(max_seqs) + 1, 0);
    std::vector<int32_t> indptr(static_cast<size_t>(max_seqs) + 2, 0);
    for (int32_t i = 0; i < num_seqs; ++i) {
      const auto at = static_cast<size_t>(i);
      seq_slot[at] = num_seqs - i;
      const auto slot = static_cast<size_t>(seq_slot[at]);
      arrays.num_logprobs[slot] = below(kMost + 2) - 1;
      arrays.adjusts[slot] = below(2);
      arrays.truncates[slot] = below(2);
      const int32_t num_rows = 1 + below(kWindowRows);
      indptr[at + 1] = indptr[at] + num_rows;
      results[at].emitted_len = below(num_rows + 1);
      for (int32_t& token : results[at].tokens) token = below(vocab);
    }
    int32_t num_logit_rows = indptr[static_cast<size_t>(num_seqs)];
    const int32_t num_prompt_rows = below(4);
    int32_t num_all = num_logit_rows + num_prompt_rows;
    // Prompts of the last sequence slot.
    const auto prompt_slot = static_cast<size_t>(max_seqs) + 1;
    arrays.num_prompt_logprobs[prompt_slot] = below(kMost + 2) - 1;
    std::vector<int32_t> logit_rows(static_cast<size_t>(num_all) + 1);
    std::vector<int32_t> pass_slots(static_cast<size_t>(num_all) + 1,
                                    static_cast<int32_t>(prompt_slot));
    std::iota(logit_rows.rbegin(), logit_rows.rend(), 0);
    std::vector<int32_t> targets(static_cast<size_t>(num_prompt_rows) + 1, 0);
    for (int32_t& token : targets) token = below(vocab);
    const int32_t inert = below(6);
    if (inert < num_prompt_rows) {
      const auto row = static_cast<size_t>(num_logit_rows + inert);
      pass_slots[static_cast<size_t>(logit_rows[row])] = -1;
    }
    const auto make_logits = [&] {
      Logits logits(static_cast<size_t>((num_all + 1) * stride), 0);
      const int32_t kind = below(3);
      for (float& x : logits) {
        x = 4 * normal(random);
        if (kind == 1) x = std::round(x);
        if (kind == 2 && below(9) == 0) x = below(2) == 0 ? kNan : -kInf;
      }
      return logits;
    };
    const Logits logits = make_logits();
    const Logits raw = make_logits();
    Entries entries(static_cast<size_t>(num_all + 1) * (1 + kMost), kUntouched);
    IterationCounts counts = {
        .num_seqs = num_seqs, .num_logit_rows = num_logit_rows, .num_all_logit_rows = num_all};
    const TokenLogprobsParams params = {.inputs = {.counts = &counts,
                                                   .seq_slot = seq_slot.data(),
                                                   .logit_indptr = indptr.data(),
                                                   .logit_rows = logit_rows.data(),
                                                   .prompt_targets = targets.data()},
                                        .results = results.data(),
                                        .seq_slot = pass_slots.data(),
                                        .logits = logits.data(),
                                        .raw_logits = raw.data(),
                                        .logits_stride = stride,
                                        .max_seqs = max_seqs,
                                        .max_window_rows = kWindowRows,
                                        .max_prompt_rows = num_prompt_rows + below(2),
                                        .max_logprobs = kMost,
                                        .sampling = arrays.state(),
                                        .logprobs = entries.data()};
    CpuContext ctx = context_of(1 + below(3));
    token_logprobs(ctx, params);

    std::vector<bool> is_rated(static_cast<size_t>(num_all) + 1, false);
    const auto expect_row = [&](int32_t row, const Logits& of, int32_t token, int32_t wanted) {
      is_rated[static_cast<size_t>(row)] = true;
      const auto begin = of.begin() + row * stride;
      const Reference reference = reference_of(Logits(begin, begin + vocab));
      const TokenLogprob* const got = entries.data() + row * (1 + kMost);
      expect_entry(got[0], token, reference);
      const int32_t num_best = std::min(wanted, vocab);
      for (int32_t i = 0; i < kMost; ++i) {
        if (i < num_best) {
          expect_entry(got[1 + i], reference.order[static_cast<size_t>(i)], reference);
        } else {
          EXPECT_EQ(got[1 + i].token, kUntouched.token);
        }
      }
    };
    for (int32_t i = 0; i < num_seqs; ++i) {
      const auto at = static_cast<size_t>(i);
      const auto slot = static_cast<size_t>(seq_slot[at]);
      if (arrays.num_logprobs[slot] < 0) continue;
      const bool is_changed = arrays.adjusts[slot] != 0 || arrays.truncates[slot] != 0;
      for (int32_t j = 0; j < results[at].emitted_len; ++j) {
        expect_row(indptr[at] + j, is_changed ? raw : logits, results[at].tokens[j],
                   arrays.num_logprobs[slot]);
      }
    }
    for (int32_t i = 0; i < num_prompt_rows; ++i) {
      if (i == inert || arrays.num_prompt_logprobs[prompt_slot] < 0) continue;
      expect_row(num_logit_rows + i, logits, targets[static_cast<size_t>(i)],
                 arrays.num_prompt_logprobs[prompt_slot]);
    }
    for (int32_t row = 0; row <= num_all; ++row) {
      if (is_rated[static_cast<size_t>(row)]) continue;
      for (int32_t i = 0; i <= kMost; ++i) {
        EXPECT_EQ(entries[static_cast<size_t>(row * (1 + kMost) + i)].token, kUntouched.token);
      }
    }
    if (HasFailure()) return;
  }
}

TEST(SaveRawLogits, KeepsTheRowsThatWillChange) {
  constexpr int32_t kVocab = 3;
  constexpr int64_t kStride = 4;
  SamplingArrays arrays(5, kVocab);
  arrays.num_logprobs = {0, 0, 5, -1, 2};
  arrays.adjusts = {0, 1, 0, 1, 0};
  arrays.truncates = {0, 0, 1, 1, 0};
  int32_t num_rows = 6;
  const std::vector<int32_t> row_index = {5, 4, 3, 2, 1, 0, 4};
  const std::vector<int32_t> seq_slot = {-1, 4, 3, 2, 1, 0};
  Logits logits(7 * kStride);
  std::iota(logits.begin(), logits.end(), 1.0f);
  logits[1 * kStride + 1] = kNan;
  Logits raw(7 * kStride, -7);
  CpuContext ctx = context_of(2);
  save_raw_logits(ctx, {.num_rows = &num_rows,
                        .max_rows = 6,
                        .logits = logits.data(),
                        .raw_logits = raw.data(),
                        .logits_stride = kStride,
                        .row_index = row_index.data(),
                        .seq_slot = seq_slot.data(),
                        .sampling = arrays.state()});
  // Sequence slots by row: 0, 1, 2, 3, 4, none, and one that is not computed.
  for (int64_t row = 0; row < 7; ++row) {
    for (int64_t id = 0; id < kStride; ++id) {
      const auto at = static_cast<size_t>(row * kStride + id);
      const bool is_kept = (row == 1 || row == 2) && id < kVocab;
      const float want = is_kept ? logits[at] : -7;
      EXPECT_EQ(std::memcmp(&raw[at], &want, sizeof(float)), 0) << "row " << row << ", id " << id;
    }
  }
}

}  // namespace
}  // namespace paceline::testing
