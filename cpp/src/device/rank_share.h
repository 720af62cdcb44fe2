// SPDX-License-Identifier: Apache-2.0
#pragma once

// How ranks share the outputs of a product (docs/tensor-parallel.md).

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace paceline {

inline constexpr int32_t kMaxRanks = 8;

// Consecutive rows or columns.
struct LinearRange {
  int32_t first = 0;
  int32_t count = 0;
};

// Which columns of a row each rank has: from first[rank] to first[rank + 1].
struct RankColumns {
  int32_t num_ranks = 0;  // 0: they are not shared
  std::array<int32_t, kMaxRanks + 1> first = {};

  [[nodiscard]] bool is_shared() const { return num_ranks > 0; }
  [[nodiscard]] int32_t total() const { return first[static_cast<size_t>(num_ranks)]; }
  [[nodiscard]] LinearRange of(int32_t rank) const {
    const auto i = static_cast<size_t>(rank);
    return {.first = first[i], .count = first[i + 1] - first[i]};
  }
};

// A rank of several.
struct RankShare {
  int32_t rank = 0;
  int32_t num_ranks = 1;

  // The rank's part of `count` things, which the ranks share as evenly as multiples of `step`
  // allow.
  [[nodiscard]] LinearRange of(int32_t count, int32_t step = 1) const {
    const int32_t first = begin(rank, count, step);
    return {.first = first, .count = begin(rank + 1, count, step) - first};
  }
  // The columns of all ranks, where each of `count` things has `width` columns.
  [[nodiscard]] RankColumns columns(int32_t count, int32_t step = 1, int32_t width = 1) const {
    RankColumns shared = {.num_ranks = num_ranks};
    for (int32_t r = 0; r <= num_ranks; ++r) {
      shared.first[static_cast<size_t>(r)] = begin(r, count, step) * width;
    }
    return shared;
  }
  // The step in which outputs are shared: `step`, a power of two, or as many as a GPU computes at
  // once, if each rank gets several of them; 1 if that leaves a rank without any.
  [[nodiscard]] int32_t output_step(int32_t count, int32_t step) const {
    constexpr int32_t kAligned = 64;
    constexpr int32_t kLeastSteps = 4;
    for (int32_t aligned = kAligned; aligned > step; aligned /= 2) {
      if (count / aligned >= kLeastSteps * num_ranks) return aligned;
    }
    return (count + step - 1) / step >= num_ranks ? step : 1;
  }

 private:
  [[nodiscard]] int32_t begin(int32_t r, int32_t count, int32_t step) const {
    const int64_t steps = (int64_t{count} + step - 1) / step;
    return static_cast<int32_t>(std::min<int64_t>(steps * r / num_ranks * step, count));
  }
};

}  // namespace paceline
