// SPDX-License-Identifier: Apache-2.0
// The choice of k' with scripted times and acceptances.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "support/scripted_drafts.h"
#include "tuning/draft_chooser.h"

namespace paceline {
namespace {

TEST(DraftChooser, FindsTheLengthWithTheMostTokensASecond) {
  struct Case {
    double acceptance;
    double us_per_draft;  // beside 100
    int32_t best;
  };
  for (const Case& c : {Case{1.0, 10, 3}, Case{0.0, 2, 0}, Case{0.5, 1, 3}, Case{0.5, 30, 1},
                        Case{0.3, 40, 0}, Case{0.7, 50, 1}}) {
    ScriptedDrafts script;
    script.acceptance = [&](int32_t) { return c.acceptance; };
    script.us = [&](int32_t k, int32_t) { return 100 + c.us_per_draft * k; };
    script.run(2000, 4);
    script.clear();
    script.run(2000, 4);
    EXPECT_GE(script.counts[static_cast<size_t>(c.best)], 1900)
        << "acceptance " << c.acceptance << ", " << c.us_per_draft << " us a draft";
  }
}

TEST(DraftChooser, ChoosesForEachNumberOfSequences) {
  ScriptedDrafts script;
  // With many sequences rows cost time.
  script.us = [](int32_t k, int32_t n) { return n < 16 ? 100 + 5 * k : 100 + 2.0 * n * k; };
  for (int round = 0; round < 4; ++round) {
    script.clear();
    script.run(500, 2);
    EXPECT_GE(script.counts[3], round == 0 ? 400 : 470);
    script.clear();
    script.run(500, 64);
    EXPECT_GE(script.counts[0], round == 0 ? 400 : 470);
  }
}

TEST(DraftChooser, ExploresAboutOnePercent) {
  ScriptedDrafts script;
  script.us = [](int32_t k, int32_t) { return 100 + k; };
  script.run(500, 4);
  script.clear();
  script.run(20000, 4);
  EXPECT_GE(script.num_explored, 100);
  EXPECT_LE(script.num_explored, 220);
  // What could not be the best if all drafts were accepted is mostly left alone.
  script.us = [](int32_t k, int32_t) { return k == 3 ? 10 : 100; };
  script.run(2000, 4);
  script.clear();
  script.run(20000, 4);
  EXPECT_LE(script.num_explored, 40);
}

TEST(DraftChooser, NoiseDoesNotFlipTheChoice) {
  ScriptedDrafts script;
  // The best is 10 % better than the next, and single times are off by as much.
  script.acceptance = [](int32_t i) { return i < 2 ? 0.9 : 0.1; };
  script.us = [](int32_t k, int32_t) { return 100 + 22 * k; };
  script.noise = 0.1;
  script.run(1000, 8);
  script.clear();
  script.run(20000, 8);
  EXPECT_GE(script.counts[2], 19000);
  EXPECT_LE(script.num_changes, 100);
}

// Other work on the machine makes all iterations slower for a while.
TEST(DraftChooser, LoadThatComesAndGoesDoesNotFlipTheChoice) {
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8}) {
    ScriptedDrafts script;
    script.random.seed(seed);
    double load = 1;
    script.acceptance = [](int32_t) { return 0.7; };
    script.us = [&](int32_t k, int32_t) { return load * (100 + 80 * k); };
    script.noise = 0.1;
    script.run(500, 16);
    script.clear();
    for (int round = 0; round < 100; ++round) {
      load = 1 + 2 * script.unit();
      script.run(20 + static_cast<int32_t>(300 * script.unit()), 16);
    }
    EXPECT_GE(script.share_of_best(), 0.98) << "seed " << seed;
    EXPECT_LE(script.num_changes, 40) << "seed " << seed;
    if (seed > 1) continue;
    const int64_t others = script.counts[1] + script.counts[2] + script.counts[3];
    EXPECT_LE(others, script.counts[0] / 50);
    EXPECT_LE(script.num_changes, 20);
  }
}

TEST(DraftChooser, FollowsAChangeOfAcceptanceAndOfTimes) {
  for (const int32_t num_seqs : {1, 16}) {
    ScriptedDrafts script;
    double acceptance = 0;
    double us_per_draft = 15;
    script.acceptance = [&](int32_t) { return acceptance; };
    script.us = [&](int32_t k, int32_t) { return 100 + us_per_draft * k; };
    const auto settle = [&](int32_t best) {
      script.run(12000, num_seqs);
      script.clear();
      script.run(2000, num_seqs);
      EXPECT_GE(script.counts[static_cast<size_t>(best)], 1850)
          << num_seqs << " sequences, acceptance " << acceptance << ", " << us_per_draft;
    };
    settle(0);
    acceptance = 0.9;
    settle(3);
    us_per_draft = 95;
    settle(0);
    us_per_draft = 15;
    settle(3);
    acceptance = 0;
    settle(0);
  }
}

// With a draft head, an engine that does not draft explores with the few sequences that have just
// begun and whose prompts the head has followed.
TEST(DraftChooser, NoticesByAFewSequencesThatDraftsPay) {
  constexpr int32_t kSeqs = 64;
  for (const double noise : {0.0, 0.1}) {
    SCOPED_TRACE(noise);
    ScriptedDrafts script;
    double acceptance = 0;
    script.noise = noise;
    script.acceptance = [&](int32_t) { return acceptance; };
    script.us = [](int32_t k, int32_t) { return 100 + 15 * k; };
    script.num_ready = [](int64_t n, int32_t num_seqs) {
      constexpr int64_t kBefore = 200;  // until 0 has proved best
      return n < kBefore ? num_seqs : n % 256 < 16 ? 4 : 0;
    };
    const auto settle = [&](int32_t best) {
      script.run(12000, kSeqs);
      EXPECT_EQ(script.chooser.settled(kSeqs), best);
      script.clear();
      script.run(2000, kSeqs);
      EXPECT_GE(script.counts[static_cast<size_t>(best)], 1850) << "acceptance " << acceptance;
      EXPECT_LE(script.num_changes, 4) << "acceptance " << acceptance;
    };
    settle(0);
    EXPECT_GT(script.num_explored, 0);
    acceptance = 0.9;
    settle(3);
    acceptance = 0;
    settle(0);
  }
}

// From a cold start, against the best fixed k, with figures like those of docs/performance.md: a
// GPU, whose rows cost little, a mixture with a large drafter, and two CPU cores.
TEST(DraftChooser, LosesLittle) {
  double sum = 0;
  int num_cases = 0;
  struct Machine {
    const char* name;
    double plain_us;
    double row_us;     // each further row
    double free_rows;  // that cost nothing
    double draft_us;   // each draft, for any number of sequences
    double noise;
  };
  for (const Machine& machine :
       {Machine{"GPU", 4500, 22, 64, 270, 0.006}, Machine{"mixture", 3300, 240, 1, 1900, 0.01},
        Machine{"CPU, in cache", 200, 95, 1, 75, 0.04},
        Machine{"CPU, from memory", 5300, 780, 8, 350, 0.03}}) {
    for (const int32_t num_seqs : {1, 4, 16, 64}) {
      for (const double acceptance : {0.05, 0.3, 0.64, 0.9}) {
        for (const uint64_t seed : {1, 2, 3}) {
          ScriptedDrafts script;
          script.lengths = {0, 1, 2, 4};
          script.chooser = DraftChooser(script.lengths, script.buckets);
          script.random.seed(seed);
          script.noise = machine.noise;
          script.acceptance = [&](int32_t) { return acceptance; };
          script.us = [&](int32_t k, int32_t n) {
            const double rows = std::max(0.0, n * (k + 1) - machine.free_rows);
            return machine.plain_us + machine.row_us * rows + machine.draft_us * k;
          };
          script.run(4000, num_seqs);
          double best = 0;
          for (const int32_t k : script.lengths) {
            best = std::max(best, num_seqs * script.tokens(k) / script.us(k, num_seqs));
          }
          const double share = script.sum_tokens / script.sum_us / best;
          sum += share;
          ++num_cases;
          EXPECT_GE(share, 0.97) << machine.name << ", " << num_seqs << " sequences, acceptance "
                                 << acceptance << ", seed " << seed;
        }
      }
    }
  }
  EXPECT_GE(sum / num_cases, 0.993);
}

// Nothing is timed while prompts come all the time. Acceptance alone then decides.
TEST(DraftChooser, StopsDraftingWithoutTimes) {
  ScriptedDrafts script;
  script.acceptance = [](int32_t) { return 0.02; };
  script.is_timed = false;
  script.run(200, 4);
  script.clear();
  script.run(200, 4);
  EXPECT_GE(script.counts[0], 150);
}

TEST(DraftChooser, BeginsWithPlainIterations) {
  ScriptedDrafts script;
  script.run(3, 1);
  EXPECT_EQ(script.counts[0], 3);
  script.run(500, 1);
  script.clear();
  // Not where nearly as many sequences are known.
  script.run(3, 2);
  EXPECT_EQ(script.counts[0], 0);
  script.clear();
  script.run(3, 16);
  EXPECT_EQ(script.counts[0], 3);
}

// Rows that are cheap for one sequence are not for sixteen.
TEST(DraftChooser, CountsRowsForOtherNumbersOfSequences) {
  ScriptedDrafts script;
  script.acceptance = [](int32_t) { return 0.2; };
  script.us = [](int32_t k, int32_t n) { return 4000.0 + 340 * (n * (k + 1) - 1) + 60 * k; };
  script.run(1000, 1);
  EXPECT_GE(script.counts[1], 700);
  script.clear();
  script.run(50, 16);
  EXPECT_EQ(script.counts[0], 50);
}

// What an engine drafts while prompts are computed depends on the sequences that there will be.
TEST(DraftChooser, SaysWhatItHasChosenForANumberOfSequences) {
  ScriptedDrafts script;
  script.us = [](int32_t k, int32_t n) { return n < 16 ? 100 + 5 * k : 100 + 2.0 * n * k; };
  EXPECT_EQ(script.chooser.settled(0), 3);
  EXPECT_EQ(script.chooser.settled(64), 3);  // nothing is known
  script.run(3, 64);
  EXPECT_EQ(script.chooser.settled(64), 3);  // too little is
  script.run(300, 64);
  script.run(300, 2);
  EXPECT_EQ(script.chooser.settled(64), 0);
  EXPECT_EQ(script.chooser.settled(2), 3);
}

// In passing, a larger batch has a few iterations with each number of sequences.
TEST(DraftChooser, RemembersAChoiceFromEarlierBatches) {
  ScriptedDrafts script;
  script.us = [](int32_t k, int32_t n) { return 100 + 10.0 * n * k; };
  script.run(300, 16);
  (void)script.chooser.choose(0, 0);  // the batch ends
  EXPECT_EQ(script.chooser.settled(16), 0);
  script.run(4, 16);
  EXPECT_EQ(script.chooser.settled(16), 0);
}

// A few iterations with a number of sequences, as while requests come and go, explore nothing.
TEST(DraftChooser, DoesNotExploreInPassing) {
  ScriptedDrafts script;
  script.run(100, 1);
  script.clear();
  for (const int32_t n : {2, 4, 8, 16, 64}) script.run(4, n);
  EXPECT_EQ(script.num_explored, 0);
}

}  // namespace
}  // namespace paceline
