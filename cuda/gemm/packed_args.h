// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "gemm/expert_tiles.cuh"
#include "gemm/scale_args.h"
#include "ops/ops.h"

namespace paceline::cuda {

// The end of a product of kMxfp4 whose rows of weights are gate and up by turns.
struct GatedEnd {
  bool is_gated = false;  // y is the activation of the product, in bfloat16; else the product
  Activation activation = Activation::kSilu;
  float alpha = 0;
  float limit = 0;
};

// What kInt4 has beside its scales.
struct Int4Args {
  const std::byte* zeros;  // packed; null: all are kInt4Zero
  int64_t zeros_stride;    // bytes from expert to expert
  const int32_t* order;    // [num_experts, k] the column of x of each column, or null
  int32_t num_groups;      // of columns of a row
  int32_t group_columns;
  uint32_t reciprocal;  // of 32 columns in a group, times 2^31, and 1
  bool is_float16;      // the scales; else bfloat16
};

// A product of packed weights, of one matrix or by expert, as its kernels get it.
struct PackedArgs {
  ExpertRows rows;
  ScaleArgs scales;
  Int4Args int4;
  const std::byte* data;
  int64_t data_stride;  // bytes from expert to expert
  const __nv_bfloat16* x;
  int64_t x_stride;
  const int32_t* x_rows;  // or null
  const float* bias;      // [num_experts, n], or null
  void* y;
  int64_t y_stride;
  bool is_y_float;  // else bfloat16
  int32_t n;
  int32_t k;
  // Not 0: the weights are groups of `group_rows` rows, and group g reads columns g k to (g + 1) k
  // of x.
  int32_t group_rows;
  int32_t num_stages;      // of the ring of wide_kernel.cuh
  bool follows_product;    // as in ExpertGemmParams
  uint64_t weight_policy;  // of L2
  GatedEnd end;

  // What the tile of weights from `first_row` on reads.
  __device__ __forceinline__ const __nv_bfloat16* x_of(int32_t first_row) const {
    return group_rows == 0 ? x : x + int64_t{first_row / group_rows} * k;
  }

  // Row tile `of_block` of a block of kWeights weights whose outputs begin at `first_column`, in
  // the matrix; up_row as in GatedRows. A row tile behind the last one is the last one; its outputs
  // are not written.
  template <int32_t kWeights>
  __device__ __forceinline__ int32_t row_tile_of(int32_t of_block, int32_t first_column,
                                                 int32_t up_row) const {
    constexpr int32_t kHalf = kWeights / kPackedRows / 2;
    int32_t first_row = first_column;
    if (up_row != 0 && of_block >= kHalf) {
      of_block -= kHalf;
      first_row += up_row;
    }
    return min(first_row / kPackedRows + of_block, (n - 1) / kPackedRows);
  }
};

}  // namespace paceline::cuda
