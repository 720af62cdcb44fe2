// SPDX-License-Identifier: Apache-2.0
// What the rows of a block see and write, against the definition of docs/model-format.md, at the
// edges of KV blocks, windows and the length limit.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "device/cpu_context.h"
#include "metadata/group_metadata.h"
#include "metadata/pass_rows.h"
#include "support/seed.h"

namespace paceline {
namespace {

constexpr int32_t kMaxLen = 300;
constexpr int32_t kNumSlots = 6;

// The rows of some blocks, one after the other, each with the same number of rows, live or inert.
struct Rows {
  std::vector<int32_t> tokens, positions, slots, first, last, indptr = {0};
  int32_t num_rows = 0;
  int32_t num_seqs = 0;

  void add(int32_t slot, int32_t begin, int32_t num_live, int32_t rows_per_seq) {
    for (int32_t r = 0; r < rows_per_seq; ++r) {
      const bool is_live = r < num_live;
      tokens.push_back(0);
      positions.push_back(is_live ? begin + r : 0);
      slots.push_back(is_live ? slot : -1);
      first.push_back(is_live ? begin : 0);
      last.push_back(is_live ? begin + num_live - 1 : 0);
    }
    num_rows += rows_per_seq;
    ++num_seqs;
    indptr.push_back(num_rows);
  }
  [[nodiscard]] PassRows pass() {
    return {.num_rows = &num_rows,
            .token_ids = tokens.data(),
            .positions = positions.data(),
            .seq_slot = slots.data(),
            .capacity = num_rows,
            .num_seqs = &num_seqs,
            .row_indptr = indptr.data(),
            .max_seqs = num_seqs,
            .max_rows_per_seq = num_rows,
            .block_first = first.data(),
            .block_last = last.data()};
  }
};

// Whether the row at a position sees a key, in the block of positions first to last.
// `window` 0: full attention.
bool sees(int32_t row, int32_t key, int32_t first, int32_t last, int32_t window,
          const BlockVisibility& rule) {
  if (key < 0 || key > last) return false;
  if (key > row && !rule.sees_all) return false;
  if (window == 0) return true;
  if (!rule.is_anchored && key >= row + window) return false;
  const int32_t windows_row = rule.is_anchored ? first : row;
  return key > windows_row - window;
}

TEST(BlockMetadata, IsWhatTheDefinitionSays) {
  const uint64_t first_seed = testing::seed_from_env(1);
  int64_t num_pairs = 0;
  int64_t num_beyond = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 400 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
    const int32_t block_size = std::array{1, 3, 8, 16}[random() % 4];
    const int32_t window = std::array{1, 5, 16, 128}[random() % 4];
    const int32_t rows_per_seq = 1 + below(17);
    const BlockVisibility rule{.sees_all = below(2) == 0, .is_anchored = below(2) == 0};

    std::vector<int32_t> blocks(static_cast<size_t>(kNumSlots * (kMaxLen / block_size + 1)));
    for (int32_t& block : blocks) block = 1 + below(1000);
    const BlockTable table{
        .blocks = blocks.data(), .stride = kMaxLen / block_size + 1, .block_size = block_size};
    Rows rows;
    const int32_t num_seqs = 1 + below(kNumSlots);
    for (int32_t slot = 0; slot < num_seqs; ++slot) {
      // Before, at and behind an edge of a KV block or of the window, or where the length ends.
      const int32_t edge = below(2) == 0 ? block_size : window;
      int32_t begin = below(3) == 0 ? below(kMaxLen) : edge * (1 + below(3)) + below(3) - 1;
      if (below(4) == 0) begin = kMaxLen - 1 - below(rows_per_seq + 2);
      begin = std::clamp(begin, 0, kMaxLen - 1);
      const int32_t most = std::min(rows_per_seq, kMaxLen - begin);
      const int32_t num_live = below(5) == 0 ? 0 : below(2) == 0 ? most : 1 + below(most);
      rows.add(slot, begin, num_live, rows_per_seq);
      // The block reaches into a KV block that the newest token is not in.
      num_beyond += (begin + num_live - 1) / block_size > begin / block_size ? 1 : 0;
    }
    const PassRows pass = rows.pass();
    const auto count = static_cast<size_t>(rows.num_rows);
    std::vector<int64_t> full_slots(count, -9), sliding_slots(count, -9);
    std::vector<int32_t> full_end(count, -9), sliding_begin(count, -9), sliding_end(count, -9);
    CpuContext ctx;
    build_full(ctx, {pass, {full_slots.data(), full_end.data(), table, rule}, rows.num_rows});
    build_sliding(
        ctx, {pass,
              {sliding_slots.data(), sliding_begin.data(), sliding_end.data(), window, table, rule},
              rows.num_rows});
    for (size_t row = 0; row < count; ++row) {
      if (rows.slots[row] < 0) {
        ASSERT_EQ(full_slots[row], 0);
        ASSERT_EQ(full_end[row], 0);
        ASSERT_EQ(sliding_slots[row], 0);
        ASSERT_EQ(sliding_begin[row], 0);
        ASSERT_EQ(sliding_end[row], 0);
        continue;
      }
      const int32_t position = rows.positions[row];
      const int32_t block =
          blocks[static_cast<size_t>(rows.slots[row] * table.stride + position / block_size)];
      const int64_t slot = int64_t{block} * block_size + position % block_size;
      ASSERT_EQ(full_slots[row], slot);
      ASSERT_EQ(sliding_slots[row], slot);
      for (int32_t key = 0; key < kMaxLen; ++key, ++num_pairs) {
        const auto expected = [&](int32_t of_window) {
          return sees(position, key, rows.first[row], rows.last[row], of_window, rule);
        };
        ASSERT_EQ(key < full_end[row], expected(0)) << "row " << row << " key " << key;
        ASSERT_EQ(key >= sliding_begin[row] && key < sliding_end[row], expected(window))
            << "row " << row << " key " << key << " window " << window;
      }
    }
  }
  EXPECT_GT(num_pairs, 1'000'000);
  EXPECT_GT(num_beyond, 300);
}

}  // namespace
}  // namespace paceline
