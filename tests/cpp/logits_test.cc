// SPDX-License-Identifier: Apache-2.0
//
// The pipeline from logits to what is drawn, on literal cases and against a reference in double
// precision. PACELINE_SEED overrides the seed of random cases; failures print it.

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
#include "sample/truncate_rules.h"
#include "support/logits_reference.h"
#include "support/sampling_arrays.h"
#include "support/seed.h"
#include "wire/batch_shape.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"

namespace paceline::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;

CpuContext context_of(int num_threads) {
  static ThreadPool threads(3);
  return {.num_threads = num_threads, .threads = num_threads > 1 ? &threads : nullptr};
}

class Random {
 public:
  explicit Random(uint64_t salt) : engine_(base_seed() * 1000003 + salt) {}
  float normal(float scale = 1.0f) { return std::normal_distribution<float>(0.0f, scale)(engine_); }
  int32_t below(int32_t n) { return static_cast<int32_t>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int32_t n) { return below(n) == 0; }
  Tokens tokens(int32_t count, int32_t vocab) {
    Tokens tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = below(vocab);
    return tokens;
  }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int32_t>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

// Same bits; any NaN is like any other.
void expect_same(const Logits& got, const Logits& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t id = 0; id < got.size(); ++id) {
    if (std::isnan(want[id])) {
      EXPECT_TRUE(std::isnan(got[id])) << "id " << id;
    } else {
      EXPECT_EQ(bits_of(got[id]), bits_of(want[id]))
          << "id " << id << ": " << got[id] << ", expected " << want[id];
    }
  }
}

// --- adjust_logits -------------------------------------------------------------------------------

// A sequence in slot 1 of two whose settled tokens are `settled`, and a window of drafts.
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
  // Two of the logits are of no token.
  const Logits flat(10, 8.0f);
  expect_same(window.adjust(flat, 0), {4, 4, 3, 8, 8, 8, 8, 8, 8, 8});
  expect_same(window.adjust(flat, 1), {4, 4, 3, 3, 8, 8, 8, 8, 8, 8});
  expect_same(window.adjust(flat, 2), {4, 4, 2, 3, 8, 8, 8, 8, 8, 8});
  expect_same(window.adjust(flat, 3), {4, 4, 2, 2, 8, 8, 8, 8, 8, 8});
  // A draft that could not be drawn, and one that the target does not have.
  expect_same(window.adjust(flat, 4), {4, 4, 2, 2, 8, 8, 8, 8, 8, 8});
  expect_same(window.adjust(flat, 5), {4, 4, 2, 2, 8, 8, 8, 8, 8, 8});
}

TEST(AdjustLogits, BadWordsEndWhereTheirBeginningStands) {
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

TEST(AdjustLogits, WhereEverythingIsBannedNothingIsDrawn) {
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
    // Often one that is about to happen.
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
      if (want[id] == kNoChance) {
        ASSERT_EQ(in_window[id], -kInf) << "trial " << trial << " id " << id;
      } else {
        ASSERT_NEAR(in_window[id], want[id], 1e-5) << "trial " << trial << " id " << id;
      }
    }
  }
}

TEST(AdjustLogits, RowsKnowNothingOfEachOther) {
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

// A sequence in slot 1, and what its tokens have been counted as. Two others are decoding: that of
// slot 0 adjusts nothing, that of slot 2 does but emits nothing.
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
    const auto num_slots = static_cast<int32_t>(slots.size());
    CpuContext ctx = context_of(1);
    clear_counts(ctx, {.num_slots = &num_slots,
                       .max_slots = 4,
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

// --- truncate_logits -----------------------------------------------------------------------------

Logits truncate(Logits logits, const Sampling& sampling, int32_t padding = 0) {
  SamplingArrays arrays(2, static_cast<int32_t>(logits.size()));
  arrays.set(1, sampling);
  const int32_t one = 1;
  const int32_t zero = 0;
  const int32_t slot = 1;
  CpuContext ctx = context_of(1);
  truncate_logits(ctx, {.num_rows = &one,
                        .max_rows = 1,
                        .logits = logits.data(),
                        .logits_stride = static_cast<int64_t>(logits.size()),
                        .vocab_limit = static_cast<int32_t>(logits.size()) - padding,
                        .row_index = &zero,
                        .seq_slot = &slot,
                        .temperatures = arrays.temperature.data(),
                        .sampling = arrays.state()});
  return logits;
}

// Ids that are left; their logits are as they were.
Tokens kept(const Logits& logits, const Sampling& sampling) {
  const Logits after = truncate(logits, sampling);
  Tokens ids;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (after[id] == -kInf || std::isnan(after[id])) continue;
    EXPECT_EQ(after[id], logits[id]);
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

Logits of_probabilities(const std::vector<double>& probabilities, double temperature = 1.0) {
  Logits logits;
  for (const double p : probabilities) {
    logits.push_back(static_cast<float>(3.0 + temperature * std::log(p)));
  }
  return logits;
}

TEST(TruncateLogits, TopKKeepsTiesAtItsEdge) {
  const Logits logits = {1, 5, 3, 3, -2, 3, 7};
  EXPECT_EQ(kept(logits, {.top_k = 1}), (Tokens{6}));
  EXPECT_EQ(kept(logits, {.top_k = 2}), (Tokens{1, 6}));
  for (const int32_t k : {3, 4, 5}) {
    EXPECT_EQ(kept(logits, {.top_k = k}), (Tokens{1, 2, 3, 5, 6})) << k;
  }
  EXPECT_EQ(kept(logits, {.top_k = 6}), (Tokens{0, 1, 2, 3, 5, 6}));
  for (const int32_t k : {0, 7, 8, 1 << 30}) {
    EXPECT_EQ(kept(logits, {.top_k = k}), (Tokens{0, 1, 2, 3, 4, 5, 6})) << k;
  }
  EXPECT_EQ(kept({-0.0f, 0.0f, -1.0f}, {.top_k = 1}), (Tokens{0, 1})) << "zeros are equal";
  EXPECT_EQ(kept({-3, -kInf, -2, kNan, -kInf}, {.top_k = 4}), (Tokens{0, 2}));
  // Neighbours among floats are told apart.
  const float below = std::nextafter(5.0f, 0.0f);
  EXPECT_EQ(kept({below, 5, std::nextafter(below, 0.0f)}, {.top_k = 1}), (Tokens{1}));
  EXPECT_EQ(kept({below, 5, std::nextafter(below, 0.0f)}, {.top_k = 2}), (Tokens{0, 1}));
}

TEST(TruncateLogits, TopPKeepsTheFewestThatReachIt) {
  const Logits logits = of_probabilities({0.1, 0.4, 0.2, 0.05, 0.25});
  EXPECT_EQ(kept(logits, {.top_p = 1e-9f}), (Tokens{1}));
  EXPECT_EQ(kept(logits, {.top_p = 0.399f}), (Tokens{1}));
  EXPECT_EQ(kept(logits, {.top_p = 0.401f}), (Tokens{1, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 0.649f}), (Tokens{1, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 0.651f}), (Tokens{1, 2, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 0.949f}), (Tokens{0, 1, 2, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 0.951f}), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept(logits, {.top_p = 1.0f}), (Tokens{0, 1, 2, 3, 4}));
  const Logits ties = of_probabilities({0.2, 0.4, 0.2, 0.2});
  EXPECT_EQ(kept(ties, {.top_p = 0.5f}), (Tokens{0, 1, 2, 3})) << "equals go together";
  EXPECT_EQ(kept({-0.0f, 0.0f, -1.0f}, {.top_p = 0.1f}), (Tokens{0, 1}));
  // Two halves, exactly: the first reaches one half, and the other equals it.
  EXPECT_EQ(kept({2, 2}, {.top_p = 0.5f}), (Tokens{0, 1}));
}

TEST(TruncateLogits, TopPIsReachedByASumThatEqualsIt) {
  // At this temperature integer logits have weights that are exact powers of two.
  const auto with = [](float top_p) {
    return Sampling{.temperature = 1.44269504f, .top_p = top_p};
  };
  const auto above = [](float top_p) { return std::nextafter(top_p, 1.0f); };
  const Logits halves = {-1, 0, -1};  // 1/4, 1/2, 1/4
  EXPECT_EQ(kept(halves, with(0.5f)), (Tokens{1}));
  EXPECT_EQ(kept(halves, with(above(0.5f))), (Tokens{0, 1, 2}));
  const Logits eighths = {-3, -1, -3, -2};  // 1/8, 1/2, 1/8, 1/4
  EXPECT_EQ(kept(eighths, with(0.5f)), (Tokens{1}));
  EXPECT_EQ(kept(eighths, with(above(0.5f))), (Tokens{1, 3}));
  EXPECT_EQ(kept(eighths, with(0.75f)), (Tokens{1, 3}));
  EXPECT_EQ(kept(eighths, with(above(0.75f))), (Tokens{0, 1, 2, 3}));
}

TEST(TruncateLogits, TopPIsAShareOfWhatTopKLeaves) {
  const Logits logits = of_probabilities({0.1, 0.4, 0.2, 0.05, 0.25});
  // 0.4, 0.25 of 0.65: the first alone is 0.615 of it.
  EXPECT_EQ(kept(logits, {.top_k = 2, .top_p = 0.61f}), (Tokens{1}));
  EXPECT_EQ(kept(logits, {.top_k = 2, .top_p = 0.62f}), (Tokens{1, 4}));
  EXPECT_EQ(kept(logits, {.top_k = 2, .top_p = 0.99f}), (Tokens{1, 4}));
}

TEST(TruncateLogits, MinPIsRelativeToTheHighest) {
  const Logits logits = of_probabilities({0.1, 0.4, 0.2, 0.05, 0.25});
  EXPECT_EQ(kept(logits, {.min_p = 1e-9f}), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept(logits, {.min_p = 0.249f}), (Tokens{0, 1, 2, 4}));
  EXPECT_EQ(kept(logits, {.min_p = 0.251f}), (Tokens{1, 2, 4}));
  EXPECT_EQ(kept(logits, {.min_p = 1.0f}), (Tokens{1}));
  EXPECT_EQ(kept({2, 1, 2}, {.min_p = 1.0f}), (Tokens{0, 2}));
  EXPECT_EQ(kept(logits, {.top_k = 4, .top_p = 0.9f, .min_p = 0.6f}), (Tokens{1, 4}));
  // Not of what top-p leaves to the highest, which does not change.
  EXPECT_EQ(kept(logits, {.top_p = 0.6f, .min_p = 0.1f}), (Tokens{1, 4}));
}

TEST(TruncateLogits, MinPIsExactToTheLastBit) {
  TRACE_SEED();
  Random random(31);
  int32_t num_checked = 0;
  for (int i = 0; i < 2000; ++i) {
    const float highest = random.normal(10.0f);
    const float temperature = random.one_of({0.1f, 0.7f, 1.0f, 3.0f});
    const float min_p = random.one_of({0.9f, 0.5f, 0.1f, 0.03f, 1e-4f});
    // A token is kept if exp((logit - highest) / temperature) >= min_p.
    const long double lowest = highest + temperature * std::log(static_cast<long double>(min_p));
    auto kept_one = static_cast<float>(lowest);
    if (kept_one < lowest) kept_one = std::nextafter(kept_one, kInf);
    const float cut_one = std::nextafter(kept_one, -kInf);
    // Double precision cannot tell which side the edge itself is on.
    const long double error = 1e-14L * (std::fabs(lowest) + 1);
    if (kept_one - lowest < error || lowest - cut_one < error) continue;
    ++num_checked;
    EXPECT_EQ(kept({cut_one, highest, kept_one}, {.temperature = temperature, .min_p = min_p}),
              (Tokens{1, 2}))
        << "highest " << highest << " T " << temperature << " min_p " << min_p;
  }
  EXPECT_GT(num_checked, 1900);
}

TEST(TruncateLogits, ProbabilitiesAreThoseAtTheTemperature) {
  const Logits logits = of_probabilities({0.1, 0.4, 0.2, 0.05, 0.25}, 0.5);
  const Sampling half = {.temperature = 0.5f, .top_p = 0.651f};
  EXPECT_EQ(kept(logits, half), (Tokens{1, 2, 4}));
  EXPECT_EQ(kept(logits, {.temperature = 0.5f, .min_p = 0.251f}), (Tokens{1, 2, 4}));
  EXPECT_EQ(kept(logits, {.temperature = 0.1f, .top_p = 0.651f}), (Tokens{1}));
  EXPECT_EQ(kept(logits, {.temperature = 100.0f, .top_p = 0.651f}), (Tokens{0, 1, 2, 4}));
  EXPECT_EQ(kept(logits, {.temperature = 0.0f, .top_k = 1, .top_p = 0.1f, .min_p = 1.0f}),
            (Tokens{0, 1, 2, 3, 4}));
}

TEST(TruncateLogits, ExtremeTemperaturesAndLogits) {
  for (const float temperature : {1e-45f, 1e-38f, 1e-10f, 1e-5f}) {
    for (const float scale : {1e-3f, 1.0f, 1e30f}) {
      const Logits logits = {1 * scale, 3 * scale, 3 * scale, -2 * scale};
      EXPECT_EQ(kept(logits, {.temperature = temperature, .top_p = 0.999f}), (Tokens{1, 2}));
      EXPECT_EQ(kept(logits, {.temperature = temperature, .min_p = 1e-6f}), (Tokens{1, 2}));
    }
  }
  for (const float temperature : {1e10f, 3e38f}) {
    const Logits logits = {1, 3, 3, -2};
    EXPECT_EQ(kept(logits, {.temperature = temperature, .top_p = 0.9f}), (Tokens{0, 1, 2, 3}));
    EXPECT_EQ(kept(logits, {.temperature = temperature, .min_p = 0.9f}), (Tokens{0, 1, 2, 3}));
  }
  EXPECT_EQ(kept({3e38f, -3e38f, 2.9e38f}, {.top_p = 0.999f}), (Tokens{0}));
  EXPECT_EQ(kept({3e38f, -3e38f, 2.9e38f}, {.min_p = 1e-9f}), (Tokens{0}));
  EXPECT_EQ(kept({-3e38f, -3e38f}, {.top_p = 0.1f}), (Tokens{0, 1}));
}

TEST(TruncateLogits, RowsWithoutAFiniteHighestAreLeftAlone) {
  const Sampling all = {.top_k = 1, .top_p = 0.1f, .min_p = 1.0f};
  for (const Logits& logits :
       {Logits{-kInf, kNan, -kInf}, Logits{1, kInf, 2, kInf}, Logits{kNan}, Logits{}}) {
    expect_same(truncate(logits, all), logits);
  }
  expect_same(truncate({kNan, 2, -kInf, 1, 9, 9}, all, /*padding=*/2),
              {-kInf, 2, -kInf, -kInf, 9, 9});
  expect_same(truncate({kNan, 2}, {}), {kNan, 2});
}

TEST(TruncateLogits, WeightsAreExponentials) {
  TRACE_SEED();
  Random random(3);
  for (const float temperature : {1e-20f, 0.01f, 0.7f, 1.0f, 1.7f, 50.0f, 1e20f}) {
    const float highest = random.normal(5.0f) * temperature;
    const SoftmaxWeights weights = softmax_weights_of(highest, temperature);
    EXPECT_EQ(weight_of(weights, highest), uint64_t{1} << 40);
    for (int i = 0; i < 20000; ++i) {
      const float logit = highest - temperature * 0.0015f * static_cast<float>(i);
      const double power = (double{logit} - highest) / double{temperature};
      const double exact = std::exp(power) * 0x1p40;
      // 1 for the cut; the rate's rounding counts by the power.
      ASSERT_NEAR(static_cast<double>(weight_of(weights, logit)), exact,
                  1.0 + (2.5e-7 - 1.2e-7 * power) * exact)
          << temperature << " " << i;
    }
  }
}

TEST(TruncateLogits, MatchesTheReference) {
  TRACE_SEED();
  Random random(4);
  int64_t num_close = 0;
  int64_t num_checked = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const int32_t vocab = random.one_of({1, 2, 7, 64, 65, 700, 5003});
    if (vocab > 1000 && !random.one_in(8)) continue;
    const float spread = random.one_of({0.1f, 1.0f, 3.0f, 30.0f});
    const int32_t kind = random.below(4);
    Logits logits(static_cast<size_t>(vocab));
    for (float& logit : logits) {
      logit = random.normal(spread);
      if (kind == 1) logit = std::round(logit);  // ties
      if (kind == 2 && random.one_in(3)) logit = random.one_in(2) ? kNan : -kInf;
    }
    logits[static_cast<size_t>(random.below(vocab))] = 0.5f;
    Sampling s{.temperature = random.one_of({0.05f, 0.7f, 1.0f, 1.5f, 4.0f})};
    if (random.one_in(2)) s.top_k = 1 + random.below(random.one_in(2) ? 10 : vocab + 2);
    if (random.one_in(2)) s.top_p = random.one_of({0.05f, 0.5f, 0.8f, 0.9f, 0.95f, 0.99f, 0.9999f});
    if (random.one_in(2)) s.min_p = random.one_of({1e-4f, 0.01f, 0.05f, 0.3f, 0.9f});
    const Logits after = truncate(logits, s);
    const ReferenceKept want = reference_kept(s, logits);
    const bool is_any = s.top_k > 0 || s.top_p < 1.0f || s.min_p > 0.0f;
    for (size_t id = 0; id < logits.size(); ++id) {
      if (!is_any) break;
      ++num_checked;
      num_close += want.is_close[id];
      if (want.is_close[id] || std::isnan(logits[id])) continue;
      ASSERT_EQ(after[id] != -kInf, want.is_kept[id])
          << "trial " << trial << " id " << id << " logit " << logits[id] << " k " << s.top_k
          << " p " << s.top_p << " min_p " << s.min_p << " T " << s.temperature;
      if (want.is_kept[id]) {
        ASSERT_EQ(after[id], logits[id]);
      }
    }
  }
  EXPECT_LT(num_close * 100, num_checked);
}

TEST(TruncateLogits, RowsKnowNothingOfEachOther) {
  TRACE_SEED();
  Random random(5);
  constexpr int32_t kVocab = 501;
  constexpr int32_t kStride = kVocab + 2;
  constexpr int32_t kRows = 24;
  SamplingArrays arrays(kRows, kVocab);
  Logits logits(kRows * kStride);
  for (float& logit : logits) logit = random.normal(3.0f);
  Logits want;
  Tokens row_index(kRows);
  Tokens seq_slot(kRows);
  for (int32_t row = 0; row < kRows; ++row) {
    const Sampling s = {.temperature = random.one_of({0.0f, 0.5f, 1.0f}),
                        .top_k = random.below(3) * 20,
                        .top_p = random.one_of({1.0f, 0.8f}),
                        .min_p = random.one_of({0.0f, 0.02f})};
    const int32_t slot = kRows - 1 - row;
    arrays.set(slot, s);
    row_index[static_cast<size_t>(row)] = (row * 5) % kRows;
    seq_slot[static_cast<size_t>((row * 5) % kRows)] = slot;
    const Logits alone = truncate(
        Logits(logits.begin() + row * kStride, logits.begin() + (row + 1) * kStride), s, 2);
    want.insert(want.end(), alone.begin(), alone.end());
  }
  for (const int num_threads : {1, 3}) {
    Logits together = logits;
    const int32_t num_rows = kRows;
    CpuContext ctx = context_of(num_threads);
    truncate_logits(ctx, {.num_rows = &num_rows,
                          .max_rows = kRows,
                          .logits = together.data(),
                          .logits_stride = kStride,
                          .vocab_limit = kVocab,
                          .row_index = row_index.data(),
                          .seq_slot = seq_slot.data(),
                          .temperatures = arrays.temperature.data(),
                          .sampling = arrays.state()});
    expect_same(together, want);
  }
}

}  // namespace
}  // namespace paceline::testing
