// SPDX-License-Identifier: Apache-2.0
#pragma once

// A matrix of a model together with its bias: y = x W^T + bias.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "device/rank_share.h"
#include "ops/weight_matrix.h"

namespace paceline {

// How ranks share a matrix. Never by its columns: no sum is split (rank_split.h).
enum class ShardAxis : uint8_t {
  kNone,  // each has the whole matrix
  kRows,  // each computes a part of the outputs
};

struct Linear {
  WeightMatrix weight;          // data is null in a model that has no such matrix
  const float* bias = nullptr;  // [n], or null
  ShardAxis shard = ShardAxis::kNone;
  int32_t num_groups = 1;  // GemmParams::num_groups
  // The part of a rank (rank_split.h). All of it is empty in a whole matrix.
  // The rows of `weight.data` and `bias` that the rank multiplies, in the order of its outputs;
  // weight.n is their number. Empty: the first n.
  std::vector<LinearRange> rows;
  // The inputs that each rank has computed itself, which are gathered before the product. Not
  // shared: x has all inputs.
  RankColumns inputs;
  // The outputs of each rank, which are gathered after the product; not shared where they are not.
  RankColumns outputs;

  [[nodiscard]] bool is_present() const { return weight.data != nullptr; }
  // Whether a product is followed by an exchange between ranks.
  [[nodiscard]] bool is_gathered() const { return outputs.is_shared(); }
  // Outputs that are there after a product and its exchange.
  [[nodiscard]] int32_t num_outputs() const { return is_gathered() ? outputs.total() : weight.n; }
};

// The rows that share a scale.
[[nodiscard]] inline int32_t rows_a_scale(const WeightMatrix& weight) {
  return weight.format == WeightFormat::kFp8 ? weight.scale_rows : 1;
}

// Some rows of a row-major matrix. They begin where a scale does, or have only one.
[[nodiscard]] inline WeightMatrix rows_of(WeightMatrix weight, LinearRange range) {
  PACELINE_CHECK(!weight.is_packed(), "rows of a packed matrix are not adjacent");
  const int64_t first = range.first;
  if (weight.scales != nullptr) {
    const int32_t each = rows_a_scale(weight);
    PACELINE_CHECK(first % each == 0 || first % each + range.count <= each, "rows ", first, " to ",
                   first + range.count, " have parts of scales of ", each, " rows");
    weight.scales += first / each * (weight.scales_bytes() / weight.num_scale_rows());
  }
  if (weight.zeros != nullptr) weight.zeros += first * weight.num_scale_cols();
  weight.data += first * weight.row_bytes();
  weight.n = range.count;
  return weight;
}

// The product with some rows of a matrix.
[[nodiscard]] inline Linear rows_of(const Linear& linear, LinearRange range) {
  PACELINE_CHECK(linear.num_groups == 1, "rows of groups read inputs of their own");
  Linear part = linear;
  part.rows.clear();
  part.weight = rows_of(linear.weight, range);
  if (part.bias != nullptr) part.bias += range.first;
  return part;
}

// The product without its first outputs.
[[nodiscard]] inline Linear rows_from(const Linear& linear, int32_t first) {
  const int32_t count = linear.weight.n - first;
  if (linear.rows.empty()) return rows_of(linear, {.first = first, .count = count});
  Linear part = linear;
  part.rows.clear();
  part.weight.n = count;
  for (const LinearRange& range : linear.rows) {
    const int32_t skipped = std::min(first, range.count);
    first -= skipped;
    if (skipped == range.count) continue;
    part.rows.push_back({.first = range.first + skipped, .count = range.count - skipped});
  }
  return part;
}

// The same matrix of every expert of a mixture, with its bias.
struct ExpertLinears {
  ExpertMatrices weight;
  const float* bias = nullptr;  // [num_experts, n], or null
  ShardAxis shard = ShardAxis::kNone;
  // The part of a rank, as in Linear, with the same rows of every expert; bias_stride is the n of
  // the whole matrix.
  std::vector<LinearRange> rows;
  RankColumns inputs;
  RankColumns outputs;
  int64_t bias_stride = 0;

  [[nodiscard]] bool is_gathered() const { return outputs.is_shared(); }
};

[[nodiscard]] inline ExpertLinears rows_of(const ExpertLinears& experts, LinearRange range) {
  ExpertLinears part = experts;
  part.rows.clear();
  part.weight.first = rows_of(experts.weight.first, range);
  if (part.bias != nullptr) part.bias += range.first;
  return part;
}

}  // namespace paceline
