// SPDX-License-Identifier: Apache-2.0
// Acceptance and the row ops on literal cases, and the recorded program.

#include "sample/accept.h"

#include <gtest/gtest.h>

#include <vector>

#include "device/cpu_context.h"
#include "device/device_arena.h"
#include "device/program.h"
#include "metadata/group_metadata.h"
#include "metadata/pass_rows.h"
#include "sample/synthetic_rates.h"
#include "speculate/row_ops.h"
#include "wire/batch_shape.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace {

constexpr int32_t kMaxLen = 32;

// One decoding sequence in sequence slot 1 of two, known tokens 0..known_len-1.
struct Window {
  Window(std::vector<int32_t> drafts, std::vector<int32_t> draws, int32_t known_len = 5,
         int32_t limit = kMaxLen)
      : draws(std::move(draws)) {
    const auto ints = [&](int64_t n) { return arena.allocate<int32_t>(n, "test"); };
    const auto k = static_cast<int32_t>(drafts.size());
    s = {.known_len = ints(2),
         .limit = ints(2),
         .max_drafts = ints(2),
         .is_active = ints(2),
         .seed = arena.allocate<uint64_t>(2, "test"),
         .temperature = arena.allocate<float>(2, "test"),
         .num_stop_ids = ints(2),
         .stop_ids = ints(2 * kMaxStopIds),
         .history = ints(2 * kMaxLen),
         .history_stride = kMaxLen,
         .draft_tokens = ints(2 * k),
         .draft_len = ints(2),
         .num_draft_tokens = k};
    s.known_len[1] = known_len;
    s.limit[1] = limit;
    s.max_drafts[1] = k;
    s.is_active[1] = 1;
    s.draft_len[1] = std::min(k, limit - known_len);
    for (int32_t t = 0; t < known_len; ++t) s.history[kMaxLen + t] = t;
    std::copy(drafts.begin(), drafts.end(), s.draft_tokens + k);
    in = {.counts = &counts,
          .seq_slot = ints(1),
          .kind = ints(1),
          .prefill_start = ints(1),
          .next_token = ints(1),
          .num_drafts = ints(1),
          .verify_indptr = ints(2),
          .first_indptr = ints(2),
          .logit_indptr = ints(2),
          .logit_rows = ints(kMaxLen),
          .prefill_tokens = ints(kMaxLen)};
    in.counts->num_seqs = in.counts->num_drafting = 1;
    in.num_drafts[0] = k;
    in.seq_slot[0] = 1;
    in.kind[0] = static_cast<int32_t>(RowKind::kDecode);
    in.verify_indptr[1] = in.logit_indptr[1] = in.counts->num_verify_rows = k + 1;
    in.first_indptr[1] = in.counts->num_first_rows = 2;
    const int32_t capacity = kMaxLen;
    rows = {.num_rows = ints(1),
            .token_ids = ints(capacity),
            .positions = ints(capacity),
            .seq_slot = ints(capacity),
            .capacity = capacity};
  }

  SequenceResult judge(AcceptMethod method = AcceptMethod::kCoupled,
                       std::vector<float> rates = {}) {
    AcceptParams params{.inputs = in,
                        .sequences = s,
                        .target_tokens = draws.data(),
                        .results = &result,
                        .method = method,
                        .synthetic_rate = {}};
    std::copy(rates.begin(), rates.end(), params.synthetic_rate);
    accept(ctx, params);
    return result;
  }

  std::vector<int32_t> emitted() const {
    return {result.tokens, result.tokens + result.emitted_len};
  }

  CpuContext ctx;
  DeviceArena arena;
  SequenceState s{};
  IterationCounts counts{};
  StagedInputs in{};
  PassRows rows{};
  std::vector<int32_t> draws;
  SequenceResult result;
};

using Tokens = std::vector<int32_t>;

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
  window.in.kind[0] = static_cast<int32_t>(RowKind::kDecode);
  int32_t last_row = -1;
  assemble_first_rows(window.ctx, {window.in, window.s, window.rows, FirstRows::kNewest,
                                   /*results=*/nullptr, &last_row});
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
                          int32_t limit = kMaxLen) {
    Window window(Tokens(static_cast<size_t>(k), -1), {}, static_cast<int32_t>(tokens.size()),
                  limit);
    std::copy(tokens.begin(), tokens.end(), window.s.history + kMaxLen);
    propose_ngram(window.ctx, {.inputs = window.in,
                               .sequences = window.s,
                               .max_seqs = 1,
                               .min_tokens = min,
                               .max_tokens = max});
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
