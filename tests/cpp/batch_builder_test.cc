// SPDX-License-Identifier: Apache-2.0
// The rows of a batch that come out of a plan.

#include "batch/batch_builder.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/host_batch.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"

namespace paceline {
namespace {

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
  plan.sequences[0].num_missed = 0;
  plan.sequences[0].catch_up_start = kNoPart;
  // A chunk without the drafter has a row only where other sequences draft, and only the last
  // chunk.
  plan.sequences[1].is_followed = plan.sequences[2].is_followed = false;
  build_batch(plan, shape, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 2, 3, 3, 3}));
  plan.num_drafts = 0;
  build_batch(plan, shape, *batch);
  EXPECT_EQ(inputs.counts->num_first_rows, 0);
  plan.sequences[1].is_followed = plan.sequences[2].is_followed = true;
  // In a plain iteration it has only the rows of chunks, or those of the verify pass if it follows
  // chunks.
  plan.num_drafts = 0;
  plan.follows_chunks = true;
  build_batch(plan, window, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 4, 10, 15, 15}));
  plan.follows_chunks = false;
  build_batch(plan, shape, *batch);
  EXPECT_EQ(head(inputs.first_indptr, 5), (std::vector<int32_t>{0, 0, 7, 12, 12}));
  EXPECT_EQ(inputs.counts->num_drafting, 0);
}

}  // namespace
}  // namespace paceline
