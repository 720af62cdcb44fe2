// SPDX-License-Identifier: Apache-2.0
// The row ops on literal cases: the rows of verify windows, of first passes and of draft steps.

#include "speculate/row_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "metadata/group_metadata.h"
#include "metadata/pass_rows.h"
#include "support/decode_window.h"
#include "wire/batch_shape.h"
#include "wire/sequence_result.h"

namespace paceline {
namespace {

using testing::kMaxLen;
using testing::Tokens;
using testing::Window;

TEST(RowOps, VerifyRowsAreTheLastTokenAndTheDrafts) {
  Window window({7, 8, 9}, {}, /*known_len=*/5, /*limit=*/8);
  assemble_verify_rows(window.ctx, {window.in, window.s, window.rows});
  const auto head = [](const int32_t* values) { return Tokens(values, values + 4); };
  // Row 3 would draw the token at position 8, beyond the limit.
  EXPECT_EQ(head(window.rows.seq_slot), (Tokens{1, 1, 1, -1}));
  EXPECT_EQ(head(window.rows.token_ids), (Tokens{4, 7, 8, 0}));
  EXPECT_EQ(head(window.rows.positions), (Tokens{4, 5, 6, 0}));
}

TEST(RowOps, TheFirstPassSeesTheLastAcceptedAndTheNewToken) {
  Window window({7, 8, 9}, {7, 8, 1, 4});
  window.judge();
  int32_t last_row = -1;
  assemble_first_rows(window.ctx, {window.in, window.s, window.rows, FirstRows::kNewest,
                                   /*results=*/nullptr, &last_row});
  EXPECT_EQ(last_row, 1);
  EXPECT_EQ(*window.rows.num_rows, 2);
  EXPECT_EQ(window.rows.token_ids[0], 8);
  EXPECT_EQ(window.rows.token_ids[1], 1);
  EXPECT_EQ(window.rows.positions[0], 6);
  EXPECT_EQ(window.rows.positions[1], 7);
}

TEST(RowOps, TheFirstPassBehindPromptLookupSeesAllThatTheWindowHasEmitted) {
  const auto head = [](const int32_t* values) { return Tokens(values, values + 4); };
  const auto assemble = [](Window& window, int32_t num_missed = 0) {
    window.judge();
    window.in.first_indptr[1] = window.in.counts->num_first_rows = num_missed + 4;
    int32_t last_row = -1;
    assemble_first_rows(window.ctx,
                        {window.in, window.s, window.rows, FirstRows::kNewest, &window.result,
                         &last_row, /*hidden_rows=*/nullptr, /*kept=*/{},
                         /*follows_windows=*/true});
    return last_row;
  };
  Window most({7, 8, 9}, {7, 8, 1, 4});  // known_len 5; two accepted, then 1
  EXPECT_EQ(assemble(most), 2);
  EXPECT_EQ(head(most.rows.seq_slot), (Tokens{1, 1, 1, -1}));
  EXPECT_EQ(head(most.rows.positions), (Tokens{5, 6, 7, 0}));
  EXPECT_EQ(head(most.rows.token_ids), (Tokens{7, 8, 1, 0}));
  Window all({7, 8, 9}, {7, 8, 9, 4});
  EXPECT_EQ(assemble(all), 3);
  EXPECT_EQ(head(all.rows.positions), (Tokens{5, 6, 7, 8}));
  Window none({7, 8, 9}, {1, 8, 1, 4});  // the newest two, as without prompt lookup
  EXPECT_EQ(assemble(none), 1);
  EXPECT_EQ(head(none.rows.seq_slot), (Tokens{1, 1, -1, -1}));
  EXPECT_EQ(head(none.rows.positions), (Tokens{4, 5, 0, 0}));
  EXPECT_EQ(head(none.rows.token_ids), (Tokens{4, 1, 0, 0}));
  Window missed({7, 8, 9}, {7, 1, 1, 4});  // and two tokens that it has missed
  EXPECT_EQ(assemble(missed, 2), 3);
  EXPECT_EQ(head(missed.rows.positions), (Tokens{3, 4, 5, 6}));
  EXPECT_EQ(head(missed.rows.token_ids), (Tokens{3, 4, 7, 1}));
  // A part of the missed tokens: the host says where it begins.
  Window part({7, 8, 9}, {7, 8, 9, 4});
  part.in.prefill_start[0] = 1;
  EXPECT_EQ(assemble(part), 3);
  EXPECT_EQ(head(part.rows.positions), (Tokens{1, 2, 3, 4}));
  // A sequence that has ended has none.
  Window ended({7, 8, 9}, {7, 8, 9, 4}, /*known_len=*/5, /*limit=*/6);
  assemble(ended);
  EXPECT_EQ(head(ended.rows.seq_slot), (Tokens{-1, -1, -1, -1}));
}

TEST(RowOps, TheFirstPassOfADraftHeadPairsEachRowWithTheTokenAfterIt) {
  Window window({7, 8, 9}, {7, 8, 1, 4});  // known_len 5; two accepted, then 1
  window.judge();
  window.in.first_indptr[1] = window.in.counts->num_first_rows = 4;
  int32_t last_row = -1;
  const auto assemble = [&] {
    assemble_first_rows(window.ctx, {window.in, window.s, window.rows, FirstRows::kWindow,
                                     &window.result, &last_row});
  };
  const auto head = [](const int32_t* values, int n) { return Tokens(values, values + n); };
  assemble();
  EXPECT_EQ(head(window.rows.seq_slot, 4), (Tokens{1, 1, 1, -1}));
  EXPECT_EQ(head(window.rows.positions, 4), (Tokens{4, 5, 6, 0}));
  EXPECT_EQ(head(window.rows.token_ids, 4), (Tokens{7, 8, 1, 0}));
  EXPECT_EQ(last_row, 2);
  // An unfinished chunk: only the host knows what comes next.
  window.in.kind[0] = static_cast<int32_t>(RowKind::kPrefillPartial);
  window.in.prefill_start[0] = 4;
  window.in.next_token[0] = 33;
  window.in.first_indptr[1] = window.in.counts->num_first_rows = 4;
  window.in.counts->num_drafting = 0;
  assemble();
  EXPECT_EQ(head(window.rows.seq_slot, 4), (Tokens{1, 1, 1, 1}));
  EXPECT_EQ(head(window.rows.positions, 4), (Tokens{4, 5, 6, 7}));
  EXPECT_EQ(head(window.rows.token_ids, 4), (Tokens{7, 8, 1, 33}));
  // A chunk is finished even where its sequence has ended with the token that it drew.
  window.in.kind[0] = static_cast<int32_t>(RowKind::kPrefillFinal);
  window.s.is_active[1] = 0;
  assemble();
  EXPECT_EQ(head(window.rows.seq_slot, 4), (Tokens{1, 1, 1, 1}));
  // A sequence that has ended drafts nothing.
  window.in.kind[0] = static_cast<int32_t>(RowKind::kDecode);
  assemble();
  EXPECT_EQ(head(window.rows.seq_slot, 4), (Tokens{-1, -1, -1, -1}));
}

TEST(RowOps, ADraftHeadGetsZerosForHiddenStatesThatWereNotKept) {
  Window window({7, 8, 9}, {7, 8, 1, 4}, /*known_len=*/12);  // two accepted, then 1
  window.judge();
  window.in.first_indptr[1] = window.in.counts->num_first_rows = 10;  // six missed, four verified
  constexpr KeptHidden kKept = {.first_row = 50, .num_tokens = 7, .zero_row = 40};
  constexpr int32_t kZero = 40;
  Tokens hidden_rows(10, -7);
  int32_t last_row = -1;
  const auto assemble = [&](int32_t num_kept) {
    window.in.num_kept[0] = num_kept;
    assemble_first_rows(window.ctx, {.inputs = window.in,
                                     .sequences = window.s,
                                     .rows = window.rows,
                                     .first_rows = FirstRows::kWindow,
                                     .results = &window.result,
                                     .last_row = &last_row,
                                     .hidden_rows = hidden_rows.data(),
                                     .kept = kKept});
    EXPECT_EQ(Tokens(window.rows.positions, window.rows.positions + 9),
              (Tokens{5, 6, 7, 8, 9, 10, 11, 12, 13}));
    return Tokens(hidden_rows.begin(), hidden_rows.begin() + 9);
  };
  // The state of a position is in row 50 + 7 + position % 7 of slot 1. Those of the three tokens
  // that the window has emitted have taken the rows of positions 4, 5 and 6.
  EXPECT_EQ(assemble(6), (Tokens{kZero, kZero, 57, 58, 59, 60, 0, 1, 2}));
  EXPECT_EQ(assemble(2), (Tokens{kZero, kZero, kZero, kZero, 59, 60, 0, 1, 2}));
  EXPECT_EQ(assemble(0), (Tokens{kZero, kZero, kZero, kZero, kZero, kZero, 0, 1, 2}));
}

TEST(RowOps, TheFirstPassOfAChunkIsTheSameWhereItsSequenceHasEnded) {
  Window window({7, 8, 9}, {7, 8, 1, 4});  // known_len 5; two accepted, then 1: eight tokens
  window.judge();
  window.in.kind[0] = static_cast<int32_t>(RowKind::kPrefillFinal);
  window.in.prefill_start[0] = 5;
  window.in.first_indptr[1] = window.in.counts->num_first_rows = 3;
  for (const int32_t is_active : {1, 0}) {
    window.s.is_active[1] = is_active;
    int32_t last_row = -1;
    assemble_first_rows(window.ctx, {window.in, window.s, window.rows, FirstRows::kNewest,
                                     /*results=*/nullptr, &last_row});
    const auto head = [](const int32_t* values) { return Tokens(values, values + 3); };
    EXPECT_EQ(head(window.rows.seq_slot), (Tokens{1, 1, 1}));
    EXPECT_EQ(head(window.rows.positions), (Tokens{5, 6, 7}));
    EXPECT_EQ(head(window.rows.token_ids), (Tokens{7, 8, 1}));
    EXPECT_EQ(last_row, 2);
  }
  // Unless the drafter leaves it out.
  window.in.num_drafts[0] = kLeftOut;
  int32_t last_row = -1;
  const auto assemble = [&] {
    assemble_first_rows(window.ctx, {window.in, window.s, window.rows, FirstRows::kNewest,
                                     /*results=*/nullptr, &last_row});
  };
  assemble();
  EXPECT_EQ(window.rows.seq_slot[0], -1);
  window.in.num_drafts[0] = 3;
  assemble();
  EXPECT_EQ(window.rows.seq_slot[0], 1);
  window.in.kind[0] = static_cast<int32_t>(RowKind::kDecode);
  assemble();
  EXPECT_EQ(window.rows.seq_slot[0], -1);
}

TEST(RowOps, AFixedDraftHeadHasOneRowAtTheLastPositionWithKv) {
  Window window({7, 8, 9}, {7, 8, 1, 4});  // known_len 5; two accepted, then 1
  window.judge();
  // The window is rows 20 to 23 of the verify pass; its row 22 drew the newest token.
  window.in.verify_indptr[0] = 20;
  window.in.verify_indptr[1] = 24;
  window.in.first_indptr[1] = window.in.counts->num_first_rows = 1;
  Tokens hidden_rows(2, -7);
  int32_t last_row = -1;
  const auto assemble = [&] {
    assemble_first_rows(window.ctx, {.inputs = window.in,
                                     .sequences = window.s,
                                     .rows = window.rows,
                                     .first_rows = FirstRows::kLast,
                                     .results = &window.result,
                                     .last_row = &last_row,
                                     .hidden_rows = hidden_rows.data()});
  };
  const auto expect_row = [&](int32_t slot, int32_t position, int32_t token, int32_t hidden_row) {
    EXPECT_EQ(*window.rows.num_rows, 1);
    EXPECT_EQ(window.rows.seq_slot[0], slot);
    EXPECT_EQ(window.rows.positions[0], position);
    EXPECT_EQ(window.rows.token_ids[0], token);
    EXPECT_EQ(hidden_rows, (Tokens{hidden_row, -7}));
    EXPECT_EQ(last_row, 0);
  };
  assemble();
  expect_row(1, 6, 1, 22);
  // After a prompt the last row drew.
  window.in.kind[0] = static_cast<int32_t>(RowKind::kPrefillFinal);
  window.in.verify_indptr[0] = 17;
  assemble();
  expect_row(1, 6, 1, 23);
  // A sequence that has ended drafts nothing, but it must point to some row.
  window.s.is_active[1] = 0;
  assemble();
  expect_row(-1, 0, 0, 23);
  window.in.kind[0] = static_cast<int32_t>(RowKind::kDecode);
  window.result.emitted_len = 0;
  assemble();
  expect_row(-1, 0, 0, 23);
  // An unfinished chunk has no row.
  window.s.is_active[1] = 1;
  window.in.kind[0] = static_cast<int32_t>(RowKind::kPrefillPartial);
  window.in.first_indptr[1] = window.in.counts->num_first_rows = window.in.counts->num_drafting = 0;
  hidden_rows = {-7, -7};
  last_row = -1;
  assemble();
  EXPECT_EQ(*window.rows.num_rows, 0);
  EXPECT_EQ(hidden_rows, (Tokens{-7, -7}));
  EXPECT_EQ(last_row, -1);
}

TEST(RowOps, AFixedDraftHeadStaysWhereItIsWhileItsDraftsGoOn) {
  Window window({0, 0, 0, 0}, {}, /*known_len=*/5, /*limit=*/8);
  int32_t step = -1;
  const int32_t drawn[] = {21};
  begin_draft_steps(window.ctx, {.inputs = window.in,
                                 .sequences = window.s,
                                 .drawn = drawn,
                                 .rows = window.rows,
                                 .current_draft_step = &step,
                                 .draw_ahead = 2,
                                 .advances_positions = false});
  EXPECT_EQ(window.s.draft_len[1], 3);
  AdvanceParams advance{.current_draft_step = &step,
                        .rows = window.rows,
                        .drawn = drawn,
                        .sequences = window.s,
                        .groups = {},
                        .num_groups = 0,
                        .draw_ahead = 2,
                        .advances_positions = false};
  // The first pass drew the token at 5, and two more fit.
  for (const int32_t slot : {1, 1, -1}) {
    EXPECT_EQ(window.rows.seq_slot[0], slot);
    EXPECT_EQ(window.rows.positions[0], slot < 0 ? 0 : 3);
    EXPECT_EQ(window.rows.token_ids[0], slot < 0 ? 0 : 21);
    advance_draft_step(window.ctx, advance);
  }
}

TEST(RowOps, NgramTakesTheLongestAndLatestMatch) {
  const auto propose = [](const Tokens& tokens, int32_t min, int32_t max, int32_t k,
                          int32_t limit = kMaxLen, bool keeps_drafts = false,
                          int32_t sources = kAllSources) {
    Window window(Tokens(static_cast<size_t>(k), -1), {}, static_cast<int32_t>(tokens.size()),
                  limit);
    std::copy(tokens.begin(), tokens.end(), window.s.history + kMaxLen);
    window.s.sources[1] = sources;
    propose_ngram(window.ctx, {.inputs = window.in,
                               .sequences = window.s,
                               .max_seqs = 1,
                               .min_tokens = min,
                               .max_tokens = max,
                               .keeps_drafts = keeps_drafts});
    const int32_t* drafts = window.s.draft_tokens + k;
    return Tokens(drafts, drafts + window.s.draft_len[1]);
  };
  const Tokens twice = {1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3};
  EXPECT_EQ(propose(twice, 1, 3, 4), (Tokens{9, 8, 2, 3}));  // the longer match, though earlier
  EXPECT_EQ(propose(twice, 1, 2, 4), (Tokens{7, 6, 1, 2}));  // of two equal matches the later
  EXPECT_EQ(propose(twice, 4, 6, 4), Tokens{});
  EXPECT_EQ(propose(twice, 1, 2, 4, 14), (Tokens{7, 6}));  // two more tokens fit
  EXPECT_EQ(propose({4, 5, 6}, 1, 3, 4), Tokens{});
  EXPECT_EQ(propose({4}, 1, 3, 4), Tokens{});
  EXPECT_EQ(propose({5, 5, 5}, 1, 4, 4), (Tokens{5}));  // 5 5 has followed 5 5 once: overlapping
  EXPECT_EQ(propose({5, 5, 5, 5}, 1, 2, 4), (Tokens{5}));
  // In front of a model: what a match gives, or the drafts that are there.
  EXPECT_EQ(propose({5, 5, 5, 5}, 1, 2, 4, kMaxLen, true), (Tokens{5}));
  EXPECT_EQ(propose({4, 5, 6}, 1, 3, 4, kMaxLen, true), Tokens(4, -1));
  // A sequence may have drafts of the one or the other alone.
  const int32_t model = source_bit(DraftSource::kModel);
  const int32_t lookup = source_bit(DraftSource::kLookup);
  EXPECT_EQ(propose({5, 5, 5, 5}, 1, 2, 4, kMaxLen, true, lookup), (Tokens{5}));
  EXPECT_EQ(propose({4, 5, 6}, 1, 3, 4, kMaxLen, true, lookup), Tokens{});
  EXPECT_EQ(propose({5, 5, 5, 5}, 1, 2, 4, kMaxLen, true, model), Tokens(4, -1));
  EXPECT_EQ(propose({4, 5, 6}, 1, 3, 4, kMaxLen, true, model), Tokens(4, -1));
}

TEST(RowOps, AWindowSaysWhereItsDraftsCameFrom) {
  Window window({7, 8, 9}, {7, 8, 1, 4});
  EXPECT_EQ(window.judge().source, DraftSource::kModel);
  Window matched({7, 7, 7}, {7, 7, 7, 7});
  std::fill_n(matched.s.history + kMaxLen, 5, 7);
  propose_ngram(matched.ctx, {.inputs = matched.in,
                              .sequences = matched.s,
                              .max_seqs = 1,
                              .min_tokens = 1,
                              .max_tokens = 3,
                              .keeps_drafts = true});
  EXPECT_EQ(matched.judge().source, DraftSource::kLookup);
  // The next drafts are the model's, unless there is a match again.
  EXPECT_EQ(matched.s.draft_source[1], static_cast<int32_t>(DraftSource::kModel));
}

TEST(RowOps, DraftsGoToTheColumnOfTheStepCounter) {
  Window window({0, 0, 0}, {});
  int32_t step = -1;
  const int32_t drawn[1] = {21};
  begin_draft_steps(window.ctx, {.inputs = window.in,
                                 .sequences = window.s,
                                 .drawn = drawn,
                                 .rows = window.rows,
                                 .current_draft_step = &step});
  EXPECT_EQ(step, 1);
  EXPECT_EQ(window.rows.positions[0], 5);
  EXPECT_EQ(window.rows.token_ids[0], 21);
  step = 2;
  const int32_t later[1] = {23};
  store_draft(
      window.ctx,
      {.current_draft_step = &step, .rows = window.rows, .sequences = window.s, .drawn = later});
  const int32_t* drafts = window.s.draft_tokens + 3;
  EXPECT_EQ(Tokens(drafts, drafts + 3), (Tokens{21, 0, 23}));
}

// The drafter's probability of each draft in turn, on one sequence; drafts are 20, 21, ... Returns
// what keep_drafting says after begin_draft_steps and after each step.
std::vector<int32_t> draft_with(Window& window, const std::vector<float>& probabilities) {
  int32_t step = -1;
  int32_t keep_drafting = -7;
  int32_t drawn = 20;
  float probability = probabilities[0];
  const DraftStop stop{
      .probabilities = &probability, .threshold = 0.5f, .keep_drafting = &keep_drafting};
  begin_draft_steps(window.ctx, {.inputs = window.in,
                                 .sequences = window.s,
                                 .drawn = &drawn,
                                 .rows = window.rows,
                                 .current_draft_step = &step,
                                 .stop = stop});
  std::vector<int32_t> kept = {keep_drafting};
  for (size_t j = 1; j < probabilities.size(); ++j) {
    drawn = 20 + static_cast<int32_t>(j);
    probability = probabilities[j];
    keep_drafting = -7;
    store_draft(window.ctx, {.current_draft_step = &step,
                             .rows = window.rows,
                             .sequences = window.s,
                             .drawn = &drawn,
                             .stop = stop});
    advance_draft_step(window.ctx, {.current_draft_step = &step,
                                    .rows = window.rows,
                                    .drawn = &drawn,
                                    .sequences = window.s,
                                    .stop = stop,
                                    .groups = {},
                                    .num_groups = 0});
    kept.push_back(keep_drafting);
  }
  return kept;
}

TEST(RowOps, AnEarlyStopKeepsTheDraftThatItDrew) {
  struct Case {
    std::vector<float> probabilities;
    int32_t draft_len;
  };
  for (const Case& c : {Case{{0.9f, 0.9f, 0.9f, 0.9f}, 4}, Case{{0.4f, 0.9f, 0.9f, 0.9f}, 1},
                        Case{{0.9f, 0.4f, 0.9f, 0.9f}, 2}, Case{{0.9f, 0.9f, 0.4f, 0.9f}, 3},
                        Case{{0.9f, 0.9f, 0.9f, 0.4f}, 4}, Case{{0.9f, 0.5f, 0.9f, 0.4f}, 4}}) {
    Window window({0, 0, 0, 0}, {});
    draft_with(window, c.probabilities);
    EXPECT_EQ(window.s.draft_len[1], c.draft_len);
    const int32_t* drafts = window.s.draft_tokens + 4;
    for (int32_t j = 0; j < c.draft_len; ++j) EXPECT_EQ(drafts[j], 20 + j);
  }
  // Only two tokens still fit; a later early stop does not change that.
  Window window({0, 0, 0, 0}, {}, /*known_len=*/5, /*limit=*/7);
  draft_with(window, {0.9f, 0.9f, 0.4f, 0.9f});
  EXPECT_EQ(window.s.draft_len[1], 2);
}

TEST(RowOps, DraftingGoesOnOnlyWhileARowIsLive) {
  const auto kept = [](const std::vector<float>& probabilities, int32_t limit = kMaxLen,
                       bool is_active = true) {
    Window window(std::vector<int32_t>(probabilities.size()), {}, /*known_len=*/5, limit);
    window.s.is_active[1] = is_active ? 1 : 0;
    return draft_with(window, probabilities);
  };
  EXPECT_EQ(kept({0.9f, 0.9f, 0.9f, 0.9f}), (std::vector<int32_t>{1, 1, 1, 0})) << "to the last";
  EXPECT_EQ(kept({0.9f, 0.4f, 0.9f, 0.9f}), (std::vector<int32_t>{1, 0, 0, 0}));
  EXPECT_EQ(kept({0.4f, 0.9f, 0.9f, 0.9f}), (std::vector<int32_t>{0, 0, 0, 0}));
  EXPECT_EQ(kept({0.9f, 0.9f, 0.9f, 0.9f}, /*limit=*/7), (std::vector<int32_t>{1, 0, 0, 0}));
  EXPECT_EQ(kept({0.9f, 0.9f, 0.9f, 0.9f}, kMaxLen, /*is_active=*/false),
            (std::vector<int32_t>{0, 0, 0, 0}));
  EXPECT_EQ(kept({0.9f}), (std::vector<int32_t>{0})) << "k = 1 has no draft step";
}

}  // namespace
}  // namespace paceline
