// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels that keep a row of a norm in registers share. The number of threads, and so the
// order of the sum of squares, depends only on the length of a row; that keeps rows invariant.

#include <algorithm>
#include <cstdint>

#include "common/convert.cuh"
#include "ops/ops.h"

namespace paceline::cuda {

inline constexpr int32_t kPerVector = 8;
inline constexpr int32_t kMaxRegisterThreads = 512;
inline constexpr int32_t kMaxRegisterVectors = 2;  // of a thread
inline constexpr int32_t kMaxRegisterHidden =
    kPerVector * kMaxRegisterVectors * kMaxRegisterThreads;

__device__ __forceinline__ float norm_factor(float sum_of_squares, float inverse_hidden,
                                             float eps) {
  return rsqrtf(sum_of_squares * inverse_hidden + eps);
}

// Whether rows are whole aligned vectors, and few enough.
inline bool fits_registers(const RmsNormParams& p) {
  return p.hidden <= kMaxRegisterHidden && p.hidden % kPerVector == 0 &&
         p.x_stride % kPerVector == 0 && p.y_stride % kPerVector == 0 && is_vector_aligned(p.x) &&
         is_vector_aligned(p.y) && is_vector_aligned(p.residual) && is_vector_aligned(p.weight) &&
         is_vector_aligned(p.x_weight);
}

// The block of a row.
struct RegisterRows {
  int32_t vectors;  // of a thread
  unsigned threads;
};
inline RegisterRows register_rows(int32_t hidden) {
  const int32_t num_vectors = hidden / kPerVector;
  const int32_t per_thread = num_vectors <= kMaxRegisterThreads ? 1 : 2;
  const int32_t num_warps = std::max((num_vectors + 32 * per_thread - 1) / (32 * per_thread), 1);
  return {.vectors = per_thread, .threads = static_cast<unsigned>(num_warps * 32)};
}

}  // namespace paceline::cuda
