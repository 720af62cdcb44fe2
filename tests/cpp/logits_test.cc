// SPDX-License-Identifier: Apache-2.0
//
// The logits pipeline up to truncation and the counts of tokens, on literal cases and against a
// reference in double precision. PACELINE_SEED overrides the seed of random cases; failures print
// it.

#include "sample/logits.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "ops/ops.h"
#include "scheduler/iteration_plan.h"
#include "support/logits_reference.h"
#include "support/op_checks.h"
#include "support/sampling_arrays.h"

namespace paceline::testing {
namespace {

using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;

// --- adjust_logits -------------------------------------------------------------------------------

// A sequence in sequence slot 1 of two whose settled tokens are `settled`, and a window of drafts.
struct Window {
  Window(Sampling sampling, Tokens settled, Tokens drafts = {}, int32_t vocab = 8)
      : sampling(sampling), settled(settled), drafts(drafts), arrays(2, vocab) {
    arrays.set(1, sampling);
    arrays.settle(1, settled);
    history.assign(2 * kMaxLen, 1);
    std::copy(settled.begin(), settled.end(), history.begin() + kMaxLen);
    known_len = {7, static_cast<int32_t>(settled.size())};
    num_stop_ids = {0, static_cast<int32_t>(sampling.stop_ids.size())};
    stop_ids.assign(2 * kMaxStopIds, 0);
    std::copy(sampling.stop_ids.begin(), sampling.stop_ids.end(), stop_ids.begin() + kMaxStopIds);
    // Two rows of another sequence lie before the window.
    seq_slot = {0, 0};
    positions = {5, 6};
    token_ids = {2, 3};
    for (size_t r = 0; r <= drafts.size(); ++r) {
      seq_slot.push_back(1);
      positions.push_back(known_len[1] - 1 + static_cast<int32_t>(r));
      token_ids.push_back(r == 0 ? settled.back() : drafts[r - 1]);
    }
  }

  // The logits of row `row` of the window.
  Logits adjust(Logits logits, int32_t row = 0) {
    const int32_t one = 1;
    const int32_t pass_row = 2 + row;
    CpuContext ctx = context_of(1);
    adjust_logits(ctx,
                  params(&one, 1, logits.data(), static_cast<int64_t>(logits.size()), &pass_row));
    return logits;
  }
  AdjustLogitsParams params(const int32_t* num_rows, int32_t max_rows, float* logits,
                            int64_t stride, const int32_t* row_index) {
    return {.num_rows = num_rows,
            .max_rows = max_rows,
            .logits = logits,
            .logits_stride = stride,
            .row_index = row_index,
            .seq_slot = seq_slot.data(),
            .positions = positions.data(),
            .token_ids = token_ids.data(),
            .sequences = {.known_len = known_len.data(),
                          .num_stop_ids = num_stop_ids.data(),
                          .stop_ids = stop_ids.data(),
                          .history = history.data(),
                          .history_stride = kMaxLen},
            .sampling = arrays.state()};
  }

  static constexpr int32_t kMaxLen = 64;
  Sampling sampling;
  Tokens settled, drafts;
  SamplingArrays arrays;
  Tokens history, known_len, num_stop_ids, stop_ids, seq_slot, positions, token_ids;
};

TEST(AdjustLogits, BiasIsAddedBeforePenalties) {
  Window window({.bias = {{2, 3.0f}, {5, -1.5f}}, .repetition_penalty = 2.0f, .prompt_len = 1},
                {0, 2});
  // Token 2 is positive only with its bias.
  expect_same(window.adjust({1, 1, -1, 1, 1, 1, 1, 1}), {0.5f, 1, 1, 1, 1, -0.5f, 1, 1});
}

TEST(AdjustLogits, BiasOfNoTokenDoesNothing) {
  Window window({.bias = {{-1, 3.0f}, {8, 3.0f}, {7, kInf}, {6, -kInf}}}, {0});
  expect_same(window.adjust({1, 1, 1, 1, 1, 1, 1, 1, 9}), {1, 1, 1, 1, 1, 1, -kInf, kInf, 9});
}

TEST(AdjustLogits, RepetitionIsOfPromptAndOutputOnce) {
  Window window({.repetition_penalty = 2.0f, .prompt_len = 3}, {0, 1, 1, 2, 2});
  expect_same(window.adjust({4, -4, 4, 4, -4, 0, 1, 1}), {2, -8, 2, 4, -4, 0, 1, 1});
}

TEST(AdjustLogits, PresenceAndFrequencyAreOfTheOutput) {
  Window presence({.presence_penalty = 0.5f, .prompt_len = 2}, {0, 1, 2, 2, 1});
  expect_same(presence.adjust({1, 1, 1, 1, 1, 1, 1, 1}), {1, 0.5f, 0.5f, 1, 1, 1, 1, 1});
  Window frequency({.frequency_penalty = 0.25f, .prompt_len = 2}, {0, 1, 2, 2, 1});
  expect_same(frequency.adjust({1, 1, 1, 1, 1, 1, 1, 1}), {1, 0.75f, 0.5f, 1, 1, 1, 1, 1});
  Window all({.repetition_penalty = 2.0f,
              .presence_penalty = -1.0f,
              .frequency_penalty = 0.25f,
              .prompt_len = 2},
             {0, 1, 2, 2, 1});
  expect_same(all.adjust({1, 1, -1, 1, 1, 1, 1, 1}), {0.5f, 1.25f, -1.5f, 1, 1, 1, 1, 1});
}

TEST(AdjustLogits, ARowSeesTheDraftsUpToItsOwn) {
  Window window({.repetition_penalty = 2.0f, .frequency_penalty = 1.0f, .prompt_len = 2}, {0, 1, 2},
                {3, 2, 3, -2, 9});
  // Two of the logits belong to no token.
  const Logits flat(10, 8.0f);
  expect_same(window.adjust(flat, 0), {4, 4, 3, 8, 8, 8, 8, 8, 8, 8});
  expect_same(window.adjust(flat, 1), {4, 4, 3, 3, 8, 8, 8, 8, 8, 8});
  expect_same(window.adjust(flat, 2), {4, 4, 2, 3, 8, 8, 8, 8, 8, 8});
  expect_same(window.adjust(flat, 3), {4, 4, 2, 2, 8, 8, 8, 8, 8, 8});
  // A draft that could not be drawn, and one that the target does not have.
  expect_same(window.adjust(flat, 4), {4, 4, 2, 2, 8, 8, 8, 8, 8, 8});
  expect_same(window.adjust(flat, 5), {4, 4, 2, 2, 8, 8, 8, 8, 8, 8});
}

TEST(AdjustLogits, ABadWordIsBannedAfterItsBeginning) {
  const Sampling sampling = {.bad_words = {{6}, {1, 2, 3}, {2, 4}, {9, 2, 5}, {0, 0, 1, 2, 7}, {8}},
                             .prompt_len = 2};
  const Logits flat(8, 1.0f);
  const auto banned = [&](const Tokens& settled, const Tokens& drafts) {
    Window window(sampling, settled, drafts);
    const Logits logits = window.adjust(flat, static_cast<int32_t>(drafts.size()));
    Tokens tokens;
    for (int32_t id = 0; id < 8; ++id) {
      if (logits[static_cast<size_t>(id)] == -kInf) tokens.push_back(id);
    }
    return tokens;
  };
  EXPECT_EQ(banned({0, 1, 2}, {}), (Tokens{3, 4, 6})) << "a word begins in the prompt";
  EXPECT_EQ(banned({0}, {}), (Tokens{6}));
  EXPECT_EQ(banned({2}, {}), (Tokens{4, 6})) << "nothing stands before it";
  EXPECT_EQ(banned({5, 0, 1}, {2}), (Tokens{3, 4, 6})) << "settled tokens, then a draft";
  EXPECT_EQ(banned({5, 5}, {1, 2}), (Tokens{3, 4, 6})) << "drafts only";
  EXPECT_EQ(banned({5, 5}, {1, 2, 0}), (Tokens{6})) << "the beginning is not the newest";
  EXPECT_EQ(banned({5, 0, 0}, {1, 2}), (Tokens{3, 4, 6, 7}));
}

TEST(AdjustLogits, OnlyAllowedTokensStay) {
  Window window({.bias = {{3, 2.0f}}, .allowed = {3, 40, 69}}, {0}, {}, 70);
  Logits want(70, -kInf);
  want[3] = 3.0f;
  want[40] = want[69] = 1.0f;
  expect_same(window.adjust(Logits(70, 1.0f)), want);
}

TEST(AdjustLogits, EachRowOfAWindowHasItsOwnMask) {
  Window window({.allowed = {1, 3, 40, 69}, .masks = {{3, 40}, {}, {2, 69}}}, {0}, {5, 6}, 70);
  for (int32_t row = 0; row < 3; ++row) {
    Logits want(70, -kInf);
    if (row == 0) want[3] = want[40] = 1.0f;
    if (row == 2) want[69] = 1.0f;
    expect_same(window.adjust(Logits(70, 1.0f), row), want);
  }
}

TEST(AdjustLogits, StopIdsAreBannedWhileTheOutputIsShort) {
  const Sampling sampling = {.prompt_len = 2, .min_tokens = 3, .stop_ids = {1, 6, 100}};
  const Logits flat(8, 1.0f);
  const Logits banned = {1, -kInf, 1, 1, 1, 1, -kInf, 1};
  // Output tokens 0, 1 and 2 are no stop token; the fourth may be one.
  Window window(sampling, {0, 0}, {3, 3, 3, 3});
  for (int32_t row = 0; row < 3; ++row) expect_same(window.adjust(flat, row), banned);
  for (int32_t row = 3; row < 5; ++row) expect_same(window.adjust(flat, row), flat);
  expect_same(Window(sampling, {0, 0, 3, 3}).adjust(flat), banned);
  expect_same(Window(sampling, {0, 0, 3, 3, 3}).adjust(flat), flat);
}

TEST(AdjustLogits, NanStaysAndIsBannedLikeOthers) {
  Window window({.repetition_penalty = 2.0f, .bad_words = {{1}}}, {0, 1, 2});
  expect_same(window.adjust({kNan, kNan, -kInf, kInf, 1, 1, 1, 1}),
              {kNan, -kInf, -kInf, kInf, 1, 1, 1, 1});
}

TEST(AdjustLogits, OtherRowsAreLeftAlone) {
  const Sampling sampling = {.bias = {{0, 1.0f}}, .repetition_penalty = 2.0f};
  const Logits flat(10, 1.0f);
  Window window(sampling, {0, 1, 2}, {3});
  window.seq_slot[3] = -1;
  expect_same(window.adjust(flat, 1), flat);
  expect_same(window.adjust(flat, -1), flat);  // of slot 0, which adjusts nothing
  window.positions[2] = 1;                     // of a score
  expect_same(window.adjust(flat, 0), flat);
  window.positions[2] = 2;
  expect_same(window.adjust(flat, 0), {1, 0.5f, 0.5f, 1, 1, 1, 1, 1, 1, 1});
}

TEST(AdjustLogits, WithAllTokensBannedNoneIsDrawn) {
  Window window({.bad_words = {{0}, {2}}, .allowed = {0, 2, 3}}, {0, 1, 2});
  const auto draw_from = [](const Logits& logits) {
    const int32_t one = 1;
    const int32_t zero = 0;
    const uint64_t seed = 3;
    const float temperature = 1.0f;
    int32_t token = -99;
    CpuContext ctx = context_of(1);
    draw(ctx, {.num_rows = &one,
               .max_rows = 1,
               .logits = logits.data(),
               .logits_stride = 8,
               .vocab_limit = 8,
               .row_index = &zero,
               .seq_slot = &zero,
               .positions = &zero,
               .seeds = &seed,
               .temperatures = &temperature,
               .tokens = &token});
    return token;
  };
  EXPECT_EQ(draw_from(window.adjust(Logits(8, 1.0f))), 3) << "all but one are banned";
  window.arrays.set(1, {.bad_words = {{0}, {2}, {3}}, .allowed = {0, 2, 3}});
  EXPECT_EQ(draw_from(window.adjust(Logits(8, 1.0f))), -2) << "no valid logit";
}

Sampling random_adjustment(Random& random, int32_t vocab, const Tokens& tokens,
                           int32_t prompt_len) {
  Sampling s{.prompt_len = prompt_len};
  if (random.one_in(2)) s.repetition_penalty = random.one_of({0.7f, 1.1f, 1.3f, 2.0f});
  if (random.one_in(2)) s.presence_penalty = random.one_of({-1.5f, 0.1f, 0.7f, 2.0f});
  if (random.one_in(2)) s.frequency_penalty = random.one_of({-0.3f, 0.2f, 0.9f});
  for (int32_t id = 0; id < vocab; ++id) {
    if (random.one_in(10)) s.bias.emplace_back(id, random.normal(3.0f));
  }
  if (random.one_in(3)) {
    for (int32_t id = 0; id < vocab; ++id) {
      if (!random.one_in(3)) s.allowed.push_back(id);
    }
  }
  const int32_t num_bad_words = random.below(6);
  for (int32_t i = 0; i < num_bad_words; ++i) {
    const int32_t before = std::min(random.below(4), static_cast<int32_t>(tokens.size()));
    // Often a word that is about to be completed.
    Tokens word = random.one_in(3) ? random.tokens(before, vocab)
                                   : Tokens(tokens.end() - before, tokens.end());
    word.push_back(random.below(vocab));
    s.bad_words.push_back(word);
  }
  s.min_tokens = random.below(12);
  s.stop_ids = random.tokens(random.below(kMaxStopIds + 1), vocab + 3);
  return s;
}

TEST(AdjustLogits, MatchesTheReferenceAndAWindowIsPlainDecoding) {
  TRACE_SEED();
  Random random(1);
  for (int trial = 0; trial < 600; ++trial) {
    const int32_t vocab = random.one_of({5, 32, 33, 64, 100});
    const Tokens tokens = random.tokens(2 + random.below(40), vocab);
    const auto length = static_cast<int32_t>(tokens.size());
    const int32_t num_drafts = random.below(std::min(length, 17));
    const Tokens settled(tokens.begin(), tokens.end() - num_drafts);
    const Tokens drafts(tokens.end() - num_drafts, tokens.end());
    const int32_t prompt_len = 1 + random.below(static_cast<int32_t>(settled.size()));
    const Sampling sampling = random_adjustment(random, vocab, tokens, prompt_len);
    Logits logits(static_cast<size_t>(vocab));
    for (float& logit : logits) logit = random.one_in(20) ? -kInf : random.normal(4.0f);

    const Logits in_window = Window(sampling, settled, drafts, vocab).adjust(logits, num_drafts);
    const Logits plain = Window(sampling, tokens, {}, vocab).adjust(logits, 0);
    expect_same(in_window, plain);
    const std::vector<double> want = reference_adjusted(sampling, tokens, logits);
    for (size_t id = 0; id < logits.size(); ++id) {
      if (want[id] == kImpossible) {
        ASSERT_EQ(in_window[id], -kInf) << "trial " << trial << " id " << id;
      } else {
        ASSERT_NEAR(in_window[id], want[id], 1e-5) << "trial " << trial << " id " << id;
      }
    }
  }
}

TEST(AdjustLogits, RowsAreIndependent) {
  TRACE_SEED();
  Random random(2);
  constexpr int32_t kVocab = 77;
  constexpr int32_t kStride = kVocab + 3;
  const Tokens settled = random.tokens(20, kVocab);
  const Tokens drafts = random.tokens(16, kVocab);
  Tokens tokens = settled;
  tokens.insert(tokens.end(), drafts.begin(), drafts.end());
  Window window(random_adjustment(random, kVocab, tokens, 5), settled, drafts, kVocab);
  Logits logits(17 * kStride);
  for (float& logit : logits) logit = random.normal(4.0f);
  Logits alone;
  for (int32_t row = 0; row < 17; ++row) {
    const Logits got = window.adjust(
        Logits(logits.begin() + row * kStride, logits.begin() + (row + 1) * kStride), row);
    alone.insert(alone.end(), got.begin(), got.end());
  }
  for (const int num_threads : {1, 2, 3}) {
    Logits together = logits;
    const int32_t num_rows = 17;
    Tokens row_index(17);
    for (int32_t row = 0; row < 17; ++row) row_index[static_cast<size_t>(row)] = 2 + row;
    CpuContext ctx = context_of(num_threads);
    adjust_logits(ctx, window.params(&num_rows, 17, together.data(), kStride, row_index.data()));
    expect_same(together, alone);
  }
}

// --- counts --------------------------------------------------------------------------------------

// A sequence in sequence slot 1 and the counts of its tokens. Two others are decoding: the one in
// slot 0 adjusts nothing, the one in slot 2 does but emits nothing.
struct Counter {
  explicit Counter(int32_t prompt_len) : arrays(3, kVocab) {
    arrays.set(1, {.prompt_len = prompt_len});
    arrays.set(2, {});
  }
  void prefill(int32_t start, const Tokens& tokens, RowKind kind = RowKind::kPrefillPartial) {
    Tokens rows = {3, 3, 3, 3};  // of the decoding ones: stale
    rows.insert(rows.end(), tokens.begin(), tokens.end());
    Tokens indptr = {0, 2, 4, static_cast<int32_t>(rows.size())};
    const auto decode = static_cast<int32_t>(RowKind::kDecode);
    Tokens kinds = {decode, decode, static_cast<int32_t>(kind)};
    Tokens starts = {0, 0, start};
    CpuContext ctx = context_of(1);
    IterationCounts counts = {.num_seqs = num_seqs};
    count_prefill_tokens(ctx, {.inputs = {.counts = &counts,
                                          .seq_slot = batch_slots.data(),
                                          .kind = kinds.data(),
                                          .prefill_start = starts.data(),
                                          .verify_indptr = indptr.data(),
                                          .prefill_tokens = rows.data()},
                               .sampling = arrays.state(),
                               .max_seqs = 3});
  }
  void emit(const Tokens& tokens) {
    SequenceResult results[3];
    results[0].emitted_len = 1;
    results[0].tokens[0] = 3;
    results[2].emitted_len = static_cast<int32_t>(tokens.size());
    std::fill_n(results[2].tokens, kMaxDraftTokens + 1, 4);
    std::copy(tokens.begin(), tokens.end(), results[2].tokens);
    CpuContext ctx = context_of(1);
    IterationCounts counts = {.num_seqs = num_seqs};
    count_emitted_tokens(ctx, {.inputs = {.counts = &counts, .seq_slot = batch_slots.data()},
                               .sampling = arrays.state(),
                               .results = results,
                               .max_seqs = 3});
  }
  void clear(const Tokens& slots) {
    const auto num_seqs = static_cast<int32_t>(slots.size());
    CpuContext ctx = context_of(1);
    clear_counts(ctx, {.num_seqs = &num_seqs,
                       .max_seqs = 4,
                       .seq_slots = slots.data(),
                       .sampling = arrays.state()});
  }
  void expect_tokens(const Tokens& tokens) const {
    SamplingArrays want(3, kVocab);
    want.set(1, {.prompt_len = arrays.prompt_len[1]});
    want.settle(1, tokens);
    EXPECT_EQ(arrays.counts, want.counts);
    EXPECT_EQ(arrays.seen, want.seen);
  }

  static constexpr int32_t kVocab = 40;
  SamplingArrays arrays;
  int32_t num_seqs = 3;
  Tokens batch_slots = {0, 2, 1};
};

TEST(Counts, APromptIsSeenAndOutputCounted) {
  Counter counter(/*prompt_len=*/3);
  counter.prefill(0, {5, 39});
  counter.expect_tokens({5, 39});
  counter.prefill(2, {5}, RowKind::kPrefillFinal);
  counter.emit({39});
  counter.expect_tokens({5, 39, 5, 39});
  counter.emit({});
  counter.emit({7, 7, 5});
  counter.expect_tokens({5, 39, 5, 39, 7, 7, 5});
  counter.emit({-2, Counter::kVocab});
  counter.expect_tokens({5, 39, 5, 39, 7, 7, 5});
}

TEST(Counts, APreemptedSequenceIsCountedAgain) {
  const Tokens tokens = {5, 6, 5, 39, 7, 7, 5};
  Counter counter(/*prompt_len=*/3);
  counter.prefill(0, {5, 6, 5}, RowKind::kPrefillFinal);
  counter.emit({39, 7, 7});
  counter.emit({5});
  for (size_t cut = 0; cut <= tokens.size(); ++cut) {
    counter.clear({1});
    counter.expect_tokens({});
    const auto middle = tokens.begin() + static_cast<int64_t>(cut);
    counter.prefill(0, Tokens(tokens.begin(), middle));
    counter.prefill(static_cast<int32_t>(cut), Tokens(middle, tokens.end()));
    counter.expect_tokens(tokens);
  }
}

TEST(Counts, OnlyListedSlotsThatAdjustAreCleared) {
  Counter counter(/*prompt_len=*/0);
  counter.emit({1, 2});
  counter.arrays.counts[3] = 17;
  counter.clear({0});
  EXPECT_EQ(counter.arrays.counts[3], 17) << "slot 0 adjusts nothing";
  counter.arrays.counts[3] = 0;
  counter.clear({});
  counter.expect_tokens({1, 2});
  counter.clear({0, 1});
  counter.expect_tokens({});
}

}  // namespace
}  // namespace paceline::testing
