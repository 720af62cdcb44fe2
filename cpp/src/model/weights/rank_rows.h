// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "device/rank_share.h"

namespace paceline {

// The rows that a rank has of a tensor.
struct RankRows {
  bool is_whole = true;             // it has all of them
  std::vector<LinearRange> ranges;  // of each matrix; empty in a tensor that every rank has whole
  int64_t num_matrices = 1;
  int64_t rows_each = 0;  // of a matrix in the whole tensor
  // Of fp8 scales: the rows that share a scale in the whole matrix and in the rank's.
  int32_t whole_scale_rows = 1;
  int32_t scale_rows = 1;

  // The rank's rows of a matrix.
  [[nodiscard]] int64_t num_rows() const {
    int64_t count = 0;
    for (const LinearRange& range : ranges) count += range.count;
    return count;
  }
};

// Calls f(from, to, count) for the elements of a rank's tensor, which has `elements`: `count` of
// them from `to` on are those of the whole tensor from `from` on, as an arena has them.
template <class Function>
void for_elements(const RankRows& rows, int64_t elements, const Function& f) {
  if (elements == 0) return;
  if (rows.is_whole) return f(int64_t{0}, int64_t{0}, elements);
  const int64_t row_elements = elements / (rows.num_matrices * rows.num_rows());
  int64_t to = 0;
  for (int64_t i = 0; i < rows.num_matrices; ++i) {
    for (const LinearRange& range : rows.ranges) {
      const int64_t count = range.count * row_elements;
      f((i * rows.rows_each + range.first) * row_elements, to, count);
      to += count;
    }
  }
}

}  // namespace paceline
