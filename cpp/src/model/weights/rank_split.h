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
#include "device/rank_share.h"
#include "model/weights/linear.h"

namespace paceline {

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

// Leaves the rank's outputs of a matrix whose outputs are gathered. `inputs`: how the ranks share
// its inputs; empty: each has all.
inline void split_outputs(Linear& linear, const RankShare& share, const RankColumns& inputs = {}) {
  linear.inputs = inputs;
  const int32_t all = linear.weight.n;
  linear.outputs = share.columns(all, share.output_step(all, rows_a_scale(linear.weight)));
  keep_rows(linear, {linear.outputs.of(share.rank)});
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
