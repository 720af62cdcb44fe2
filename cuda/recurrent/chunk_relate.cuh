// SPDX-License-Identifier: Apache-2.0
#pragma once

// What all columns of a chunk need of its rows, for chunk_kernel.cuh: (I + M)^-1, W, and k by keys.

#include <cstdint>

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "recurrent/chunk_rows.cuh"
#include "recurrent/pass_rows.cuh"

namespace paceline::cuda {
namespace {

// The products of the rows of `left` with those of `right`, to `to`. By a warp.
__device__ __forceinline__ void multiply_rows(const float (&left)[kChunkRows][kRowFloats],
                                              const float (&right)[kChunkRows][kRowFloats],
                                              int32_t lane, float (&to)[kChunkRows][kChunkRows]) {
  const int32_t g = lane / 4;
  const int32_t t = lane % 4;
  float sums[2][2][4] = {};  // of even and of odd products
#pragma unroll
  for (int m = 0; m < kHeadDim / 32; ++m) {
    float a[2][8];
    float b[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_vector(left[8 * half + g] + 32 * m + 8 * t, a[half]);
      load_vector(right[8 * half + g] + 32 * m + 8 * t, b[half]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma_16x8x8({a[0][2 * c], a[1][2 * c], a[0][2 * c + 1], a[1][2 * c + 1]}, b[half][2 * c],
                   b[half][2 * c + 1], sums[c % 2][half]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[g + i / 2 * 8][8 * half + 2 * t + i % 2] = __fadd_rn(sums[0][half][i], sums[1][half][i]);
    }
  }
  __syncwarp();
}

// The constants of a value head.
struct HeadRates {
  float a_log;
  float dt_bias;
};

// Makes beta, from_start, to_end and (I + M)^-1, by a warp. A lane has a column.
__device__ __forceinline__ void make_inverse(Chunk& chunk, const HeadRates& rates, int32_t lane) {
  const int32_t column = lane % kChunkRows;
  const float decay = decay_of(chunk.a[column], rates.a_log, rates.dt_bias);  // of the row
  const float beta = sigmoid_of(chunk.b[column]);
  if (lane < kChunkRows) chunk.beta[place_of(column)] = beta;
  multiply_rows(chunk.k, chunk.k, lane, chunk.inverse);
  // Lanes 16 on make the decay from the start.
  const bool is_start = lane >= kChunkRows;
  float decay_after = is_start ? 1.0f : 0.0f;  // of the rows after the column's up to the row
  float factors[kChunkRows];
#pragma unroll
  for (int row = 0; row < kChunkRows; ++row) {
    decay_after = __fmul_rn(decay_after, __shfl_sync(kAllLanes, decay, row));
    const float product = chunk.inverse[row][column];
    factors[row] = 0.0f;
    if (!is_start && row == column) decay_after = 1.0f;
    if (row > column) {
      factors[row] = __fmul_rn(chunk.beta[place_of(row)], __fmul_rn(decay_after, product));
    }
    if (lane == kChunkRows) chunk.from_start[place_of(row)] = decay_after;
  }
  if (!is_start) chunk.to_end[place_of(column)] = decay_after;
  __syncwarp();
  // M by columns, in the memory of the products.
  if (!is_start) store_vector(factors, chunk.inverse[column]);
  __syncwarp();
  float inverse[kChunkRows];
#pragma unroll
  for (int row = 0; row < kChunkRows; ++row) inverse[row] = row == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j + 1 < kChunkRows; ++j) {
    float of_j[kChunkRows];
#pragma unroll
    for (int row = (j + 1) / 4 * 4; row < kChunkRows; row += 4) {
      float four[4];
      load_vector(chunk.inverse[j] + row, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) of_j[row + i] = four[i];
    }
#pragma unroll
    for (int row = j + 1; row < kChunkRows; ++row) {
      inverse[row] = __fmaf_rn(-of_j[row], inverse[j], inverse[row]);
    }
  }
  __syncwarp();
  if (is_start) return;
#pragma unroll
  for (int row = 0; row < kChunkRows; ++row) {
    chunk.inverse[row][place_of(column)] = before_tf32_cut(inverse[row]);
  }
}

// Makes W, by a warp. A lane has a column.
__device__ __forceinline__ void make_weights(Chunk& chunk, const HeadRates& rates, int32_t lane) {
  const int32_t column = lane % kChunkRows;
  const float decay = decay_of(chunk.a[column], rates.a_log, rates.dt_bias);  // of the row
  multiply_rows(chunk.q, chunk.k, lane, chunk.weights);
  float weights[kChunkRows];
  float decay_after = 0.0f;
#pragma unroll
  for (int row = 0; row < kChunkRows; ++row) {
    decay_after = __fmul_rn(decay_after, __shfl_sync(kAllLanes, decay, row));
    if (row == column) decay_after = 1.0f;
    weights[row] = before_tf32_cut(__fmul_rn(decay_after, chunk.weights[row][column]));
    if (row < column) weights[row] = 0.0f;
  }
  __syncwarp();
  if (lane >= kChunkRows) return;
#pragma unroll
  for (int row = 0; row < kChunkRows; ++row) {
    chunk.weights[row][place_of(column)] = weights[row];
  }
}

// Arranges k by keys: the part of warp `warp` of `num_warps`.
__device__ __forceinline__ void arrange_keys(Chunk& chunk, int32_t warp, int32_t num_warps,
                                             int32_t lane) {
  for (int32_t key = 32 * warp + lane; key < kHeadDim; key += 32 * num_warps) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      // Of the rows at places 4 t on.
      const float four[4] = {chunk.k[2 * t][key], chunk.k[2 * t + 1][key], chunk.k[8 + 2 * t][key],
                             chunk.k[9 + 2 * t][key]};
      store_vector(four, chunk.keys[key] + key_place(key, t));
    }
  }
}

// What all columns need of the rows of the chunk from position `first` on. By kRelaters warps.
__device__ __forceinline__ void relate(const ChunkRowsOf& rows, const HeadRates& rates,
                                       int32_t first, int32_t warp, int32_t lane, Chunk& chunk) {
  if (warp == 0) {
    make_inverse(chunk, rates, lane);
  } else if (warp == 1) {
    make_weights(chunk, rates, lane);
  } else if (warp < kRelaters) {
    if (warp == 2 && lane == 0) {
      const int32_t last = first + kChunkRows - 1;
      const bool has_entry = last >= rows.start && last < rows.end();
      chunk.entry = has_entry ? static_cast<int32_t>(rows.p.entry_slots[rows.row_at(last)]) : 0;
    }
    arrange_keys(chunk, warp - 2, kRelaters - 2, lane);
  }
}

}  // namespace
}  // namespace paceline::cuda
