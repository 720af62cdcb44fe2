// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the two kernels of join_streams share: the division of a row, the order of its sums, and the
// arithmetic of its elements. A row is cut into eight ranges of columns, which all streams have.

#include <cstddef>
#include <cstdint>

#include "common/convert.cuh"
#include "common/reduce.cuh"
#include "ops/streams.h"
#include "streams/mix_row.cuh"

namespace paceline::cuda::join {

inline constexpr int32_t kStreams = 4;
inline constexpr int32_t kWidth = mix_width(kStreams, /*is_end=*/false);
inline constexpr int32_t kRanges = 8;
inline constexpr int32_t kPerThread = 4;           // columns
inline constexpr int32_t kStep = 32 * kPerThread;  // columns of a warp at once
// What the branch reads is summed in two halves of a range: every second kStep columns.
inline constexpr int32_t kHalves = 2;

struct JoinArgs {
  const int32_t* num_rows;
  int32_t max_rows;
  int32_t hidden;
  const void* branch;  // or null
  float* streams;      // with a branch: updated
  MixStreamsParams mix;
  const float* norm;
  float norm_eps;
  void* y;
};

// The streams of kPerThread columns once a branch has joined; `mix` is that of the row.
__device__ __forceinline__ void join_branch(const float* mix,
                                            const float (&before)[kStreams][kPerThread],
                                            const float (&branch)[kPerThread],
                                            float (&values)[kStreams][kPerThread]) {
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float post = mix[kStreams + j];
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) values[j][e] = __fmul_rn(post, branch[e]);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const float keep = mix[2 * kStreams + s * kStreams + j];
#pragma unroll
      for (int e = 0; e < kPerThread; ++e) {
        values[j][e] = __fmaf_rn(keep, before[s][e], values[j][e]);
      }
    }
  }
}

// `pre` of a row, in every lane, from the row's totals: lane i < kStreams has that of product i,
// and lane kStreams the sum of squares. Every lane of the warp calls it.
__device__ __forceinline__ void make_pre(const MixStreamsParams& mix, float total, int32_t lane,
                                         float (&pre)[kStreams]) {
  const float mean =
      __fdiv_rn(__shfl_sync(kAllLanes, total, kStreams), static_cast<float>(kStreams * mix.hidden));
  const float product = __fmul_rn(total, rsqrtf(mean + mix.norm_eps));
  const int32_t stream = min(lane, kStreams - 1);
  const float own = __fadd_rn(sigmoid(__fmaf_rn(product, mix.scale[0], mix.base[stream])), mix.eps);
#pragma unroll
  for (int s = 0; s < kStreams; ++s) pre[s] = __shfl_sync(kAllLanes, own, s);
}

// Adds one stream to what the branch reads of kPerThread columns.
__device__ __forceinline__ void add_stream(int s, float pre, const float (&of_stream)[kPerThread],
                                           float (&values)[kPerThread]) {
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    values[e] = s == 0 ? __fmul_rn(pre, of_stream[e]) : __fmaf_rn(pre, of_stream[e], values[e]);
  }
}

// The norm of what the branch reads, of kPerThread columns.
template <class Y>
__device__ __forceinline__ void store_normed(const float (&weights)[kPerThread], float factor,
                                             float (&values)[kPerThread], Y* y) {
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) values[e] *= factor * weights[e];
  store_vector(values, y);
}

}  // namespace paceline::cuda::join
