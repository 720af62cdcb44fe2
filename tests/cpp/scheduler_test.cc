// SPDX-License-Identifier: Apache-2.0
// The scheduler and the batch builder, host only: order of service, budgets, chunks, preemption,
// and the rows that come out.

#include "scheduler/scheduler.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "batch/batch_builder.h"
#include "support/host_batch.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"

namespace paceline {
namespace {

constexpr int32_t kBlockSize = 8;

// One full group of 64 bytes a token; the pool has room for `num_tokens` tokens.
KvLayout layout_for(int32_t num_tokens) {
  const std::vector<KvLayerShape> layers = {{.kind = FullKv{}, .num_kv_heads = 1, .head_dim = 8}};
  // The planner wants eight slabs at least; small pools are cut to exactly what a test needs.
  KvLayout layout = plan_kv_layout(layers, {}, kBlockSize, DType::kFloat32, 1 << 20);
  const int64_t blocks = (num_tokens + kBlockSize - 1) / kBlockSize;
  layout.slab_bytes = layout.groups[0].block_bytes;
  layout.num_slabs = blocks + 1;
  layout.pool_bytes = layout.num_slabs * layout.slab_bytes;
  return layout;
}

struct Host {
  explicit Host(int32_t pool_tokens, SchedulerOptions options = {.max_num_seqs = 4,
                                                                 .max_num_batched_tokens = 64,
                                                                 .prefill_chunk_size = 16,
                                                                 .max_score_rows = 8,
                                                                 .num_draft_tokens = 3,
                                                                 .max_in_flight = 2})
      : layout(layout_for(pool_tokens)),
        pool(layout),
        scheduler(options, pool),
        max_drafts(options.num_draft_tokens) {}

  Sequence& add(int32_t prompt_len, int32_t max_tokens, bool is_score = false) {
    return add_sample(next_id++, 0, 1, prompt_len, max_tokens, is_score);
  }

  std::vector<Sequence*> add_samples(int32_t num_samples, int32_t prompt_len, int32_t max_tokens) {
    const RequestId id = next_id++;
    std::vector<Sequence*> samples;
    for (int32_t i = 0; i < num_samples; ++i) {
      samples.push_back(&add_sample(id, i, num_samples, prompt_len, max_tokens));
    }
    return samples;
  }

  Sequence& add_sample(RequestId id, int32_t sample, int32_t num_samples, int32_t prompt_len,
                       int32_t max_tokens, bool is_score = false) {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = id;
    sequence->sample = sample;
    sequence->num_samples = num_samples;
    sequence->tokens.assign(prompt_len, 1);
    sequence->prompt_len = prompt_len;
    sequence->limit = is_score ? prompt_len : prompt_len + max_tokens;
    sequence->max_drafts = max_drafts;
    sequence->is_score = is_score;
    scheduler.add(*sequence);
    all.push_back(std::move(sequence));
    return *all.back();
  }

  // The planned rows of a sequence, or null.
  [[nodiscard]] const PlannedSequence* planned(const Sequence& sequence) const {
    for (const PlannedSequence& launch : plan.sequences) {
      if (launch.sequence == &sequence) return &launch;
    }
    return nullptr;
  }

  // Plans and launches the next iteration.
  bool plan_next() {
    plan.iteration = iteration + 1;
    plan.num_drafts = max_drafts;
    if (!scheduler.plan(plan)) return false;
    ++iteration;
    return true;
  }

  // The device has finished everything; each emitting launch of `plan` brought `num_tokens`.
  void read(int32_t num_tokens = 1) {
    scheduler.complete(iteration);
    for (const PlannedSequence& launch : plan.sequences) {
      Sequence& s = *launch.sequence;
      --s.launches_in_flight;
      if (launch.epoch != s.epoch) continue;
      if (launch.kind == RowKind::kDecode || launch.kind == RowKind::kPrefillFinal) {
        --s.emitting_in_flight;
        s.tokens.insert(s.tokens.end(), num_tokens, 2);
      }
      scheduler.advance(s, launch);
    }
  }

  KvLayout layout;
  SlabPool pool;
  Scheduler scheduler;
  int32_t max_drafts;
  IterationPlan plan;
  std::vector<std::unique_ptr<Sequence>> all;
  RequestId next_id = 1;
  int64_t iteration = -1;
};

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

TEST(BatchBuilder, LaysOutRaggedRows) {
  const BatchShape shape{.max_seqs = 4,
                         .max_verify_rows = 64,
                         .max_logit_rows = 32,
                         .num_draft_tokens = 3,
                         .first_rows = FirstRows::kNewest};
  testing::HostBatch batch(shape);
  const StagedInputs& inputs = batch->inputs;
  Sequence sequences[4];
  for (int i = 0; i < 4; ++i) {
    sequences[i].seq_slot = 3 - i;
    for (int t = 0; t < 10; ++t) sequences[i].tokens.push_back(10 * i + t);
  }
  sequences[3].logits = std::make_shared<std::vector<float>>();
  IterationPlan plan;
  plan.num_drafts = 3;
  plan.has_prefill = true;
  plan.sequences = {
      {.sequence = &sequences[0], .kind = RowKind::kDecode, .num_rows = 4, .num_drafts = 3},
      {.sequence = &sequences[1], .kind = RowKind::kPrefillFinal, .start = 4, .num_rows = 6},
      {.sequence = &sequences[2],
       .kind = RowKind::kPrefillPartial,
       .start = 0,
       .num_rows = 5,
       .resets_state = true},
      {.sequence = &sequences[3], .kind = RowKind::kScore, .start = 2, .num_rows = 3}};
  build_batch(plan, shape, *batch);

  EXPECT_EQ(inputs.counts->num_seqs, 4);
  EXPECT_TRUE(batch->has_prefill);
  EXPECT_EQ(inputs.counts->num_drafting, 2);
  const auto head = [](const int32_t* values, size_t n) {
    return std::vector<int32_t>(values, values + n);
  };
  EXPECT_EQ(head(inputs.seq_slot, 4), (std::vector<int32_t>{3, 2, 1, 0}));
  EXPECT_EQ(head(inputs.verify_indptr, 5), (std::vector<int32_t>{0, 4, 10, 15, 18}));
  // Two rows for the window, the chunk and the new token, the chunk, nothing for a score.
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 2, 9, 14, 14}));
  // The prompt's next token after a chunk, if there is one.
  EXPECT_EQ(head(inputs.next_token, 4), (std::vector<int32_t>{0, 0, 25, 35}));
  // All of the window, the last of the prompt, none of the partial chunk, all of the score.
  EXPECT_EQ(head(inputs.logit_indptr, 5), (std::vector<int32_t>{0, 4, 5, 5, 8}));
  EXPECT_EQ(head(inputs.logit_rows, 8), (std::vector<int32_t>{0, 1, 2, 3, 9, 15, 16, 17}));
  EXPECT_EQ(inputs.prefill_tokens[4], 14);
  EXPECT_EQ(inputs.prefill_tokens[9], 19);
  EXPECT_EQ(inputs.prefill_tokens[15], 32);
  ASSERT_EQ(inputs.counts->num_resets, 1);
  EXPECT_EQ(inputs.reset_seq_slots[0], 1);
  EXPECT_EQ(inputs.resets[0].seq_slot, 1);
  ASSERT_EQ(batch->score_copies.size(), 1u);
  EXPECT_EQ(batch->score_copies[0].first_logit_row, 5);
  EXPECT_EQ(batch->score_copies[0].destination_row, 2);

  // The first pass of a draft head has the rows of the verify pass, except those of scores.
  BatchShape window = shape;
  window.first_rows = FirstRows::kWindow;
  build_batch(plan, window, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 4, 10, 15, 15}));
  EXPECT_FALSE(batch->gathers_hidden);
  // A draft head that stays at the last position with KV has one row for each drafting sequence.
  window.first_rows = FirstRows::kLast;
  build_batch(plan, window, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 1, 2, 2, 2}));
  EXPECT_EQ(inputs.counts->num_first_rows, 2);
  EXPECT_EQ(inputs.counts->num_drafting, 2);
  window.first_rows = FirstRows::kNone;
  build_batch(plan, window, *batch);
  EXPECT_EQ(inputs.counts->num_first_rows, 0);

  // A drafter that has missed tokens has rows for them, and in a part of them no others.
  window.first_rows = FirstRows::kWindow;
  plan.sequences[0].num_missed = 5;
  build_batch(plan, window, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 9, 15, 20, 20}));
  EXPECT_TRUE(batch->catches_up);
  EXPECT_TRUE(batch->gathers_hidden);
  plan.sequences[0].catch_up_start = 7;
  build_batch(plan, window, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 5, 11, 16, 16}));
  EXPECT_EQ(inputs.prefill_start[0], 7);
  plan.sequences[0].num_missed = plan.sequences[0].catch_up_start = 0;
  // In a plain iteration it has only the rows of chunks, or those of the verify pass.
  plan.num_drafts = 0;
  build_batch(plan, window, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 4, 10, 15, 15}));
  build_batch(plan, shape, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 0, 7, 12, 12}));
  EXPECT_EQ(inputs.counts->num_drafting, 0);
}

}  // namespace
}  // namespace paceline
