// SPDX-License-Identifier: Apache-2.0
// The ops of `standard` and `block` acceptance against references in double precision.

#include "sample/reject.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "support/jobs.h"
#include "support/rejection_rig.h"
#include "support/seed.h"
#include "wire/batch_shape.h"
#include "wire/sequence_result.h"

namespace paceline::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kStandard = AcceptMethod::kStandard;
constexpr auto kBlock = AcceptMethod::kBlock;

using Tokens = std::vector<int32_t>;

std::vector<float> random_logits(std::mt19937_64& random, int32_t count, float spread) {
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> logits(static_cast<size_t>(count));
  for (float& logit : logits) logit = normal(random);
  return logits;
}

// --- select_proposals ----------------------------------------------------------------------------

TEST(SelectProposals, AreTheHighestInOrder) {
  TRACE_SEED();
  std::mt19937_64 random(base_seed());
  const auto below = [&](int32_t n) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(n));
  };
  constexpr int32_t kMaxRows = 5;
  constexpr int32_t kDrafts = 3;
  for (int round = 0; round < 300; ++round) {
    const int32_t vocab = std::array{1, 3, 64, 65, 300, 2000}[static_cast<size_t>(below(6))];
    const int32_t per_draft = std::array{1, 2, 7, 64, 256}[static_cast<size_t>(below(5))];
    const int32_t stride = vocab + below(3);
    const bool is_mapped = below(2) == 0;
    const int64_t map_stride = below(2) == 0 ? stride : 0;
    const int32_t limit =
        2 * vocab - below(vocab);  // some tokens are outside the target's vocabulary
    std::vector<float> logits = random_logits(random, kMaxRows * stride, 2.0f);
    for (float& logit : logits) {
      if (round % 3 == 0) logit = std::round(logit);  // ties, -0 and 0 among them
      const int32_t dice = below(12);
      if (dice == 0) logit = below(2) == 0 ? -kInf : kNan;
      if (dice == 1 && round % 5 == 0) logit = kInf;
    }
    if (round % 7 == 0) std::fill_n(logits.begin(), vocab, -kInf);
    std::vector<int32_t> map(static_cast<size_t>(kMaxRows * stride));
    for (int32_t& token : map) token = below(2 * vocab);
    const std::vector<int32_t> row_index = {8, 6, 4, 2, 0};
    // Row 1 is inert; rows from 4 on are not computed.
    const std::vector<int32_t> seq_slot = {99, 99, 3, 99, 0, 99, -1, 99, 1};
    const int32_t num_rows = 4;
    const int32_t step = below(kDrafts);
    const auto size = static_cast<size_t>(4 * kDrafts * per_draft);
    std::vector<int32_t> ids(size, -77);
    std::vector<float> proposed(size, -77.0f);
    std::vector<int32_t> rows(kMaxRows, -77);
    CpuContext ctx;
    select_proposals(ctx, {.num_rows = &num_rows,
                           .max_rows = kMaxRows,
                           .logits = logits.data(),
                           .logits_stride = stride,
                           .vocab_limit = vocab,
                           .row_index = row_index.data(),
                           .seq_slot = seq_slot.data(),
                           .token_map = is_mapped ? map.data() : nullptr,
                           .token_limit = limit,
                           .token_map_stride = map_stride,
                           .draft_step = step > 0 ? &step : nullptr,
                           .num_draft_tokens = kDrafts,
                           .proposals = {ids.data(), proposed.data(), per_draft},
                           .proposal_rows = rows.data()});
    EXPECT_EQ(rows, (std::vector<int32_t>{kDrafts + step, -1, step, 3 * kDrafts + step, -77}));
    std::vector<bool> is_written(size, false);
    for (const int32_t row : {0, 2, 3}) {
      const float* const of = logits.data() + row * stride;
      const int32_t* const tokens = map.data() + row * map_stride;
      std::vector<int32_t> best;
      for (int32_t id = 0; id < vocab; ++id) {
        if (of[id] > -kInf && (!is_mapped || tokens[id] < limit)) best.push_back(id);
      }
      std::stable_sort(best.begin(), best.end(),
                       [&](int32_t a, int32_t b) { return of[a] > of[b]; });
      best.resize(std::min(best.size(), static_cast<size_t>(per_draft)));
      std::sort(best.begin(), best.end());
      for (int32_t j = 0; j < per_draft; ++j) {
        const auto at = static_cast<size_t>(rows[static_cast<size_t>(row)] * per_draft + j);
        is_written[at] = true;
        if (j >= static_cast<int32_t>(best.size())) {
          ASSERT_EQ(ids[at], -1);
          ASSERT_EQ(proposed[at], -kInf);
          continue;
        }
        const int32_t id = best[static_cast<size_t>(j)];
        ASSERT_EQ(ids[at], is_mapped ? tokens[id] : id) << "round " << round << " place " << j;
        ASSERT_EQ(proposed[at], of[id]);
      }
    }
    for (size_t at = 0; at < size; ++at) {
      if (!is_written[at]) {
        ASSERT_EQ(ids[at], -77);
      }
    }
  }
}

// --- softmax_sums --------------------------------------------------------------------------------

TEST(SoftmaxWeights, OverTheirSumAreTheSoftmax) {
  TRACE_SEED();
  std::mt19937_64 random(base_seed());
  for (int round = 0; round < 200; ++round) {
    const int32_t vocab = round % 2 == 0 ? 100 : 5003;
    const float temperature = std::array{0.05f, 0.7f, 1.0f, 5.0f}[static_cast<size_t>(round % 4)];
    std::vector<float> logits = random_logits(random, vocab, round % 3 == 0 ? 10.0f : 2.0f);
    for (float& logit : logits) {
      if (random() % 10 == 0) logit = random() % 2 == 0 ? -kInf : kNan;
    }
    // Rows: the logits; inert; of temperature 0; with an infinite logit; with none; not computed.
    constexpr int32_t kRows = 6;
    std::vector<float> all;
    for (int32_t row = 0; row < kRows; ++row) all.insert(all.end(), logits.begin(), logits.end());
    all[static_cast<size_t>(3 * vocab)] = kInf;
    std::fill_n(all.begin() + 4 * vocab, vocab, kNan);
    const Tokens row_index = {0, 1, 2, 3, 4, 5};
    const Tokens seq_slot = {1, -1, 0, 1, 1, 1};
    const std::array<float, 2> temperatures = {0.0f, temperature};
    const int32_t num_rows = 5;
    std::vector<float> highest(kRows, -77.0f);
    std::vector<uint64_t> sums(kRows, 77);
    CpuContext ctx;
    softmax_sums(ctx, {.num_rows = &num_rows,
                       .max_rows = kRows,
                       .logits = all.data(),
                       .logits_stride = vocab,
                       .vocab_limit = vocab,
                       .row_index = row_index.data(),
                       .seq_slot = seq_slot.data(),
                       .temperatures = temperatures.data(),
                       .highest = highest.data(),
                       .sums = sums.data()});
    double top = -kInf;
    for (const float logit : logits) top = std::max(top, logit > -kInf ? double{logit} : -kInf);
    double sum = 0;
    for (const float logit : logits) {
      if (logit > -kInf) sum += std::exp((logit - top) / temperature);
    }
    EXPECT_EQ(highest[0], static_cast<float>(top));
    EXPECT_NEAR(static_cast<double>(sums[0]) * 0x1p-40 / sum, 1.0, 1e-6);
    for (size_t row = 1; row < 5; ++row) {
      EXPECT_EQ(highest[row], -kInf) << row;
      EXPECT_EQ(sums[row], 0u) << row;
    }
    EXPECT_EQ(highest[5], -77.0f);
    EXPECT_EQ(sums[5], 77u);
  }
}

// --- reject_drafts -------------------------------------------------------------------------------

// The softmax at temperature T; all on `token` where no logit is finite.
std::vector<double> softmax(const std::vector<float>& logits, double temperature, int32_t token) {
  std::vector<double> distribution(logits.size(), 0.0);
  double highest = -kInf;
  for (const float x : logits) highest = x > highest ? double{x} : highest;
  if (std::isinf(highest)) {
    if (token >= 0) distribution.at(static_cast<size_t>(token)) = 1;
    return distribution;
  }
  double sum = 0;
  for (size_t id = 0; id < distribution.size(); ++id) {
    if (logits[id] > -kInf) distribution[id] = std::exp((logits[id] - highest) / temperature);
    sum += distribution[id];
  }
  for (double& probability : distribution) probability /= sum;
  return distribution;
}

// The drafter's distribution: softmax of its highest logits; among equal ones, the lowest ids.
std::vector<double> proposed_distribution(std::vector<float> logits, int32_t count,
                                          double temperature, int32_t draft) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto rank = [&](size_t id) { return std::isnan(logits[id]) ? -kInf : logits[id]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return rank(a) > rank(b); });
  for (size_t i = static_cast<size_t>(count); i < order.size(); ++i) logits[order[i]] = -kInf;
  return softmax(logits, temperature, draft);
}

double uniform_of(uint64_t seed, int32_t known_len, int32_t index) {
  const auto base = static_cast<uint32_t>(known_len);
  const auto words = philox({.seed = seed,
                             .stream = NoiseStream::kAccept,
                             .position = base + static_cast<uint32_t>(index),
                             .salt = base},
                            0);
  return (words[0] + 0.5) / 4294967296.0;
}

struct Judged {
  int32_t num_accepted;
  double share;
  double margin;  // the least distance of an acceptance test from its threshold
};

// A second implementation, from the papers.
Judged judge_by_reference(AcceptMethod method, const std::vector<std::vector<double>>& p,
                          const std::vector<std::vector<double>>& q, const Tokens& drafts,
                          const std::function<double(int32_t)>& uniform) {
  const auto n = static_cast<int32_t>(drafts.size());
  Judged judged = {0, 1.0, 1.0};
  const auto at = [](const std::vector<double>& distribution, int32_t token) {
    return token < 0 || token >= static_cast<int32_t>(distribution.size())
               ? 0.0
               : distribution[static_cast<size_t>(token)];
  };
  const auto try_one = [&](int32_t i, double probability) {
    judged.margin = std::min(judged.margin, std::fabs(uniform(i) - probability));
    return uniform(i) < probability;
  };
  if (method == kStandard) {
    for (int32_t i = 0; i < n; ++i) {
      const auto s = static_cast<size_t>(i);
      if (!try_one(i, std::min(at(p[s], drafts[s]) / at(q[s], drafts[s]), 1.0))) break;
      judged.num_accepted = i + 1;
    }
    return judged;
  }
  double share = 1;
  for (int32_t i = 0; i < n; ++i) {
    const auto s = static_cast<size_t>(i);
    share = std::min(share * at(p[s], drafts[s]) / at(q[s], drafts[s]), 1.0);
    double probability = share;
    if (i + 1 < n) {
      // The residual includes probability that no token has: all of it where no logit is finite.
      double left = share;
      for (size_t id = 0; id < p[s + 1].size(); ++id) {
        left -= std::min(share * p[s + 1][id], q[s + 1][id]);
      }
      probability = share >= 1 ? 1 : left / (left + 1 - share);
    }
    if (try_one(i, probability)) {
      judged.num_accepted = i + 1;
      judged.share = share;
    }
  }
  return judged;
}

TEST(RejectDrafts, FollowsTheReference) {
  TRACE_SEED();
  constexpr int32_t kVocab = 40;
  constexpr int32_t kSeqs = 200;
  std::mt19937_64 random(base_seed());
  int32_t num_close = 0;
  std::array<int32_t, 5> num_of_accepted = {};
  for (const AcceptMethod method : {kStandard, kBlock}) {
    for (const int32_t proposals : {0, 1, 5, 64}) {  // 0: greedy drafts
      for (const float temperature : {0.3f, 1.0f, 2.0f}) {
        constexpr int32_t kDrafts = 4;
        RejectionRig rig({.num_seqs = kSeqs,
                          .vocab_size = kVocab,
                          .num_drafts = kDrafts,
                          .method = method,
                          .samples_drafts = proposals > 0,
                          .num_proposals = proposals,
                          .temperature = temperature},
                         random(), /*first_len=*/3, /*len_step=*/7);
        // Drafters close to their target, and -inf, infinities and rows without a finite logit.
        std::vector<std::vector<float>> targets;
        std::vector<std::vector<float>> drafters;
        for (int32_t row = 0; row < kSeqs * (kDrafts + 1); ++row) {
          targets.push_back(random_logits(random, kVocab, 2.0f));
          drafters.push_back(targets.back());
          for (float& x : drafters.back()) x += 0.5f * std::normal_distribution<float>()(random);
          for (float& x : targets.back()) {
            if (random() % 4 == 0) x = random() % 2 == 0 ? -kInf : kNan;
          }
          if (row % 23 == 0) targets.back()[random() % kVocab] = kInf;
          if (row % 31 == 0) std::fill(targets.back().begin(), targets.back().end(), kNan);
          if (row % 29 == 0) drafters.back()[random() % kVocab] = kInf;
          if (row % 37 == 0) std::fill(drafters.back().begin(), drafters.back().end(), -kInf);
        }
        const auto row_of = [&](int32_t i, size_t at) {
          return static_cast<size_t>(i * (kDrafts + 1)) + at;
        };
        rig.draft([&](int32_t i, const Tokens& drafts) -> const auto& {
          return drafters[row_of(i, drafts.size())];
        });
        for (int32_t i = 0; i < kSeqs; ++i) {
          rig.s.draft_len[i] = i % (kDrafts + 1);
          if (i % 11 == 3) rig.s.is_active[i] = 0;
          if (i % 13 == 5) rig.in.kind[i] = static_cast<int32_t>(RowKind::kPrefillFinal);
          if (i % 7 == 2) rig.s.temperature[i] = 0;
        }
        rig.draw_targets([&](int32_t i, const Tokens& drafts) -> const auto& {
          return targets[row_of(i, drafts.size())];
        });
        const Tokens targets_drawn(rig.target_tokens, rig.target_tokens + kSeqs * (kDrafts + 1));
        rig.judge();
        for (int32_t i = 0; i < kSeqs; ++i) {
          SCOPED_TRACE(::testing::Message() << "sequence " << i << ", proposals " << proposals);
          const int32_t* const draws = targets_drawn.data() + i * (kDrafts + 1);
          const bool is_judged = i % 11 != 3 && i % 13 != 5;
          const Tokens drafts =
              rig.drafts(i, is_judged ? rig.num_drafts[static_cast<size_t>(i)] : 0);
          const int32_t num_accepted = rig.buffers.num_accepted[i];
          if (i % 7 == 2) {
            int32_t equal = 0;
            while (equal < static_cast<int32_t>(drafts.size()) &&
                   draws[equal] == drafts[static_cast<size_t>(equal)]) {
              ++equal;
            }
            EXPECT_EQ(num_accepted, equal);
            EXPECT_EQ(rig.buffers.residual_rows[i], -1);
            continue;
          }
          if (drafts.empty()) {
            EXPECT_EQ(num_accepted, 0);
            EXPECT_EQ(rig.buffers.residual_rows[i], -1);
            EXPECT_EQ(rig.buffers.recovered_tokens[i], -1);
            continue;
          }
          std::vector<std::vector<double>> p;
          std::vector<std::vector<double>> q;
          for (size_t at = 0; at < drafts.size(); ++at) {
            p.push_back(softmax(targets[row_of(i, at)], temperature, draws[at]));
            if (proposals > 0) {
              q.push_back(proposed_distribution(drafters[row_of(i, at)], proposals, temperature,
                                                drafts[at]));
            } else {
              const std::vector<float>& of = drafters[row_of(i, at)];
              const auto likeliest = std::ranges::max_element(of);  // the first of equal ones
              ASSERT_EQ(drafts[at], *likeliest > -kInf ? likeliest - of.begin() : -2);
              q.emplace_back(kVocab, 0.0);
              if (drafts[at] >= 0) q.back()[static_cast<size_t>(drafts[at])] = 1;
            }
          }
          const Judged judged = judge_by_reference(method, p, q, drafts, [&](int32_t at) {
            return uniform_of(rig.s.seed[i], rig.known_len(i), at);
          });
          if (judged.margin < 1e-6) {  // rounding may decide
            ++num_close;
            continue;
          }
          ASSERT_EQ(num_accepted, judged.num_accepted);
          ++num_of_accepted[static_cast<size_t>(num_accepted)];
          const auto at = static_cast<size_t>(num_accepted);
          const bool is_certain =
              at < p.size() &&
              std::ranges::none_of(
                  targets[row_of(i, at)], [](float x) { return x > -kInf && x < kInf; });
          const bool is_infinite =
              at < p.size() &&
              std::ranges::find(targets[row_of(i, at)], kInf) != targets[row_of(i, at)].end();
          if (at == p.size() || is_certain || is_infinite) {
            EXPECT_EQ(rig.buffers.residual_rows[i], -1);
            continue;
          }
          ASSERT_EQ(rig.buffers.residual_rows[i], i * (kDrafts + 1) + num_accepted);
          ASSERT_EQ(rig.buffers.residual_pass_rows[i], i * (kDrafts + 1) + num_accepted);
          double sum = 0;
          std::vector<double> left(kVocab);
          for (size_t id = 0; id < left.size(); ++id) {
            left[id] = std::max(judged.share * p[at][id] - q[at][id], 0.0);
            sum += left[id];
          }
          ASSERT_GT(sum, 1e-6);
          const float* const row =
              rig.logits.data() + int64_t{kVocab} * (i * (kDrafts + 1) + num_accepted);
          const std::vector<double> distribution =
              softmax({row, row + kVocab}, temperature, /*token=*/-1);
          for (size_t id = 0; id < left.size(); ++id) {
            ASSERT_NEAR(distribution[id], left[id] / sum, 1e-6 + 1e-6 / sum) << "token " << id;
          }
          const int32_t token = rig.buffers.recovered_tokens[i];
          ASSERT_GE(token, 0);
          ASSERT_GT(left[static_cast<size_t>(token)], 0);
        }
      }
    }
  }
  EXPECT_LT(num_close, 10);
  for (const int32_t count : num_of_accepted) EXPECT_GT(count, 15);
}

// Draws depend on their stream and salt.
TEST(RejectDrafts, TheDrawsHaveTheirOwnStreams) {
  constexpr int32_t kVocab = 300;
  const std::vector<float> flat(kVocab, 0.0f);
  RejectionRig rig({.num_seqs = 30, .vocab_size = kVocab, .num_drafts = 2, .num_proposals = 256},
                   /*seed=*/5, /*first_len=*/6, /*len_step=*/1);
  // The drafter proposes the first 256 tokens, which the target excludes.
  std::vector<float> target(kVocab, -kInf);
  std::fill(target.begin() + 256, target.end(), 0.0f);
  rig.run([&](int32_t, const Tokens&) -> const auto& { return flat; },
          [&](int32_t, const Tokens&) -> const auto& { return target; });
  for (int32_t i = 0; i < 30; ++i) {
    const auto base = static_cast<uint32_t>(rig.known_len(i));
    const auto among = [&](NoiseStream stream, uint32_t position, uint32_t salt, int32_t low,
                           int32_t high) {
      double best = -kInf;
      int32_t drawn = -1;
      for (int32_t id = low; id < high; ++id) {
        const auto words = philox({.seed = 5, .stream = stream, .position = position, .salt = salt},
                                  static_cast<uint32_t>(id) / 4);
        const double u = uniform_open(words[static_cast<size_t>(id % 4)]);
        const double key = -std::log(-std::log1p(-u));
        if (key > best) {
          best = key;
          drawn = id;
        }
      }
      return drawn;
    };
    EXPECT_EQ(rig.drafts(i, 2), (Tokens{among(NoiseStream::kDraft, base, base, 0, 256),
                                        among(NoiseStream::kDraft, base + 1, base, 0, 256)}));
    EXPECT_EQ(rig.target_tokens[3 * i], among(NoiseStream::kTarget, base, 0, 256, kVocab));
    EXPECT_EQ(rig.emitted(i), (Tokens{among(NoiseStream::kResidual, base, base, 256, kVocab)}));
  }
}

// --- accept --------------------------------------------------------------------------------------

TEST(RejectDrafts, AcceptTakesDraftsAndTheRecoveredToken) {
  struct Case {
    int32_t num_accepted, recovered_token, limit, stop;
    Tokens emitted;
    int32_t accepted, discarded;
    SequenceOutcome outcome;
  };
  constexpr auto kRunning = SequenceOutcome::kRunning;
  for (const Case& c :
       {Case{0, 30, 100, -1, {30}, 0, 0, kRunning},
        Case{2, 30, 100, -1, {7, 8, 30}, 2, 0, kRunning},
        Case{3, -1, 100, -1, {7, 8, 9, 13}, 3, 0, kRunning},
        Case{1, -2, 100, -1, {7, 11}, 1, 0, kRunning},  // no residual: the target's own draw
        Case{2, 30, 100, 8, {7, 8}, 2, 1, SequenceOutcome::kStop},
        Case{2, 30, 100, 30, {7, 8, 30}, 2, 0, SequenceOutcome::kStop},
        Case{3, -1, 8, -1, {7, 8, 9}, 3, 0, SequenceOutcome::kLength}}) {
    RejectionRig rig({.num_seqs = 1, .vocab_size = 40, .num_drafts = 3}, 1, /*first_len=*/5, 9);
    rig.s.limit[0] = c.limit;
    rig.s.stop_ids[0] = c.stop;
    rig.s.num_stop_ids[0] = c.stop < 0 ? 0 : 1;
    std::iota(rig.s.draft_tokens, rig.s.draft_tokens + 3, 7);
    std::iota(rig.target_tokens, rig.target_tokens + 4, 10);
    accept(rig.ctx, {.inputs = rig.in,
                     .sequences = rig.s,
                     .target_tokens = rig.target_tokens,
                     .results = rig.results.data(),
                     .max_seqs = 1,
                     .method = kStandard,
                     .num_accepted = &c.num_accepted,
                     .recovered_tokens = &c.recovered_token,
                     .synthetic_rate = {}});
    EXPECT_EQ(rig.emitted(0), c.emitted);
    EXPECT_EQ(rig.results[0].accepted_len, c.accepted);
    EXPECT_EQ(rig.results[0].discarded_len, c.discarded);
    EXPECT_EQ(rig.results[0].outcome, c.outcome);
  }
}

}  // namespace
}  // namespace paceline::testing
