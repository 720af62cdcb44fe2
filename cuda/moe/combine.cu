// SPDX-License-Identifier: Apache-2.0

// The weighted sum of a row's expert rows. A block computes a piece of one row, a thread eight
// elements, each in the order of the places.

#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "ops/moe.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kPerThread = 8;
constexpr int32_t kPlacesAhead = 4;  // whose elements a thread loads at once

template <class T, bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    combine_experts_kernel(const __grid_constant__ CombineExpertsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t num_rows = *p.num_rows;
  const int32_t first = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x) * kPerThread;
  const int32_t count = p.hidden - first;
  const int32_t* const expert_row = p.expert_row + int64_t{row} * p.top_k;
  const float* const weights = p.weights + int64_t{row} * p.top_k;
  const T* const x = static_cast<const T*>(p.x) + first;
  float sum[kPerThread] = {};
  for (int32_t place = 0; place < p.top_k; place += kPlacesAhead) {
    int64_t at[kPlacesAhead];
    float weight[kPlacesAhead];
#pragma unroll
    for (int i = 0; i < kPlacesAhead; ++i) {
      const int32_t from = min(place + i, p.top_k - 1);
      at[i] = int64_t{expert_row[from]} * p.hidden;
      weight[i] = weights[from];
    }
    // Only now, so that the loads above do not wait for the number of rows.
    if (row >= num_rows || count <= 0) return;
    float of_place[kPlacesAhead][kPerThread];
#pragma unroll
    for (int i = 0; i < kPlacesAhead; ++i) {
      load_first<kIsVector>(x + at[i], place + i < p.top_k ? count : 0, of_place[i]);
    }
#pragma unroll
    for (int i = 0; i < kPlacesAhead; ++i) {
      if (place + i >= p.top_k) break;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) sum[j] = fmaf(weight[i], of_place[i][j], sum[j]);
    }
  }
  store_first<kIsVector>(sum, count, static_cast<T*>(p.y) + int64_t{row} * p.hidden + first);
}

}  // namespace
}  // namespace cuda

void combine_experts(CudaContext& ctx, const CombineExpertsParams& p) {
  using namespace cuda;
  constexpr int32_t kPerBlock = kThreads * kPerThread;
  const dim3 grid(static_cast<unsigned>(p.max_rows),
                  static_cast<unsigned>((p.hidden + kPerBlock - 1) / kPerBlock));
  const bool is_vector =
      p.hidden % kPerThread == 0 && is_vector_aligned(p.x) && is_vector_aligned(p.y);
  with_element_type(p.dtype, "combine_experts", [&](auto element) {
    using T = decltype(element);
    launch(ctx, "combine_experts",
           is_vector ? combine_experts_kernel<T, true> : combine_experts_kernel<T, false>, grid,
           dim3(kThreads), 0, p);
  });
}

}  // namespace paceline
