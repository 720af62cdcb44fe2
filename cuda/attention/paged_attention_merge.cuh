// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the chunks that the splits of a tile left in the workspace become one result.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_shape.cuh"

namespace paceline::cuda::paged {

// Merges the chunks of one row from the workspace, four columns a thread, and stores the result.
// Rows see consecutive chunks, so those in which this row sees nothing are just not visited.
__device__ __forceinline__ void merge_partials(const float* accumulators, const float* max_sums,
                                               int64_t chunk_floats, int32_t num_chunks,
                                               const float* sink, __nv_bfloat16* y) {
  float running_max = negative_infinity();
  float running_sum = 0.0f;
  float running[4] = {};
  for (int32_t first = 0; first < num_chunks; first += kMergeBatch) {
    float2 max_sum[kMergeBatch];
    float4 values[kMergeBatch];
#pragma unroll
    for (int32_t i = 0; i < kMergeBatch; ++i) {
      // Beyond the last chunk the last one is loaded again, and dropped below. Loads bypass L1,
      // which knows nothing of what other SMs have written.
      const int64_t at = min(first + i, num_chunks - 1) * chunk_floats;
      max_sum[i] = __ldcg(reinterpret_cast<const float2*>(max_sums + at));
      values[i] = __ldcg(reinterpret_cast<const float4*>(accumulators + at));
    }
#pragma unroll
    for (int32_t i = 0; i < kMergeBatch; ++i) {
      if (first + i < num_chunks) {
        const MergeWeights merge = merge_weights(running_max, max_sum[i].x);
        running_max = merge.max;
        running_sum = merge_value(running_sum, max_sum[i].y, merge);
        running[0] = merge_value(running[0], values[i].x, merge);
        running[1] = merge_value(running[1], values[i].y, merge);
        running[2] = merge_value(running[2], values[i].z, merge);
        running[3] = merge_value(running[3], values[i].w, merge);
      }
    }
  }
  const float factor = final_factor(running_max, running_sum, sink);
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) store_as(y + i, __fmul_rn(running[i], factor));
}
}  // namespace paceline::cuda::paged
