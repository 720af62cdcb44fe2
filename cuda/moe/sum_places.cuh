// SPDX-License-Identifier: Apache-2.0
#pragma once

// The weighted sum of a row's expert rows. A thread computes eight elements, each in the order of
// the places.

#include <cstdint>

#include "base/sigmoid.h"
#include "common/convert.cuh"
#include "norm/register_rows.cuh"
#include "ops/moe.h"

namespace paceline::cuda {

inline constexpr int32_t kPlacesAhead = 4;  // whose elements a thread loads at once

// The sum of elements [first, first + kPerVector) of a row below max_rows; `count` is as in
// load_first. Returns false if the row does not exist, which the first loads do not wait for.
template <class T, bool kIsVector>
__device__ __forceinline__ bool sum_places(const CombineExpertsParams& p, int32_t row,
                                           int32_t num_rows, int32_t first, int32_t count,
                                           float (&sum)[kPerVector]) {
  const int64_t stride = p.stride > 0 ? p.stride : p.hidden;
  const int32_t* const expert_row = p.expert_row + int64_t{row} * p.top_k;
  const float* const weights = p.weights + int64_t{row} * p.top_k;
  const T* const x = static_cast<const T*>(p.x) + first;
#pragma unroll
  for (float& value : sum) value = 0.0f;
  const T* base = nullptr;
  if (p.has_shared) {
    base = x + (int64_t{min(num_rows, p.max_rows)} * p.top_k + row) * stride;
  } else if (p.base != nullptr) {
    base = static_cast<const T*>(p.base) + int64_t{row} * stride + first;
  }
  const float base_scale =
      p.base_gate == nullptr ? 1.0f : sigmoid_same_bits(p.base_gate[row * p.base_gate_stride]);
  for (int32_t place = 0; place < p.top_k; place += kPlacesAhead) {
    int64_t at[kPlacesAhead];
    float weight[kPlacesAhead];
#pragma unroll
    for (int i = 0; i < kPlacesAhead; ++i) {
      const int32_t from = min(place + i, p.top_k - 1);
      at[i] = int64_t{expert_row[from]} * stride;
      weight[i] = weights[from];
    }
    if (row >= num_rows) return false;
    if (place == 0 && base != nullptr) {
      load_first<kIsVector>(base, count, sum);
#pragma unroll
      for (float& value : sum) value *= base_scale;
    }
    float of_place[kPlacesAhead][kPerVector];
#pragma unroll
    for (int i = 0; i < kPlacesAhead; ++i) {
      load_first<kIsVector>(x + at[i], place + i < p.top_k ? count : 0, of_place[i]);
    }
#pragma unroll
    for (int i = 0; i < kPlacesAhead; ++i) {
      if (place + i >= p.top_k) break;
#pragma unroll
      for (int j = 0; j < kPerVector; ++j) sum[j] = fmaf(weight[i], of_place[i][j], sum[j]);
    }
  }
  return true;
}

}  // namespace paceline::cuda
