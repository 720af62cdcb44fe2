// SPDX-License-Identifier: Apache-2.0
#pragma once

// rms_norm of a row that the threads of its block keep in registers between the passes. A kernel
// provides the row's x, which it loads or receives from other GPUs.

#include <cstdint>

#include "common/convert.cuh"
#include "common/reduce.cuh"
#include "norm/register_rows.cuh"
#include "ops/ops.h"

namespace paceline::cuda {

// Shared memory of the block: partial sums of both sums of squares.
using NormPartials = float[2][kMaxRegisterThreads / 32];

// The part of a thread.
template <int kVectors>
struct RegisterNorm {
  int32_t at[kVectors];  // first element of each vector
  bool is_inside[kVectors];
  float scale[kVectors][kPerVector] = {};
  float x_scale[kVectors][kPerVector] = {};
  float residual_scale;

  // Loads the constants, which can be done while the previous kernel still runs. Every thread of
  // the block calls it.
  __device__ __forceinline__ void begin(const RmsNormParams& p, NormPartials& partials) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    const int32_t num_vectors = p.hidden / kPerVector;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t vector = thread + v * static_cast<int32_t>(blockDim.x);
      is_inside[v] = vector < num_vectors;
      at[v] = vector * kPerVector;
      if (is_inside[v] && p.weight != nullptr) load_vector(p.weight + at[v], scale[v]);
      if (is_inside[v] && p.x_weight != nullptr) load_vector(p.x_weight + at[v], x_scale[v]);
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        scale[v][i] += p.weight_offset;
        x_scale[v][i] += p.weight_offset;
      }
    }
    residual_scale = p.residual_scale == nullptr ? 1.0f : *p.residual_scale;
    if (thread < kMaxRegisterThreads / 32) partials[0][thread] = partials[1][thread] = 0.0f;
    __syncthreads();
  }

  __device__ __forceinline__ void load_residual(const RmsNormParams& p, int32_t row,
                                                float (&residual)[kVectors][kPerVector]) const {
    if (p.residual == nullptr) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (is_inside[v]) load_vector(p.residual + int64_t{row} * p.hidden + at[v], residual[v]);
    }
  }

  // Writes the row's residual and y. Elements outside of the row are 0 in both arguments. Every
  // thread of the block calls it.
  template <class Y>
  __device__ __forceinline__ void finish(const RmsNormParams& p, int32_t row,
                                         float (&x)[kVectors][kPerVector],
                                         const float (&residual)[kVectors][kPerVector],
                                         NormPartials& partials) const {
    const float inverse_hidden = 1.0f / static_cast<float>(p.hidden);
    if (p.x_weight != nullptr) {
      float squares = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kPerVector; ++i) squares = fmaf(x[v][i], x[v][i], squares);
      }
      const float factor = norm_factor(block_sum(squares, partials[0]), inverse_hidden, p.eps);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kPerVector; ++i) x[v][i] *= factor * x_scale[v][i];
      }
    }
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        x[v][i] = (x[v][i] + residual[v][i]) * residual_scale;
        squares = fmaf(x[v][i], x[v][i], squares);
      }
      if (is_inside[v] && p.residual != nullptr) {
        store_vector(x[v], p.residual + int64_t{row} * p.hidden + at[v]);
      }
    }
    if (p.y == nullptr) return;
    Y* const row_y = static_cast<Y*>(p.y) + row * p.y_stride;
    if (p.weight == nullptr) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (is_inside[v]) store_vector(x[v], row_y + at[v]);
      }
      return;
    }
    const float factor = norm_factor(block_sum(squares, partials[1]), inverse_hidden, p.eps);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) x[v][i] *= factor * scale[v][i];
      if (is_inside[v]) store_vector(x[v], row_y + at[v]);
    }
  }
};

}  // namespace paceline::cuda
