// SPDX-License-Identifier: Apache-2.0
// Acceptance on literal cases, and the recorded program.

#include "sample/accept.h"

#include <gtest/gtest.h>

#include <vector>

#include "device/cpu_context.h"
#include "device/program.h"
#include "sample/synthetic_rates.h"
#include "support/decode_window.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"

namespace paceline {
namespace {

using testing::kMaxLen;
using testing::Tokens;
using testing::Window;

TEST(Accept, AcceptsWhileDraftsEqualDraws) {
  struct Case {
    Tokens drafts, draws, emitted;
    int32_t accepted;
  };
  for (const Case& c : {Case{{7, 8, 9}, {7, 8, 9, 4}, {7, 8, 9, 4}, 3},  // all, and the bonus token
                        Case{{7, 8, 9}, {7, 8, 1, 4}, {7, 8, 1}, 2},
                        Case{{7, 8, 9}, {1, 8, 9, 4}, {1}, 0},  // later matches do not count
                        Case{{7}, {7, 2}, {7, 2}, 1}}) {
    Window window(c.drafts, c.draws);
    const SequenceResult result = window.judge();
    EXPECT_EQ(window.emitted(), c.emitted);
    EXPECT_EQ(result.accepted_len, c.accepted);
    EXPECT_EQ(result.drafted_len, static_cast<int32_t>(c.drafts.size()));
    EXPECT_EQ(result.discarded_len, 0);
    EXPECT_EQ(result.outcome, SequenceOutcome::kRunning);
    EXPECT_EQ(window.s.known_len[1], 5 + result.emitted_len);
    for (int32_t i = 0; i < result.emitted_len; ++i) {
      EXPECT_EQ(window.s.history[kMaxLen + 5 + i], c.emitted[i]);
    }
  }
}

TEST(Accept, AStopTokenAmongAcceptedDraftsDiscardsTheRest) {
  Window window({7, 8, 9}, {7, 8, 9, 4});
  window.s.num_stop_ids[1] = 2;
  window.s.stop_ids[kMaxStopIds + 1] = 8;
  const SequenceResult result = window.judge();
  EXPECT_EQ(window.emitted(), (Tokens{7, 8}));
  EXPECT_EQ(result.accepted_len, 2);
  EXPECT_EQ(result.drafted_len, 2);
  EXPECT_EQ(result.discarded_len, 1);
  EXPECT_EQ(result.outcome, SequenceOutcome::kStop);
  EXPECT_EQ(window.s.is_active[1], 0);
}

TEST(Accept, TheLimitLeavesNoRoomForTheBonusToken) {
  Window window({7, 8, 9}, {7, 8, 9, 4}, /*known_len=*/5, /*limit=*/7);
  const SequenceResult result = window.judge();
  EXPECT_EQ(window.emitted(), (Tokens{7, 8}));
  EXPECT_EQ(result.accepted_len, 2);
  EXPECT_EQ(result.drafted_len, 2);
  EXPECT_EQ(result.outcome, SequenceOutcome::kLength);
}

TEST(Accept, NoFiniteLogitEndsTheRequest) {
  Window window({7, 8, 9}, {7, -2, -2, -2});
  const SequenceResult result = window.judge();
  EXPECT_EQ(window.emitted(), (Tokens{7}));
  EXPECT_EQ(result.outcome, SequenceOutcome::kNoLogits);
}

TEST(Accept, EndedSequencesEmitNothing) {
  Window window({7, 8, 9}, {7, 8, 9, 4});
  window.s.is_active[1] = 0;
  EXPECT_EQ(window.judge().emitted_len, 0);
  EXPECT_EQ(window.s.known_len[1], 5);
}

TEST(Accept, SyntheticOverridesTheComparison) {
  Window window({7, 8, 9}, {1, 2, 3, 4});
  const SequenceResult result = window.judge(AcceptMethod::kSynthetic, {1, 1, 0});
  EXPECT_EQ(window.emitted(), (Tokens{7, 8, 3}));
  EXPECT_EQ(result.accepted_len, 2);
}

struct CountParams {
  int32_t* counter;
  int32_t amount;
};
void count(CpuContext&, const CountParams& p) { *p.counter += p.amount; }

TEST(Program, RecordsWithoutRunningAndReplaysInOrder) {
  int32_t counter = 0;
  Program program;
  CpuContext ctx{.capturing = &program};
  CountParams params{&counter, 1};
  ctx.run(count, params);
  params.amount = 10;
  ctx.run(count, params);
  EXPECT_EQ(counter, 0);
  ctx.capturing = nullptr;
  program.replay(ctx);
  EXPECT_EQ(counter, 11);
  EXPECT_EQ(program.num_nodes(), 2);
  // The recorded params are copies.
  params.amount = 0;
  program.replay(ctx);
  EXPECT_EQ(counter, 22);
  program.params_of(count)[0]->amount = 5;
  program.replay(ctx);
  EXPECT_EQ(counter, 37);
  ctx.run(count, CountParams{&counter, 4});
  EXPECT_EQ(counter, 41);
}

TEST(SyntheticRates, GiveTheMeanLength) {
  for (const int32_t k : {1, 3, 7, 16}) {
    for (const double share : {0.0, 0.1, 0.45, 1.0}) {
      const double length = 1 + share * k;
      for (const bool is_even : {false, true}) {
        const auto rates = synthetic_rates(length, k, is_even);
        double sum = 1;
        double product = 1;
        for (int32_t i = 0; i < k; ++i) sum += product *= rates[static_cast<size_t>(i)];
        EXPECT_NEAR(sum, length, 1e-5) << "k = " << k << ", " << is_even;
        EXPECT_EQ(rates[0] == rates[static_cast<size_t>(k - 1)],
                  is_even || k == 1 || share == 0 || share == 1);
      }
    }
  }
  const auto first = synthetic_rates(2.25, 3, /*is_even=*/false);
  EXPECT_EQ((std::vector<float>{first.begin(), first.begin() + 3}),
            (std::vector<float>{1, 0.25F, 0}));
}

}  // namespace
}  // namespace paceline
