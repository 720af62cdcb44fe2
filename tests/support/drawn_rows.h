// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows that ranks draw from, each from the logits of its own ids: with ties between ranks, with ids
// of a rank that begin within a counter of noise, with ranks without ids, with logits that are
// infinite or NaN, and with rows that are inert or have no valid logit.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "device/rank_share.h"
#include "ops/ops.h"

namespace paceline::testing {

struct DrawnRows {
  RankColumns columns = {};  // the ids of each rank
  int32_t max_rows = 0;
  std::vector<int32_t> num_rows;  // [1]
  std::vector<float> logits;      // [max_rows, columns.total()]
  std::vector<int32_t> row_index, seq_slot, positions;
  std::vector<uint64_t> seeds;
  std::vector<float> temperatures = {0, 0.3f, 1, 1e-6f, 2, 0, 0.8f};
  std::vector<int32_t> token_map;  // empty: none
  int32_t vocab_limit = 0;

  // Each rank has fewer than `widest` ids; all but one may have none.
  DrawnRows(int32_t num_ranks, int32_t widest, int32_t most_rows, std::mt19937_64& random)
      : max_rows(most_rows) {
    const auto below = [&](int32_t bound) {
      return static_cast<int32_t>(random() % static_cast<uint64_t>(bound));
    };
    columns.num_ranks = num_ranks;
    const int32_t unit = below(2) == 0 ? 1 : 4;
    for (size_t rank = 0; rank < static_cast<size_t>(num_ranks); ++rank) {
      columns.first[rank + 1] = columns.first[rank] + below(widest) / unit * unit;
    }
    ++columns.first[static_cast<size_t>(num_ranks)];
    num_rows = {max_rows > 20 ? max_rows - below(5) : below(max_rows + 1)};
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float odd[] = {kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), 0.0f, -0.0f, 1e35f};
    const int32_t num_ids = columns.total();
    const int32_t spread = below(2) == 0 ? 4 : 1 << 20;
    for (int32_t row = 0; row < max_rows; ++row) {
      const int32_t one_odd_of =
          below(4) == 0 ? 2 + below(40) : std::numeric_limits<int32_t>::max();
      for (int32_t id = 0; id < num_ids; ++id) {
        const auto value = static_cast<float>(below(spread)) / static_cast<float>(spread) * 8 - 4;
        logits.push_back(row % 11 == 7 ? -kInf : below(one_odd_of) == 0 ? odd[below(6)] : value);
      }
      row_index.push_back(row);
      seq_slot.push_back(below(9) == 0 ? -1 : row % 7);
      positions.push_back(below(1000));
    }
    for (size_t i = 0; i < temperatures.size(); ++i) seeds.push_back(random());
    for (int32_t id = 0; id < num_ids; ++id) token_map.push_back((id * 7 + 3) % (3 * num_ids));
    if (below(3) > 0) token_map.clear();
    vocab_limit = std::max(num_ids - (below(3) == 0 ? below(8) : 0), 1);
  }

  // The logits of a rank's ids. Those of other ranks would win if it read them.
  [[nodiscard]] std::vector<float> own_logits(int32_t rank) const {
    std::vector<float> own(logits.size(), 1e38f);
    const LinearRange ids = columns.of(rank);
    for (int64_t row = 0; row < max_rows; ++row) {
      const int64_t at = row * columns.total() + ids.first;
      std::copy_n(logits.begin() + at, ids.count, own.begin() + at);
    }
    return own;
  }

  // A draw from `from` to `tokens`. add(vector): the address of its elements, where the op runs.
  template <class Add>
  [[nodiscard]] DrawParams params(const float* from, int32_t* tokens, const Add& add) const {
    return {.num_rows = add(num_rows),
            .max_rows = max_rows,
            .logits = from,
            .logits_stride = columns.total(),
            .vocab_limit = vocab_limit,
            .row_index = add(row_index),
            .seq_slot = add(seq_slot),
            .positions = add(positions),
            .seeds = add(seeds),
            .temperatures = add(temperatures),
            .tokens = tokens,
            .token_map = token_map.empty() ? nullptr : add(token_map),
            .token_limit = 2 * columns.total()};
  }
};

}  // namespace paceline::testing
