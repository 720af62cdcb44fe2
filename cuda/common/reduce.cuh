// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reductions in a fixed order: by lane and warp, never by order of arrival.

#include <cstdint>

#include "base/ordered.h"

namespace paceline::cuda {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ float negative_infinity() { return -__int_as_float(0x7f800000); }

// The sum over the warp, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// The sum of kCount (a power of two) values, halves first.
template <int kCount>
__device__ __forceinline__ float tree_sum(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return tree_sum<kCount / 2>(values) + tree_sum<kCount / 2>(values + kCount / 2);
  }
}

// The sum over the block, the same bits in every thread. `partials` is shared memory with one float
// per possible warp, zero where the block has no such warp. It serves one sum only: reuse would
// need one more barrier. Every thread of the block must call it.
template <int kMaxWarps>
__device__ __forceinline__ float block_sum(float value, float (&partials)[kMaxWarps]) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = value;
  __syncthreads();
  // Every thread adds all partials itself: cheaper than a second round of shuffles.
  return tree_sum<kMaxWarps>(partials);
}

// The sum over the lanes up to this one.
template <class T>
__device__ __forceinline__ T sum_up_to_lane(T value, int32_t lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T lower = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}

// The maximum over the warp, in every lane.
__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
  const auto high = static_cast<uint32_t>(value >> 32);
  const uint32_t highest = __reduce_max_sync(kAllLanes, high);
  const uint32_t low =
      __reduce_max_sync(kAllLanes, high == highest ? static_cast<uint32_t>(value) : 0u);
  return uint64_t{highest} << 32 | low;
}

}  // namespace paceline::cuda
