// SPDX-License-Identifier: Apache-2.0
// The scheduler and the samples of a request: who forks from whom, and what they share.

#include "scheduler/scheduler.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/scheduler_host.h"

namespace paceline {
namespace {

using testing::kBlockSize;
using Host = testing::SchedulerHost;

TEST(Scheduler, SamplesForkOnceThePromptHasBeenLaunched) {
  Host host(1024);
  const std::vector<Sequence*> samples = host.add_samples(3, 21, 10);
  Sequence& other = host.add(4, 10);
  EXPECT_EQ(host.scheduler.num_waiting_requests(), 2);
  // The prompt comes in chunks of 16 rows; those that wait for it let the next request pass.
  ASSERT_TRUE(host.plan_next());
  EXPECT_EQ(host.plan.sequences.size(), 2u);
  EXPECT_NE(host.planned(other), nullptr);
  EXPECT_EQ(host.scheduler.num_waiting(), 2);
  EXPECT_EQ(host.scheduler.num_waiting_requests(), 1);
  ASSERT_TRUE(host.plan_next());
  EXPECT_EQ(host.planned(*samples[0])->kind, RowKind::kPrefillFinal);
  EXPECT_EQ(host.planned(*samples[1]), nullptr) << "nothing to copy before the rows have run";
  EXPECT_TRUE(host.plan.forks.empty());
  ASSERT_TRUE(host.plan_next());
  ASSERT_EQ(host.plan.forks.size(), 2u);
  ASSERT_EQ(host.plan.block_copies.size(), 2u);
  for (size_t i = 1; i < 3; ++i) {
    const PlannedSequence* const launch = host.planned(*samples[i]);
    ASSERT_NE(launch, nullptr);
    EXPECT_EQ(launch->kind, RowKind::kPrefillFinal);
    EXPECT_EQ(launch->start, 20);
    EXPECT_EQ(launch->num_rows, 1);
    EXPECT_TRUE(launch->resets_state);
    const SequenceFork& fork = host.plan.forks[i - 1];
    EXPECT_EQ(fork.parent_seq_slot, samples[0]->seq_slot);
    EXPECT_EQ(fork.seq_slot, samples[i]->seq_slot);
    EXPECT_EQ(fork.num_tokens, 20);
    const BlockCopy& copy = host.plan.block_copies[i - 1];
    EXPECT_EQ(copy.source, samples[0]->blocks.table(0)[2]);
    EXPECT_EQ(copy.destination, samples[i]->blocks.table(0)[2]);
    EXPECT_EQ(host.pool.num_holders(0, samples[i]->blocks.table(0)[1]), 3);
  }
  EXPECT_EQ(host.scheduler.num_shared_tokens(), 40);
  EXPECT_EQ(host.scheduler.num_waiting_requests(), 0);
  host.read();
  ASSERT_TRUE(host.plan_next());
  EXPECT_TRUE(host.plan.forks.empty());
  EXPECT_TRUE(host.plan.block_copies.empty());
  EXPECT_EQ(host.pool.check_integrity(), "");
}

TEST(Scheduler, ASampleWithoutAParentPrefillsByItself) {
  // One sequence slot: the first sample ends before the second begins.
  Host host(1024, {.max_num_seqs = 1,
                   .max_num_batched_tokens = 64,
                   .prefill_chunk_size = 64,
                   .max_score_rows = 8,
                   .num_draft_tokens = 3,
                   .max_in_flight = 2});
  const std::vector<Sequence*> samples = host.add_samples(2, 21, 10);
  ASSERT_TRUE(host.plan_next());
  host.read();
  host.scheduler.finish(*samples[0]);
  ASSERT_TRUE(host.plan_next());
  ASSERT_EQ(host.plan.sequences.size(), 1u);
  EXPECT_EQ(host.planned(*samples[1])->start, 0);
  EXPECT_EQ(host.planned(*samples[1])->num_rows, 21);
  EXPECT_TRUE(host.plan.forks.empty());
  EXPECT_EQ(host.scheduler.num_shared_tokens(), 0);
}

TEST(Scheduler, APromptOfOneTokenHasNothingToShare) {
  Host host(1024);
  host.add_samples(3, 1, 10);
  ASSERT_TRUE(host.plan_next());
  EXPECT_EQ(host.plan.sequences.size(), 3u);
  EXPECT_TRUE(host.plan.forks.empty());
}

TEST(Scheduler, APreemptedSampleForksAgainAndAnySampleMayBeTheParent) {
  Host host(1024);
  const std::vector<Sequence*> samples = host.add_samples(3, 21, 10);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(host.plan_next());
    host.read();
  }
  ASSERT_EQ(host.scheduler.num_shared_tokens(), 40);
  // The first is cancelled; the last one loses its blocks, as if it had been preempted.
  const BlockId shared = samples[1]->blocks.table(0)[0];
  host.scheduler.finish(*samples[0]);
  EXPECT_EQ(host.pool.num_holders(0, shared), 2);
  const auto known_len = samples[2]->known_len();
  ASSERT_GT(known_len, 21);
  samples[2]->blocks.release_all(host.pool, host.iteration);
  EXPECT_EQ(host.pool.num_holders(0, shared), 1);
  Sequence again = std::move(*samples[2]);
  host.scheduler.finish(*samples[2]);
  Sequence& second = host.add_sample(again.id, 2, 3, 21, 10);
  second.tokens = again.tokens;
  ASSERT_TRUE(host.plan_next());
  ASSERT_EQ(host.plan.forks.size(), 1u);
  EXPECT_EQ(host.plan.forks[0].parent_seq_slot, samples[1]->seq_slot);
  // Its output is prefilled again, behind the shared prompt.
  EXPECT_EQ(host.planned(second)->start, 20);
  EXPECT_EQ(host.planned(second)->num_rows, known_len - 20);
  EXPECT_EQ(host.pool.num_holders(0, shared), 2);
  EXPECT_EQ(host.pool.check_integrity(), "");
}

TEST(Scheduler, SamplesNeedOnlyTheBlocksThatTheyDoNotShare) {
  // The pool holds two prompts of 41 tokens, or six samples of one.
  Host host(96, {.max_num_seqs = 8,
                 .max_num_batched_tokens = 64,
                 .prefill_chunk_size = 64,
                 .max_score_rows = 8,
                 .num_draft_tokens = 0,
                 .max_in_flight = 2});
  host.add_samples(6, 41, 4);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(host.plan_next());
    host.read();
  }
  EXPECT_EQ(host.scheduler.num_running(), 6);
  EXPECT_EQ(host.pool.num_held(0), 5 + 6);
  EXPECT_EQ(host.scheduler.num_preemptions(), 0);
  for (const auto& sample : host.all) host.scheduler.finish(*sample);
  host.scheduler.complete(host.iteration);
  EXPECT_EQ(host.pool.num_held(0) + host.pool.num_quarantined(0), 0);
  EXPECT_EQ(host.pool.check_integrity(), "");
}

}  // namespace
}  // namespace paceline
