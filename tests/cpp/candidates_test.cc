// SPDX-License-Identifier: Apache-2.0
// The CPU ops of drafts that are chosen from candidates: score_pairs, follow_candidates and
// walk_candidates.

#include "ops/candidates.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/error.h>

#include "base/philox.h"
#include "device/cpu_context.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

constexpr int32_t kVocab = 90;
constexpr int32_t kDrafts = 4;

size_t at(int64_t index) { return static_cast<size_t>(index); }

// The candidates of some sequences, and what scores them.
struct Lists {
  int32_t count;
  int32_t rank;
  int32_t num_seqs;
  std::vector<int32_t> ids, newest;
  std::vector<float> logits, projected, predecessors, successors;

  [[nodiscard]] int64_t row(int32_t draft, int32_t seq) const {
    return int64_t{draft} * num_seqs + seq;
  }
  [[nodiscard]] std::vector<float> scores(int num_threads) {
    std::vector<float> scores(at(int64_t{kDrafts} * num_seqs * count * count), -77.0f);
    CpuContext ctx = context_of(num_threads);
    score_pairs(ctx, {.num_seqs = &num_seqs,
                      .max_seqs = num_seqs,
                      .num_drafts = kDrafts,
                      .lists = {.ids = ids.data(),
                                .logits = logits.data(),
                                .scores = scores.data(),
                                .count = count},
                      .newest = newest.data(),
                      .projected = projected.data(),
                      .predecessors = predecessors.data(),
                      .successors = successors.data(),
                      .vocab_size = kVocab,
                      .rank = rank});
    return scores;
  }
};

Lists random_lists(int32_t count, int32_t rank, int32_t num_seqs, uint64_t salt) {
  Random random(salt);
  Lists lists{.count = count,
              .rank = rank,
              .num_seqs = num_seqs,
              .ids = {},
              .newest = {},
              .logits = {},
              .projected = {},
              .predecessors = {},
              .successors = {}};
  for (int32_t row = 0; row < kDrafts * num_seqs; ++row) {
    std::vector<int32_t> tokens(at(kVocab));
    for (int32_t t = 0; t < kVocab; ++t) tokens[at(t)] = t;
    for (int32_t t = kVocab - 1; t > 0; --t)
      std::swap(tokens[at(t)], tokens[at(random.below(t + 1))]);
    tokens.resize(at(count));
    std::sort(tokens.begin(), tokens.end());
    const int32_t num = random.one_in(4) ? random.below(count + 1) : count;
    for (int32_t c = 0; c < count; ++c) {
      lists.ids.push_back(c < num ? tokens[at(c)] : -1);
      lists.logits.push_back(c < num ? random.normal() : -kInf);
    }
  }
  for (int32_t i = 0; i < num_seqs; ++i) lists.newest.push_back(random.below(kVocab + 2) - 1);
  lists.projected = random.normals(int64_t{kDrafts} * num_seqs * rank);
  lists.predecessors = random.normals(int64_t{kVocab} * rank, 0.3f);
  lists.successors = random.normals(int64_t{kVocab} * rank, 0.3f);
  return lists;
}

TEST(ScorePairs, MatchesTheEquation) {
  TRACE_SEED();
  for (const auto& [count, rank] : {std::pair{16, 256}, {1, 1}, {4, 5}, {32, 37}}) {
    Lists lists = random_lists(count, rank, 5, 81);
    const std::vector<float> got = lists.scores(/*num_threads=*/2);
    for (int32_t j = 0; j < kDrafts; ++j) {
      for (int32_t i = 0; i < lists.num_seqs; ++i) {
        const int64_t row = lists.row(j, i);
        for (int32_t a = 0; a < count; ++a) {
          for (int32_t c = 0; c < count; ++c) {
            const float score = got[at((row * count + a) * count + c)];
            if (j == 0 && a > 0) {
              ASSERT_EQ(score, -77.0f);
              continue;
            }
            const int32_t before =
                j == 0 ? lists.newest[at(i)] : lists.ids[at(lists.row(j - 1, i) * count + a)];
            const int32_t token = lists.ids[at(row * count + c)];
            double want = lists.logits[at(row * count + c)];
            const bool has_both = before >= 0 && before < kVocab && token >= 0;
            for (int32_t r = 0; r < rank && has_both; ++r) {
              want += double{lists.predecessors[at(int64_t{before} * rank + r)]} *
                      lists.projected[at(row * rank + r)] *
                      lists.successors[at(int64_t{token} * rank + r)];
            }
            if (std::isinf(want)) {
              ASSERT_EQ(score, -kInf);
            } else {
              ASSERT_TRUE(is_near(score, want, 1e-4, 1e-5)) << count << ": " << j << ", " << i;
            }
          }
        }
      }
    }
  }
}

TEST(ScorePairs, SequencesAreInvariant) {
  TRACE_SEED();
  Lists all = random_lists(16, 100, 6, 82);
  const std::vector<float> together = all.scores(/*num_threads=*/2);
  const auto of = [&](const auto& values, int32_t seq, int64_t width) {
    auto own = values;
    own.clear();
    for (int32_t j = 0; j < kDrafts; ++j) {
      const auto first = values.begin() + all.row(j, seq) * width;
      own.insert(own.end(), first, first + width);
    }
    return own;
  };
  for (int32_t seq = 0; seq < all.num_seqs; ++seq) {
    Lists alone = all;
    alone.num_seqs = 1;
    alone.ids = of(all.ids, seq, all.count);
    alone.logits = of(all.logits, seq, all.count);
    alone.projected = of(all.projected, seq, all.rank);
    alone.newest = {all.newest[at(seq)]};
    EXPECT_EQ(alone.scores(/*num_threads=*/1), of(together, seq, int64_t{all.count} * all.count));
  }
}

TEST(ScorePairs, WrongSizesAreErrors) {
  EXPECT_THROW(static_cast<void>(random_lists(33, 4, 1, 83).scores(1)), InternalError);
  EXPECT_THROW(static_cast<void>(random_lists(4, 1025, 1, 83).scores(1)), InternalError);
}

// A walk over scores of a few integers, so that candidates tie.
struct Walk {
  int32_t count;
  int32_t num_seqs;
  std::vector<int32_t> ids;
  std::vector<float> scores;
  std::vector<int32_t> row_index, seq_slot, positions;
  std::vector<uint64_t> seeds;
  std::vector<float> temperatures;

  [[nodiscard]] std::vector<int32_t> tokens() {
    std::vector<int32_t> tokens(at(kDrafts * num_seqs), -77);
    std::vector<float> followed(at(num_seqs * count));
    WalkCandidatesParams p{
        .num_seqs = &num_seqs,
        .max_seqs = num_seqs,
        .num_drafts = kDrafts,
        .lists = {.ids = ids.data(), .logits = nullptr, .scores = scores.data(), .count = count},
        .followed = followed.data(),
        .draw = {}};
    p.draw.row_index = row_index.data();
    p.draw.seq_slot = seq_slot.data();
    p.draw.positions = positions.data();
    p.draw.seeds = seeds.data();
    p.draw.temperatures = temperatures.data();
    p.draw.tokens = tokens.data();
    p.draw.token_limit = kVocab - 5;
    CpuContext ctx = context_of(1);
    walk_candidates(ctx, p);
    return tokens;
  }
};

double noise_of(uint64_t seed, int32_t position, int32_t token) {
  const NoiseKey key{.seed = seed,
                     .stream = NoiseStream::kTarget,
                     .position = static_cast<uint32_t>(position),
                     .salt = 0};
  const uint32_t bits =
      philox(key, static_cast<uint32_t>(token) / 4)[static_cast<size_t>(token % 4)];
  return -std::log(-std::log1p(-static_cast<double>(uniform_open(bits))));
}

TEST(WalkCandidates, FollowsWhatItDrawsWithTheNoiseOfTokens) {
  TRACE_SEED();
  for (const int32_t count : {1, 3, 16, 32}) {
    const Lists lists = random_lists(count, 1, 12, 84);
    Random random(85);
    Walk walk{.count = count,
              .num_seqs = 12,
              .ids = lists.ids,
              .scores = {},
              .row_index = {},
              .seq_slot = {},
              .positions = {},
              .seeds = {},
              .temperatures = {}};
    for (int64_t i = 0; i < int64_t{kDrafts} * 12 * count * count; ++i) {
      const bool is_none = lists.ids[at(i / count / count * count + i % count)] < 0;
      walk.scores.push_back(is_none ? -kInf : std::round(2 * random.normal()));
    }
    for (int32_t i = 0; i < 12; ++i) {
      walk.seeds.push_back(static_cast<uint64_t>(random.below(1 << 30)));
      walk.temperatures.push_back(i % 3 == 0 ? 0.0f : 0.3f * static_cast<float>(i % 3));
      for (int32_t j = 0; j < kDrafts; ++j) {
        walk.seq_slot.push_back(i == 7 && j > 1 ? -1 : 11 - i);
        walk.positions.push_back(100 * i + j);
      }
    }
    for (int32_t j = 0; j < kDrafts; ++j) {
      for (int32_t i = 0; i < 12; ++i) walk.row_index.push_back(i * kDrafts + j);
    }
    const std::vector<int32_t> got = walk.tokens();
    for (int32_t i = 0; i < 12; ++i) {
      int32_t from = 0;
      for (int32_t j = 0; j < kDrafts; ++j) {
        const int64_t row = int64_t{j} * 12 + i;
        const int32_t* const ids = walk.ids.data() + row * count;
        int32_t want = -2;
        if (i == 7 && j > 1) {
          want = -1;
        } else {
          double best = -HUGE_VAL;
          const float temperature = walk.temperatures[at(11 - i)];
          for (int32_t c = 0; c < count; ++c) {
            if (ids[c] < 0 || ids[c] >= kVocab - 5) continue;
            double key = walk.scores[at((row * count + from) * count + c)];
            if (temperature > 0) {
              key = key / temperature + noise_of(walk.seeds[at(11 - i)], 100 * i + j + 1, ids[c]);
            }
            // Of equal keys the one with the lower token, which comes first.
            if (key > best) {
              best = key;
              want = ids[c];
            }
          }
        }
        ASSERT_EQ(got[at(row)], want) << count << ": draft " << j << " of sequence " << i;
        const int32_t* const found = std::find(ids, ids + count, want);
        from = found < ids + count ? static_cast<int32_t>(found - ids) : 0;
      }
    }
  }
}

TEST(WalkCandidates, AsksForNoOtherDraw) {
  std::vector<float> probabilities(8);
  WalkCandidatesParams p{};
  p.lists.count = 4;
  p.draw.probabilities = probabilities.data();
  EXPECT_THROW(check_walk(p), InternalError);
}

}  // namespace
}  // namespace paceline::testing
