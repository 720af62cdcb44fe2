// SPDX-License-Identifier: Apache-2.0
// The scheduler, host only: order of service, budgets, chunks and preemption.

#include "scheduler/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "batch/batch_builder.h"
#include "support/host_batch.h"
#include "support/scheduler_host.h"
#include "wire/batch_shape.h"

namespace paceline {
namespace {

using testing::kBlockSize;
using Host = testing::SchedulerHost;

TEST(Scheduler, FirstComeFirstServedWithinSequenceSlots) {
  Host host(1024);
  for (int i = 0; i < 6; ++i) host.add(4, 10);
  ASSERT_TRUE(host.plan_next());
  ASSERT_EQ(host.plan.sequences.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(host.plan.sequences[i].sequence->id, i + 1);
  EXPECT_EQ(host.scheduler.num_waiting(), 2);
  host.read();
  host.scheduler.finish(*host.all[1]);
  ASSERT_TRUE(host.plan_next());
  // Three decode, the fifth starts in the freed sequence slot; decoding rows come first.
  ASSERT_EQ(host.plan.sequences.size(), 4u);
  EXPECT_EQ(host.plan.sequences[3].sequence->id, 5);
  EXPECT_EQ(host.plan.sequences[3].kind, RowKind::kPrefillFinal);
  EXPECT_EQ(host.plan.sequences[0].kind, RowKind::kDecode);
  EXPECT_EQ(host.plan.sequences[0].num_rows, 4);
}

TEST(Scheduler, PromptLogprobsShareTheRowsOfScores) {
  Host host(1024);
  for (const int32_t prompt_len : {13, 1, 5}) {
    Sequence& sequence = host.add(prompt_len, 50);
    sequence.prompt_logprobs = std::make_shared<std::vector<std::vector<TokenLogprob>>>();
  }
  host.add(20, 0, /*is_score=*/true);
  const BatchShape shape{.max_seqs = 4,
                         .max_verify_rows = 64,
                         .max_logit_rows = 4 * 4 + 8,
                         .num_draft_tokens = 3,
                         .max_prompt_rows = 8,
                         .max_logprobs = 1};
  testing::HostBatch batch(shape);
  const StagedInputs& inputs = batch->inputs;
  std::vector<int32_t> with_logprobs(4, 0);
  std::vector<int32_t> scored(4, 0);
  for (int iteration = 0; iteration < 8; ++iteration) {
    ASSERT_TRUE(host.plan_next());
    build_batch(host.plan, shape, *batch);
    int32_t num_extra = 0;
    int32_t prompt_row = inputs.counts->num_logit_rows;
    for (size_t i = 0; i < host.plan.sequences.size(); ++i) {
      const PlannedSequence& launch = host.plan.sequences[i];
      const auto at = static_cast<size_t>(launch.sequence->id - 1);
      const bool is_final = launch.kind == RowKind::kPrefillFinal;
      const bool is_prefill = is_final || launch.kind == RowKind::kPrefillPartial;
      EXPECT_EQ(launch.num_prompt_rows, is_prefill ? launch.num_rows - (is_final ? 1 : 0) : 0);
      if (is_final) {
        EXPECT_EQ(inputs.logit_indptr[i + 1] - inputs.logit_indptr[i], 1) << "one row draws";
      }
      // Behind the rows that draw, in the order of the chunk.
      for (int32_t row = 0; row < launch.num_prompt_rows; ++row) {
        EXPECT_EQ(inputs.logit_rows[prompt_row++], inputs.verify_indptr[i] + row);
      }
      with_logprobs[at] += launch.num_prompt_rows;
      if (launch.kind == RowKind::kScore) scored[at] += launch.num_rows;
      num_extra += launch.kind == RowKind::kScore ? launch.num_rows : launch.num_prompt_rows;
    }
    EXPECT_EQ(prompt_row, inputs.counts->num_logit_rows + inputs.counts->num_prompt_rows);
    EXPECT_LE(num_extra, 8);
    host.read();
  }
  EXPECT_EQ(with_logprobs, (std::vector<int32_t>{12, 0, 4, 0}));
  EXPECT_EQ(scored, (std::vector<int32_t>{0, 0, 0, 20}));
}

TEST(Scheduler, PromptsComeInChunksBesideDecodingRows) {
  Host host(1024);
  host.add(4, 50);
  ASSERT_TRUE(host.plan_next());
  host.read();
  Sequence& longer = host.add(40, 5);
  std::vector<std::pair<RowKind, int32_t>> chunks;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(host.plan_next());
    for (const PlannedSequence& launch : host.plan.sequences) {
      if (launch.sequence == &longer) chunks.emplace_back(launch.kind, launch.num_rows);
    }
    EXPECT_EQ(host.plan.sequences[0].kind, RowKind::kDecode);  // the other never pauses
    host.read();
  }
  const std::vector<std::pair<RowKind, int32_t>> expected = {{RowKind::kPrefillPartial, 16},
                                                             {RowKind::kPrefillPartial, 16},
                                                             {RowKind::kPrefillFinal, 8},
                                                             {RowKind::kDecode, 4}};
  EXPECT_EQ(chunks, expected);
}

TEST(Scheduler, TheBudgetIsRowsOfAllSequences) {
  Host host(1024, {.max_num_seqs = 4,
                   .max_num_batched_tokens = 20,
                   .prefill_chunk_size = 16,
                   .max_score_rows = 8,
                   .num_draft_tokens = 3,
                   .max_in_flight = 2});
  for (int i = 0; i < 3; ++i) host.add(16, 10);
  ASSERT_TRUE(host.plan_next());
  int32_t rows = 0;
  for (const PlannedSequence& launch : host.plan.sequences) rows += launch.num_rows;
  EXPECT_EQ(rows, 20);
  EXPECT_EQ(host.plan.sequences.size(), 2u);
  EXPECT_EQ(host.plan.sequences[1].kind, RowKind::kPrefillPartial);
  EXPECT_EQ(host.plan.sequences[1].num_rows, 4);
}

TEST(Scheduler, PromptRowsAreLimitedWhileOthersDecode) {
  SchedulerOptions options = {.max_num_seqs = 4,
                              .max_num_batched_tokens = 64,
                              .prefill_chunk_size = 64,
                              .max_score_rows = 8,
                              .num_draft_tokens = 3,
                              .max_in_flight = 2};
  const auto prompt_rows = [&](int32_t most, bool decodes) {
    Host host(1024, options);
    if (decodes) {
      host.add(4, 20);
      EXPECT_TRUE(host.plan_next());
      host.read();
    }
    host.add(40, 5);
    host.add(40, 5);
    host.plan.max_prompt_rows = most;
    EXPECT_TRUE(host.plan_next());
    int32_t rows = 0;
    for (const PlannedSequence& launch : host.plan.sequences) {
      rows += launch.kind == RowKind::kDecode ? 0 : launch.num_rows;
    }
    return rows;
  };
  EXPECT_EQ(prompt_rows(20, true), 20);
  EXPECT_EQ(prompt_rows(50, true), 50);  // of both prompts
  EXPECT_EQ(prompt_rows(20, false), 64);
  EXPECT_EQ(prompt_rows(INT32_MAX, true), 60);
  EXPECT_EQ(prompt_rows(1000, true), 60);
  // With the window of four rows, the nearest multiple, unless that has less than half.
  options.row_step = 16;
  EXPECT_EQ(prompt_rows(20, true), 28);
  EXPECT_EQ(prompt_rows(16, true), 12);
  EXPECT_EQ(prompt_rows(1, true), 12);
  options.row_step = 256;
  EXPECT_EQ(prompt_rows(20, true), 60);
}

TEST(Scheduler, DoesNotLaunchWhatMustHaveFinished) {
  Host host(1024);
  Sequence& sequence = host.add(4, 2);
  ASSERT_TRUE(host.plan_next());  // the prompt: at least one token
  ASSERT_TRUE(host.plan_next());  // a window: at least one more
  EXPECT_EQ(sequence.emitting_in_flight, 2);
  EXPECT_FALSE(host.plan_next());
}

TEST(Scheduler, ReservesForTheMostThatMayHaveBeenAccepted) {
  Host host(1024);
  Sequence& sequence = host.add(8, 100);
  ASSERT_TRUE(host.plan_next());
  EXPECT_EQ(sequence.blocks.table(0).size(), 2u);  // 8 + 1 + 3 tokens
  ASSERT_TRUE(host.plan_next());
  // 8 known, 4 from the prompt's launch at most, 4 from this window, 3 to look ahead.
  EXPECT_EQ(sequence.blocks.table(0).size(), static_cast<size_t>((8 + 4 + 4 + 3 + 7) / 8));
}

TEST(Scheduler, PreemptsTheYoungestAndServesItAgain) {
  Host host(64);
  Sequence& first = host.add(16, 40);
  Sequence& second = host.add(16, 40);
  bool has_preempted_second = false;
  for (int i = 0; i < 60 && first.known_len() < first.limit; ++i) {
    if (!host.plan_next()) break;
    EXPECT_NE(first.phase, Sequence::Phase::kWaiting) << "the oldest keeps its blocks";
    host.read(2);
    has_preempted_second |= second.epoch > 0;
    if (first.known_len() >= first.limit) host.scheduler.finish(first);
  }
  EXPECT_TRUE(has_preempted_second);
  EXPECT_EQ(first.phase, Sequence::Phase::kFinished);
  ASSERT_TRUE(host.plan_next());
  ASSERT_EQ(host.plan.sequences.size(), 1u);
  EXPECT_EQ(host.plan.sequences[0].sequence, &second);
  EXPECT_TRUE(host.plan.sequences[0].resets_state);
  EXPECT_EQ(host.plan.sequences[0].start, 0);
  EXPECT_EQ(host.pool.check_integrity(), "");
}

// Beside a sequence that has all the blocks it will ever need, 3 blocks of 8 tokens are free. Up to
// and including its first window a newcomer reserves prompt + 2 * 4 + 3 tokens.
TEST(Scheduler, AdmitsOnlyWithBlocksUpToTheFirstWindow) {
  for (const int32_t prompt_len : {13, 14}) {
    Host host(40);
    Sequence& first = host.add(8, 8);
    ASSERT_TRUE(host.plan_next());
    Sequence& second = host.add(prompt_len, 20);
    ASSERT_TRUE(host.plan_next());
    if (prompt_len == 14) {
      EXPECT_EQ(host.planned(second), nullptr) << "25 tokens need 4 blocks";
      host.scheduler.finish(first);
      host.scheduler.complete(host.iteration);
      ASSERT_TRUE(host.plan_next());
    }
    ASSERT_NE(host.planned(second), nullptr);
    EXPECT_EQ(host.planned(second)->kind, RowKind::kPrefillFinal);
    ASSERT_TRUE(host.plan_next());
    ASSERT_NE(host.planned(second), nullptr);
    EXPECT_EQ(host.planned(second)->kind, RowKind::kDecode);
    EXPECT_EQ(host.scheduler.num_preemptions(), 0);
  }
}

// Options for a draft head that may miss prompts, of which hidden states are kept for 8 tokens.
SchedulerOptions head_options() {
  return {.max_num_seqs = 64,
          .max_num_batched_tokens = 512,
          .prefill_chunk_size = 16,
          .max_score_rows = 8,
          .num_draft_tokens = 3,
          .drafter_falls_behind = true,
          .may_miss_prompts = true,
          .max_exact_missed = 7,
          .max_in_flight = 2,
          .follows_hidden = true};
}

int32_t num_followed(const IterationPlan& plan) {
  return static_cast<int32_t>(
      std::ranges::count_if(plan.sequences, [](const auto& rows) { return rows.is_followed; }));
}

TEST(Scheduler, ADraftHeadFollowsAllPromptsOfOneSequenceAtATime) {
  Host host(1024, head_options());
  host.max_drafts = 0;
  host.plan.skips_prompts = true;
  for (int32_t i = 0; i < 5; ++i) {
    Sequence& sequence = host.add(4, 100);
    sequence.max_drafts = 3;
    ASSERT_TRUE(host.plan_next());
    EXPECT_EQ(num_followed(host.plan), 1);
    host.read();
    host.scheduler.finish(sequence);
  }
}

TEST(Scheduler, ADraftHeadFollowsOnePromptInSixteenWhileNoDraftsPay) {
  Host host(8192, head_options());
  for (int32_t i = 0; i < 40; ++i) host.add(4, 100);
  host.max_drafts = 0;
  host.plan.skips_prompts = true;
  ASSERT_TRUE(host.plan_next());
  ASSERT_EQ(host.plan.sequences.size(), 40u);
  // At first few run.
  constexpr int32_t kNumFollowed = 4;
  EXPECT_EQ(num_followed(host.plan), kNumFollowed);
  for (const size_t i : {0, 1, 17, 33}) EXPECT_TRUE(host.plan.sequences[i].is_followed) << i;
  host.read();
  // An exploration may draft for these until they have 16 tokens for which it has not. Until
  // then hidden states are kept, and afterwards iterations are those of an engine without a
  // drafter.
  for (int32_t i = 0; i < 40; ++i) {
    SCOPED_TRACE("iteration " + std::to_string(i));
    EXPECT_EQ(host.scheduler.num_ready_to_draft(/*max_catch_up=*/128), i <= 16 ? kNumFollowed : 0);
    ASSERT_TRUE(host.plan_next());
    EXPECT_EQ(host.plan.keeps_hidden, i < 16);
    EXPECT_EQ(host.plan.num_drafts, 0);
    host.read();
  }
  // Prompts that begin are computed alone by the target, and so are the sequences beside them.
  host.add(4, 100);
  ASSERT_TRUE(host.plan_next());
  EXPECT_TRUE(host.plan.has_prefill);
  EXPECT_FALSE(host.plan.follows_chunks);
  EXPECT_FALSE(host.plan.keeps_hidden);
  host.read();
  // Once drafts pay, the drafter gets what it has missed, without hidden states.
  host.max_drafts = 3;
  host.plan.skips_prompts = false;
  ASSERT_TRUE(host.plan_next());
  const PlannedSequence& first = host.plan.sequences[2];  // whose prompt it has missed
  EXPECT_EQ(first.num_missed, 4 + 41);
  EXPECT_EQ(first.num_kept, 0);
  EXPECT_FALSE(first.is_cacheable);
  EXPECT_TRUE(first.sequence->has_holes);
  EXPECT_EQ(first.sequence->num_missed, 0);
  host.read();
  Sequence& last = host.add(4, 100);
  while (host.planned(last) == nullptr) {
    ASSERT_TRUE(host.plan_next());
    if (host.planned(last) == nullptr) host.read();
  }
  EXPECT_TRUE(host.planned(last)->is_followed);
  EXPECT_TRUE(host.planned(last)->is_cacheable);
}

TEST(Scheduler, ADraftHeadCatchesUpExactlyWithFewTokens) {
  for (const int32_t num_plain : {1, 7, 8}) {
    Host host(1024, head_options());
    Sequence& sequence = host.add(4, 100);
    ASSERT_TRUE(host.plan_next());
    host.read();
    ASSERT_TRUE(host.plan_next());
    host.read();
    host.max_drafts = 0;
    for (int32_t i = 0; i < num_plain; ++i) {
      ASSERT_TRUE(host.plan_next());
      EXPECT_TRUE(host.plan.keeps_hidden);
      host.read();
    }
    host.max_drafts = 3;
    ASSERT_TRUE(host.plan_next());
    EXPECT_FALSE(host.plan.keeps_hidden);
    EXPECT_EQ(host.plan.sequences[0].num_missed, num_plain);
    EXPECT_EQ(host.plan.sequences[0].num_kept, num_plain);
    EXPECT_EQ(sequence.has_holes, num_plain > 7) << num_plain;
    EXPECT_EQ(host.plan.sequences[0].is_cacheable, num_plain <= 7);
  }
}

TEST(Scheduler, ScoredPromptsAreCutToTheLogitRows) {
  Host host(1024);
  Sequence& score = host.add(20, 0, /*is_score=*/true);
  std::vector<int32_t> rows;
  while (host.plan_next()) {
    rows.push_back(host.plan.sequences[0].num_rows);
    EXPECT_EQ(host.plan.sequences[0].kind, RowKind::kScore);
    host.read();
  }
  EXPECT_EQ(rows, (std::vector<int32_t>{8, 8, 4}));
  host.scheduler.finish(score);
  EXPECT_FALSE(host.scheduler.has_work());
}

}  // namespace
}  // namespace paceline
