// SPDX-License-Identifier: Apache-2.0
#pragma once

// From the products of a row of streams to its mix.

#include <cstdint>

#include "common/ordering.cuh"
#include "common/reduce.cuh"
#include "ops/streams.h"

namespace paceline::cuda {

__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }

// Lane i has row i.
template <int kMaxCount>
struct Matrix {
  float of_row[kMaxCount];
  int32_t count;  // rows, and columns
  float eps;

  __device__ __forceinline__ void divide_by_rows() {
    float sum = eps;
#pragma unroll
    for (int j = 0; j < kMaxCount; ++j) {
      if (j < count) sum = __fadd_rn(sum, of_row[j]);
    }
#pragma unroll
    for (int j = 0; j < kMaxCount; ++j) of_row[j] = __fdividef(of_row[j], sum);
  }
  // Every lane of the warp calls it.
  __device__ __forceinline__ void divide_by_columns() {
#pragma unroll
    for (int j = 0; j < kMaxCount; ++j) {
      float sum = eps;
#pragma unroll
      for (int i = 0; i < kMaxCount; ++i) {
        const float other = __shfl_sync(kAllLanes, of_row[j], i);
        if (i < count) sum = __fadd_rn(sum, other);
      }
      of_row[j] = __fdividef(of_row[j], sum);
    }
  }
};

// Writes the mix of a row. `products` are those of the row with the weights, then its sum of
// squares. One warp calls it; lane i has stream i. With kIsFull there are kMaxCount streams.
template <int kMaxCount, bool kIsFull>
__device__ __forceinline__ void write_mix(const MixStreamsParams& p, int32_t row,
                                          const float* products) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t count = kIsFull ? kMaxCount : p.num_streams;
  const int32_t width = mix_width(count, p.is_end);
  const int32_t stream = min(lane, count - 1);  // lanes without a stream repeat the last one
  const float squares = __fdiv_rn(products[width], static_cast<float>(count * p.hidden));
  const float factor = rsqrtf(squares + p.norm_eps);
  const auto logit = [&](int32_t at, int32_t scale) {
    return __fmaf_rn(__fmul_rn(products[at], factor), p.scale[scale], p.base[at]);
  };
  float* const mix = p.mix + int64_t{row} * width;
  if (lane < count) mix[lane] = __fadd_rn(sigmoid(logit(lane, 0)), p.eps);
  if (p.is_end) return;
  if (lane < count) mix[count + lane] = __fmul_rn(2.0f, sigmoid(logit(count + lane, 1)));
  // In a register: each of the iterations below would wait for the constant again.
  const float eps = in_register(p.eps);
  Matrix<kMaxCount> c = {.of_row = {}, .count = count, .eps = eps};
  float highest = negative_infinity();
#pragma unroll
  for (int j = 0; j < kMaxCount; ++j) {
    if (j < count) c.of_row[j] = logit(2 * count + stream * count + j, 2);
    if (j < count) highest = fmaxf(highest, c.of_row[j]);
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kMaxCount; ++j) {
    if (j < count) c.of_row[j] = expf(__fsub_rn(c.of_row[j], highest));
    if (j < count) sum = __fadd_rn(sum, c.of_row[j]);
  }
#pragma unroll
  for (int j = 0; j < kMaxCount; ++j) {
    if (j < count) c.of_row[j] = __fadd_rn(__fdiv_rn(c.of_row[j], sum), p.eps);
  }
  c.divide_by_columns();
  for (int32_t i = 1; i < p.sinkhorn_iterations; ++i) {
    c.divide_by_rows();
    c.divide_by_columns();
  }
#pragma unroll
  for (int j = 0; j < kMaxCount; ++j) {
    if (lane < count && j < count) mix[2 * count + lane * count + j] = c.of_row[j];
  }
}

}  // namespace paceline::cuda
