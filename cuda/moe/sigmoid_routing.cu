// SPDX-License-Identifier: Apache-2.0

// The experts of a row by the sigmoids of its logits. A warp routes one row. Lane l holds the
// experts l, l + 32, ..., the group l and, at the end, the result of place l.

#include "moe/sigmoid_routing.h"

#include <algorithm>
#include <cstdint>

#include "base/ordered.h"
#include "base/sigmoid.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kWarps = 4;  // rows of a block

// The lowest lane that has `value`.
__device__ __forceinline__ int32_t first_lane_with(uint32_t value, uint32_t own) {
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, own == value))) - 1;
}

// One bit for each group whose experts can be chosen. `keys` are those of a lane's experts.
template <int32_t kPerLane>
__device__ __forceinline__ uint32_t best_groups(const SigmoidRouting& routing, int32_t size,
                                                int32_t lane, const uint32_t (&keys)[kPerLane]) {
  uint32_t own_sum = 0;  // 0: no group, or already chosen
  for (int32_t group = 0; group < routing.num_groups; ++group) {
    const int32_t begin = group * size;
    uint32_t best = 0;  // of the lane
    uint32_t second = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t expert = lane + 32 * i;
      const uint32_t key = expert >= begin && expert < begin + size ? keys[i] : 0;
      second = max(second, min(best, key));
      best = max(best, key);
    }
    const uint32_t highest = __reduce_max_sync(kAllLanes, best);
    const bool is_holder = lane == first_lane_with(highest, best);
    const uint32_t next = __reduce_max_sync(kAllLanes, is_holder ? second : best);
    const float sum = from_ordered(highest) + from_ordered(next);
    if (lane == group) own_sum = to_ordered(comparable(sum));
  }
  uint32_t open = 0;
  for (int32_t i = 0; i < routing.top_groups; ++i) {
    const int32_t group = first_lane_with(__reduce_max_sync(kAllLanes, own_sum), own_sum);
    open |= 1u << group;
    if (lane == group) own_sum = 0;
  }
  return open;
}

template <int32_t kPerLane>
__global__ void __launch_bounds__(kWarps * 32)
    route_by_sigmoid_kernel(const __grid_constant__ RouteExpertsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t row = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (row >= min(*p.num_rows, p.max_rows)) return;
  const float* const logits = p.logits + int64_t{row} * p.num_experts;
  uint32_t keys[kPerLane];  // 0: no expert, already chosen, or of a group that cannot be
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t expert = lane + 32 * i;
    keys[i] = 0;
    if (expert >= p.num_experts) continue;
    keys[i] = to_ordered(comparable(sigmoid_same_bits(logits[expert]) + p.correction[expert]));
  }
  if (p.sigmoid.num_groups > 1) {
    const int32_t size = p.num_experts / p.sigmoid.num_groups;
    const uint32_t open = best_groups(p.sigmoid, size, lane, keys);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t group = (lane + 32 * i) / size;
      if (group < p.sigmoid.num_groups && (open >> group & 1u) == 0) keys[i] = 0;
    }
  }

  int32_t own_expert = 0;
  for (int32_t place = 0; place < p.top_k; ++place) {
    uint32_t best = keys[0];
    int32_t expert = lane;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (keys[i] <= best) continue;
      best = keys[i];
      expert = lane + 32 * i;
    }
    const uint32_t highest = __reduce_max_sync(kAllLanes, best);
    expert = __reduce_min_sync(kAllLanes, best == highest ? expert : kMaxExperts);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i == expert) keys[i] = 0;
    }
    if (lane == place) own_expert = expert;
  }
  float own = lane < p.top_k ? sigmoid_same_bits(logits[own_expert]) : 0.0f;
  float sum = 0.0f;
  for (int32_t place = 0; place < p.top_k; ++place) sum += __shfl_sync(kAllLanes, own, place);
  if (lane >= p.top_k) return;
  if (p.sigmoid.normalises) own /= sum + 1e-20f;
  p.experts[int64_t{row} * p.top_k + lane] = own_expert;
  p.weights[int64_t{row} * p.top_k + lane] = own * p.sigmoid.scale;
}

}  // namespace

void route_by_sigmoid(CudaContext& ctx, const RouteExpertsParams& p) {
  auto* const kernel = p.num_experts <= 64    ? route_by_sigmoid_kernel<2>
                       : p.num_experts <= 256 ? route_by_sigmoid_kernel<8>
                                              : route_by_sigmoid_kernel<kMaxExperts / 32>;
  const dim3 grid(static_cast<unsigned>((p.max_rows + kWarps - 1) / kWarps));
  launch(ctx, "route_by_sigmoid", kernel, grid, dim3(kWarps * 32), 0, p);
}

}  // namespace cuda
}  // namespace paceline
