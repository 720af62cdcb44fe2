// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "device/cpu_context.h"

namespace paceline {

// Calls row_op(i) for every row, in parallel if the rows move enough bytes.
template <class RowOp>
void for_rows(const CpuContext& ctx, int32_t num_rows, int64_t bytes_per_row, const RowOp& row_op) {
  // Moving fewer bytes costs less than a fork and join.
  constexpr int64_t kMinParallelBytes = 256 << 10;
  if (ctx.num_threads == 1 || num_rows * bytes_per_row < kMinParallelBytes) {
    for (int32_t i = 0; i < num_rows; ++i) row_op(i);
    return;
  }
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row_op(static_cast<int32_t>(i));
  });
}

}  // namespace paceline
