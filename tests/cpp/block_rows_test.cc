// SPDX-License-Identifier: Apache-2.0
// assemble_block_rows and store_block_drafts against their definitions, on random states.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/cpu_context.h"
#include "speculate/row_ops.h"
#include "support/seed.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace {

constexpr int32_t kSlots = 9;
constexpr int32_t kHistory = 40;
constexpr int32_t kNever = -12345;  // what an op must overwrite, or must leave as it is

// Sequences between iterations, of which some draft, and the arrays of the ops around a block.
struct Blocks {
  explicit Blocks(std::mt19937_64& random) {
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
    most_drafts = 1 + below(8);
    num_drafts = 1 + below(most_drafts);
    samples_from_anchor = below(2) == 0;
    num_drafting = below(kSlots);
    num_seqs = num_drafting + below(3);
    rows_per_seq = num_drafts + first_predicting_row();
    for (std::vector<int32_t>* const values : {&known_len, &limit, &max_drafts, &is_active}) {
      values->resize(kSlots);
    }
    history.resize(kSlots * kHistory);
    for (int32_t& token : history) token = below(1000);
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      known_len[slot] = 2 + below(kHistory - 2);
      // At the limit, short of the whole block, or far from it.
      limit[slot] = std::min(kHistory, known_len[slot] + below(most_drafts + 3));
      max_drafts[slot] = below(3) == 0 ? below(most_drafts + 1) : most_drafts;
      is_active[slot] = below(5) == 0 ? 0 : 1;
    }
    seq_slot.resize(kSlots);
    std::iota(seq_slot.begin(), seq_slot.end(), 0);
    std::shuffle(seq_slot.begin(), seq_slot.end(), random);
    counts.num_seqs = num_seqs;
    counts.num_drafting = num_drafting;
    drawn.resize(static_cast<size_t>(num_drafts * num_seqs) + 1);
    probabilities.resize(drawn.size());
    for (size_t i = 0; i < drawn.size(); ++i) {
      drawn[i] = below(1000);
      probabilities[i] = static_cast<float>(below(100)) / 100;
    }
  }

  [[nodiscard]] int32_t first_predicting_row() const { return samples_from_anchor ? 0 : 1; }
  [[nodiscard]] StagedInputs inputs() {
    StagedInputs inputs{};
    inputs.counts = &counts;
    inputs.seq_slot = seq_slot.data();
    return inputs;
  }
  [[nodiscard]] SequenceState sequences() {
    SequenceState s{};
    s.known_len = known_len.data();
    s.limit = limit.data();
    s.max_drafts = max_drafts.data();
    s.is_active = is_active.data();
    s.history = history.data();
    s.history_stride = kHistory;
    s.draft_tokens = draft_tokens.data();
    s.draft_len = draft_len.data();
    s.num_draft_tokens = most_drafts;
    return s;
  }
  // How many drafts a sequence slot has room for.
  [[nodiscard]] int32_t allowed(int32_t slot) const {
    if (is_active[slot] == 0) return 0;
    return std::max(0, std::min({num_drafts, max_drafts[slot], limit[slot] - known_len[slot]}));
  }

  int32_t most_drafts = 0;  // of the engine
  int32_t num_drafts = 0;   // of this iteration
  bool samples_from_anchor = false;
  int32_t num_drafting = 0;
  int32_t num_seqs = 0;  // of the pass, which may be padded
  int32_t rows_per_seq = 0;
  IterationCounts counts{};
  std::vector<int32_t> seq_slot, known_len, limit, max_drafts, is_active, history, drawn;
  std::vector<float> probabilities;
  std::vector<int32_t> draft_tokens = std::vector<int32_t>(kSlots * 8, kNever);
  std::vector<int32_t> draft_len = std::vector<int32_t>(kSlots, kNever);
};

TEST(BlockRows, AreTheNewestTokenAndMaskTokens) {
  const uint64_t first_seed = testing::seed_from_env(1);
  int64_t num_live = 0;
  int64_t num_cut = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 2000 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    Blocks b(random);
    const int32_t capacity = b.num_seqs * b.rows_per_seq;
    const auto array = [](int32_t size) {
      return std::vector<int32_t>(static_cast<size_t>(size) + 1, kNever);
    };
    std::vector<int32_t> tokens = array(capacity), positions = tokens, slots = tokens;
    std::vector<int32_t> first = tokens, last = tokens;
    std::vector<int32_t> indptr = array(b.num_seqs), newest = array(b.num_seqs);
    std::vector<int32_t> predicting = array(b.num_drafts * b.num_seqs);
    int32_t num_rows = kNever;
    int32_t num_predicting = kNever;
    constexpr int32_t kMask = 7777;
    CpuContext ctx;
    assemble_block_rows(ctx, {.inputs = b.inputs(),
                              .sequences = b.sequences(),
                              .rows = {.num_rows = &num_rows,
                                       .token_ids = tokens.data(),
                                       .positions = positions.data(),
                                       .seq_slot = slots.data(),
                                       .capacity = capacity,
                                       .num_seqs = &b.counts.num_drafting,
                                       .row_indptr = indptr.data(),
                                       .max_seqs = b.num_seqs,
                                       .max_rows_per_seq = b.rows_per_seq,
                                       .block_first = first.data(),
                                       .block_last = last.data()},
                              .row_indptr = indptr.data(),
                              .predicting_rows = predicting.data(),
                              .num_predicting = &num_predicting,
                              .newest_tokens = newest.data(),
                              .num_seqs = b.num_seqs,
                              .num_drafts = b.num_drafts,
                              .rows_per_seq = b.rows_per_seq,
                              .mask_token = kMask,
                              .first_predicting_row = b.first_predicting_row()});
    ASSERT_EQ(num_rows, b.num_drafting * b.rows_per_seq);
    ASSERT_EQ(num_predicting, b.num_drafts * b.num_seqs);
    ASSERT_EQ(indptr[0], 0);
    for (int32_t i = 0; i < b.num_seqs; ++i) {
      const int32_t begin = i * b.rows_per_seq;
      const bool drafts = i < b.num_drafting;
      for (int32_t j = 0; j < b.num_drafts; ++j) {
        // The row whose position, or that before it, is that of draft j.
        const int32_t row = begin + j + (b.samples_from_anchor ? 0 : 1);
        ASSERT_EQ(predicting[j * b.num_seqs + i], drafts ? row : 0);
      }
      if (!drafts) {
        ASSERT_EQ(newest[i], 0);
        continue;
      }
      ASSERT_EQ(indptr[i + 1], begin + b.rows_per_seq);
      const int32_t slot = b.seq_slot[i];
      const int32_t at = b.known_len[slot] - 1;
      const int32_t newest_token = b.history[slot * kHistory + at];
      ASSERT_EQ(newest[i], b.is_active[slot] != 0 ? newest_token : 0);
      // The last live row predicts the last draft that there is room for.
      const int32_t num_allowed = b.allowed(slot);
      const int32_t last_position = at + num_allowed - (b.samples_from_anchor ? 1 : 0);
      num_cut += num_allowed > 0 && num_allowed < b.num_drafts ? 1 : 0;
      for (int32_t r = 0; r < b.rows_per_seq; ++r) {
        const int32_t row = begin + r;
        if (num_allowed == 0 || at + r > last_position) {
          ASSERT_EQ(slots[row], -1);
          ASSERT_EQ(positions[row], 0);
          ASSERT_EQ(tokens[row], 0);
          ASSERT_EQ(first[row], 0);
          ASSERT_EQ(last[row], 0);
          continue;
        }
        ++num_live;
        ASSERT_EQ(slots[row], slot);
        ASSERT_EQ(positions[row], at + r);
        ASSERT_LT(positions[row], b.limit[slot]);
        ASSERT_EQ(tokens[row], r == 0 ? newest_token : kMask);
        ASSERT_EQ(first[row], at);
        ASSERT_EQ(last[row], last_position);
      }
    }
    // Nothing behind the rows.
    ASSERT_EQ(tokens[b.num_drafting * b.rows_per_seq], kNever);
  }
  EXPECT_GT(num_live, 10000);
  EXPECT_GT(num_cut, 500);
}

TEST(BlockRows, DraftsAreStoredUpToTheFirstImprobableOne) {
  const uint64_t first_seed = testing::seed_from_env(1);
  int64_t num_stored = 0;
  int64_t num_stopped = 0;
  int64_t num_left_out = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 2000 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    Blocks b(random);
    const bool can_stop = random() % 2 == 0;
    const bool stops_before = random() % 2 == 0;
    constexpr float kThreshold = 0.2f;
    CpuContext ctx;
    store_block_drafts(ctx, {.inputs = b.inputs(),
                             .sequences = b.sequences(),
                             .drawn = b.drawn.data(),
                             .stop = {.probabilities = can_stop ? b.probabilities.data() : nullptr,
                                      .threshold = kThreshold,
                                      .keep_drafting = nullptr},
                             .stops_before = stops_before,
                             .num_seqs = b.num_seqs,
                             .num_drafts = b.num_drafts});
    std::vector<int32_t> expected_len(kSlots, kNever);
    std::vector<int32_t> expected(kSlots * 8, kNever);
    for (int32_t i = 0; i < b.num_drafting; ++i) {
      const int32_t slot = b.seq_slot[i];
      int32_t& length = expected_len[slot];
      length = 0;
      for (int32_t j = 0; j < b.allowed(slot); ++j) {
        const auto at = static_cast<size_t>(j * b.num_seqs + i);
        const bool is_stopped = can_stop && b.probabilities[at] < kThreshold;
        if (is_stopped && stops_before) {
          ++num_left_out;
          break;
        }
        expected[static_cast<size_t>(slot * b.most_drafts + j)] = b.drawn[at];
        ++length;
        ++num_stored;
        if (is_stopped) {
          // An improbable draft is verified; none follows it.
          num_stopped += length < b.allowed(slot) ? 1 : 0;
          break;
        }
      }
    }
    ASSERT_EQ(b.draft_len, expected_len);
    ASSERT_EQ(b.draft_tokens, expected);
  }
  EXPECT_GT(num_stored, 8000);
  EXPECT_GT(num_stopped, 150);
  EXPECT_GT(num_left_out, 150);
}

}  // namespace
}  // namespace paceline
