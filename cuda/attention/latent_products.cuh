// SPDX-License-Identifier: Apache-2.0
#pragma once

// The products of latent attention with K_h and V_h of each head, in bfloat16 on tensor cores. A
// block computes 64 columns of a head for 16 or 64 rows, whose operands fit its shared memory
// whole. An output is one accumulator over ascending K, so rows are invariant.

#include <cuda_bf16.h>

#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"

namespace paceline::cuda {

inline constexpr int32_t kHeadThreads = 128;
inline constexpr int32_t kHeadColumns = 64;       // of a block; 16 of a warp
inline constexpr int32_t kHeadSlice = 64;         // columns of K in a slice, 128 bytes
inline constexpr int32_t kHeadSliceBytes = 8192;  // of weights
inline constexpr int32_t kMaxHeadBytes = 227 << 10;

// The operands of one head and its 64 columns, for a tile of rows.
struct HeadProduct {
  const __nv_bfloat16* weights;  // rows of K by columns, or rows of columns by K
  int64_t weight_stride;         // elements between rows
  const __nv_bfloat16* x;        // [rows, depth]
  int64_t x_stride;
  __nv_bfloat16* y;  // [rows, 64]
  int64_t y_stride;
  int32_t depth;  // a multiple of kHeadSlice
};

[[nodiscard]] constexpr int32_t head_shared_bytes(int32_t rows, int32_t depth) {
  return depth / kHeadSlice * (kHeadSliceBytes + rows * 128);
}

// The place of unit `unit` (16 bytes) of a row of 128 bytes.
__device__ __forceinline__ uint32_t head_unit(int32_t row, int32_t unit) {
  return static_cast<uint32_t>(row * 128 + ((unit ^ (row & 7)) * 16));
}

// Begins to copy all weights; they do not depend on other kernels. A slice has 64 rows either way:
// of K, or of columns.
template <bool kRowsAreK>
__device__ __forceinline__ void load_weights(const HeadProduct& product, uint32_t to) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t unit = thread % 8;
  for (int32_t slice = 0; slice < product.depth / kHeadSlice; ++slice) {
    const __nv_bfloat16* const from =
        product.weights +
        (kRowsAreK ? slice * kHeadSlice * product.weight_stride : int64_t{slice} * kHeadSlice);
#pragma unroll
    for (int32_t row = thread / 8; row < 64; row += kHeadThreads / 8) {
      cp_async_16(to + slice * kHeadSliceBytes + head_unit(row, unit),
                  from + row * product.weight_stride + unit * 8, true);
    }
  }
}

// Begins to copy slices [first, end) of x; rows that do not exist become zero.
template <int32_t kRows>
__device__ __forceinline__ void load_x(const HeadProduct& product, int32_t rows, int32_t first,
                                       int32_t end, uint32_t to) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t unit = thread % 8;
  for (int32_t slice = first; slice < end; ++slice) {
#pragma unroll
    for (int32_t row = thread / 8; row < kRows; row += kHeadThreads / 8) {
      const bool is_live = row < rows;
      const __nv_bfloat16* const from =
          product.x + (is_live ? row * product.x_stride : 0) + slice * kHeadSlice + unit * 8;
      cp_async_16(to + slice * (kRows * 128) + head_unit(row, unit), from, is_live);
    }
  }
}

template <int32_t kRows>
using HeadSums = float[kRows / 16][2][4];

// Adds slices [first, end) of K: a warp has 16 columns, for all rows.
template <bool kRowsAreK, int32_t kRows>
__device__ __forceinline__ void add_slices(uint32_t weights, uint32_t x, int32_t first, int32_t end,
                                           HeadSums<kRows>& sums) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  for (int32_t slice = first; slice < end; ++slice) {
    const uint32_t of_slice = weights + static_cast<uint32_t>(slice * kHeadSliceBytes);
    const uint32_t x_of_slice = x + static_cast<uint32_t>(slice * kRows * 128);
#pragma unroll
    for (int32_t k = 0; k < kHeadSlice / 16; ++k) {
      uint32_t b[4];
      if constexpr (kRowsAreK) {
        ldmatrix_x4_transposed(b, of_slice + head_unit(k * 16 + lane % 16, 2 * warp + lane / 16));
      } else {
        const int32_t column = warp * 16 + lane / 16 * 8 + lane % 8;
        ldmatrix_x4(b, of_slice + head_unit(column, 2 * k + lane / 8 % 2));
      }
#pragma unroll
      for (int32_t m = 0; m < kRows / 16; ++m) {
        uint32_t a[4];
        ldmatrix_x4(a, x_of_slice + head_unit(m * 16 + lane % 16, 2 * k + lane / 16));
        mma_16x8x16(sums[m][0], a, b[0], b[1]);
        mma_16x8x16(sums[m][1], a, b[2], b[3]);
      }
    }
  }
}

// Computes the product for the rows that exist once the predecessor has completed, of which
// `count_rows` tells the number; `room` of them may exist.
template <bool kRowsAreK, int32_t kRows, class CountRows>
__device__ __forceinline__ void multiply_head(const HeadProduct& product, int32_t room,
                                              const CountRows& count_rows, uint32_t shared) {
  const int32_t slices = product.depth / kHeadSlice;
  const uint32_t x = shared + static_cast<uint32_t>(slices * kHeadSliceBytes);
  load_weights<kRowsAreK>(product, shared);
  wait_for_predecessor();
  const int32_t rows = count_rows();
  // Copies of few rows do not wait for their number: other rows are results that are not stored.
  constexpr bool kTakesAll = kRows <= 16;
  if (!kTakesAll && rows <= 0) {
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }
  const int32_t loaded = kTakesAll ? room : rows;
  const int32_t half = slices / 2;
  load_x<kRows>(product, loaded, 0, half, x);
  cp_async_commit();
  load_x<kRows>(product, loaded, half, slices, x);
  cp_async_commit();
  HeadSums<kRows> sums = {};
  cp_async_wait<1>();
  __syncthreads();
  add_slices<kRowsAreK, kRows>(shared, x, 0, half, sums);
  cp_async_wait<0>();
  __syncthreads();
  add_slices<kRowsAreK, kRows>(shared, x, half, slices, sums);

  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
#pragma unroll
  for (int32_t m = 0; m < kRows / 16; ++m) {
#pragma unroll
    for (int32_t half_rows = 0; half_rows < 2; ++half_rows) {
      const int32_t row = m * 16 + half_rows * 8 + lane / 4;
      if (row >= rows) continue;
      __nv_bfloat16* const y = product.y + row * product.y_stride + warp * 16 + lane % 4 * 2;
#pragma unroll
      for (int32_t n = 0; n < 2; ++n) {
        *reinterpret_cast<__nv_bfloat162*>(y + n * 8) =
            __floats2bfloat162_rn(sums[m][n][2 * half_rows], sums[m][n][2 * half_rows + 1]);
      }
    }
  }
}

}  // namespace paceline::cuda
