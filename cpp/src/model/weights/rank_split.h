// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a layer is split over ranks that compute one pass together: every product by its outputs, so
// that each output keeps its one sum over all inputs (docs/tensor-parallel.md). A kind of layer
// that can be split has two functions in its weights.h, and other kinds have the defaults below:
//   split_refusal(kind, weights, num_ranks)
//     says why this many ranks cannot share the layer; empty if they can
//   split_layer(kind, weights, share)
//     leaves of both what a rank has, and returns the most elements of a row that are gathered at
//     once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "model/weights/linear.h"

namespace paceline {

// A rank of several.
struct RankShare {
  int32_t rank = 0;
  int32_t num_ranks = 1;

  // The rank's part of `count` things, which the ranks share as evenly as multiples of `step`
  // allow.
  [[nodiscard]] LinearRange of(int32_t count, int32_t step = 1) const {
    const int64_t steps = (int64_t{count} + step - 1) / step;
    const auto begin = [&](int64_t r) {
      return static_cast<int32_t>(std::min<int64_t>(steps * r / num_ranks * step, count));
    };
    const int32_t first = begin(rank);
    return {.first = first, .count = begin(rank + 1) - first};
  }
};

// Why ranks cannot share `count` rows of a matrix, such as its outputs, or empty. `step`: rows that
// stay together.
[[nodiscard]] inline std::string rows_refusal(const char* name, const WeightMatrix& weight,
                                              int64_t count, int32_t num_ranks, int32_t step = 1) {
  if (weight.is_packed()) return concat("a packed matrix ", name);
  if ((count + step - 1) / step >= num_ranks) return {};
  return concat("a matrix ", name, " of ", count, " rows",
                step > 1 ? concat(", of which ", step, " share a scale") : std::string());
}

// Adds the rows to those that a rank has, in pieces that `rows_of` takes.
inline void add_rows(std::vector<LinearRange>& rows, const WeightMatrix& weight,
                     LinearRange range) {
  const int32_t each = rows_a_scale(weight);
  if (const int32_t from = range.first % each; from != 0) {
    const int32_t count = std::min(each - from, range.count);
    rows.push_back({.first = range.first, .count = count});
    range = {.first = range.first + count, .count = range.count - count};
  }
  if (range.count > 0) rows.push_back(range);
}

// Leaves some rows of a matrix, whose outputs the rank keeps for itself.
inline void keep_rows(Linear& linear, const std::vector<LinearRange>& ranges) {
  linear.rows.clear();
  for (const LinearRange& range : ranges) add_rows(linear.rows, linear.weight, range);
  linear.weight.n = 0;
  for (const LinearRange& range : linear.rows) linear.weight.n += range.count;
}

// Leaves the rank's outputs of a matrix whose outputs are gathered. `own_inputs`: what the rank has
// of its inputs; empty: all.
inline void split_outputs(Linear& linear, const RankShare& share, LinearRange own_inputs = {}) {
  const int32_t all = linear.weight.n;
  const LinearRange own = share.of(all);
  keep_rows(linear, {own});
  linear.own_inputs = own_inputs;
  linear.first_output = own.first;
  linear.all_outputs = all;
}

template <class Kind, class Weights>
[[nodiscard]] std::string split_refusal(const Kind&, const Weights&, int32_t /*num_ranks*/) {
  return "a kind that ranks cannot share yet";
}
template <class Kind, class Weights>
int64_t split_layer(Kind&, Weights&, const RankShare&) {
  PACELINE_CHECK(false, "ranks cannot share this kind of layer");
  return 0;
}

}  // namespace paceline
