// SPDX-License-Identifier: Apache-2.0
#pragma once

// ScaleUse::kRowSums: the scales of rows of weights multiply their sums over K.

#include <cstdint>

#include "gemm/packed_args.h"

namespace paceline::cuda {

// The scale of a row; behind the last one, that of the last one.
__device__ __forceinline__ float row_scale(const PackedArgs& args, int32_t expert, int32_t row) {
  const auto* const table =
      reinterpret_cast<const float*>(args.scales.scales + expert * args.scales.expert_stride);
  return __ldg(table +
               int64_t{min(row, args.n - 1) >> args.scales.row_shift} * args.scales.columns);
}

// Multiplies the sums of a warp, as a product whose rows are weights leaves them. row: of weights,
// of the thread's first pair of sums; its second pair is 8 rows further on.
template <int32_t kCount>
__device__ __forceinline__ void scale_rows(const PackedArgs& args, int32_t expert, int32_t row,
                                           float (&sums)[kCount]) {
  const float by[2] = {row_scale(args, expert, row), row_scale(args, expert, row + 8)};
#pragma unroll
  for (int32_t j = 0; j < kCount; ++j) sums[j] = __fmul_rn(by[j / 2 % 2], sums[j]);
}

}  // namespace paceline::cuda
