// SPDX-License-Identifier: Apache-2.0
//
// y = x W^T on the CPU, split over threads by columns (gemm_columns.h).

#include <algorithm>

#include "base/check.h"
#include "device/cpu_context.h"
#include "ops/gemm_columns.h"
#include "ops/ops.h"

namespace paceline {

void gemm(CpuContext& ctx, const GemmParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  if (num_rows <= 0) return;
  PACELINE_CHECK(p.x_dtype == DType::kFloat32 && p.y_dtype == DType::kFloat32,
                 "the CPU computes in float32");
  const int32_t n = p.weight.n;
  PACELINE_CHECK(p.num_groups >= 1 && n % p.num_groups == 0, n, " outputs of ", p.num_groups,
                 " groups");
  const GemmColumns columns = {.num_rows = num_rows,
                               .x = static_cast<const float*>(p.x),
                               .x_stride = p.x_stride,
                               .weight = p.weight,
                               .bias = p.bias,
                               .y = static_cast<float*>(p.y),
                               .y_stride = p.y_stride};
  const GemmScratch scratch(ctx);
  const int32_t group_n = n / p.num_groups;
  // Columns of several groups are pieces with an x of their own.
  const auto multiply = [&](int32_t begin, int32_t end) {
    while (begin < end) {
      const int32_t group = begin / group_n;
      const int32_t piece_end = std::min(end, (group + 1) * group_n);
      GemmColumns piece = columns;
      piece.x += int64_t{group} * p.weight.k;
      gemm_columns(piece, begin, piece_end, scratch.of_thread());
      begin = piece_end;
    }
  };
  split_columns(ctx, num_rows, p.weight, multiply);
}

}  // namespace paceline
