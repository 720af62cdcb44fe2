// SPDX-License-Identifier: Apache-2.0

// Which experts a row visits, and where its expert rows lie. Routing depends only on the row's own
// logits. Sorting counts integers: its order is that of the places, whatever warp arrives first.

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "base/ordered.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/moe.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kRouteWarps = 4;  // rows of a block
constexpr int32_t kMaxSortWarps = 32;
constexpr int32_t kMaxCounts = 11264;  // of a block's shared memory: 44 KB
constexpr int32_t kLoadsAhead = 4;     // of a lane

// A warp takes a row. Lane l holds the logits of the experts l, l + 32, ... and, at the end, the
// result of place l.
template <int kPerLane>
__global__ void __launch_bounds__(kRouteWarps * 32)
    route_experts_kernel(const __grid_constant__ RouteExpertsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t row = static_cast<int32_t>(blockIdx.x * kRouteWarps + threadIdx.x / 32);
  if (row >= p.max_rows) return;
  const int32_t num_rows = *p.num_rows;
  const float* const logits = p.logits + int64_t{row} * p.num_experts;
  uint32_t keys[kPerLane];  // 0: no expert, or already chosen
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t expert = lane + 32 * i;
    keys[i] = expert < p.num_experts ? to_ordered(comparable(logits[expert])) : 0;
  }
  if (row >= num_rows) return;

  int32_t own_expert = 0;
  float own_logit = 0.0f;
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
    if (lane == place) {
      own_expert = expert;
      own_logit = from_ordered(highest);
    }
  }
  const float best = __shfl_sync(kAllLanes, own_logit, 0);
  const float own = expf(own_logit - best);
  float sum = 0.0f;
  for (int32_t place = 0; place < p.top_k; ++place) sum += __shfl_sync(kAllLanes, own, place);
  if (lane >= p.top_k) return;
  p.experts[int64_t{row} * p.top_k + lane] = own_expert;
  p.weights[int64_t{row} * p.top_k + lane] = own / sum;
}

// Calls run(place, expert) for the places [begin, end) of a warp, 32 at a time in ascending order;
// lanes without a place get the expert -1. All lanes get the same `begin` and `end`.
template <class Run>
__device__ __forceinline__ void for_places(const int32_t* experts, int32_t begin, int32_t end,
                                           Run run) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  for (int32_t first = begin; first < end; first += 32 * kLoadsAhead) {
    int32_t loaded[kLoadsAhead];
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      const int32_t place = first + 32 * i + lane;
      loaded[i] = place < end ? experts[place] : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      if (first + 32 * i < end) run(first + 32 * i + lane, loaded[i]);
    }
  }
}

// A counting sort by one block. Each warp takes a stretch of the places and has its own counts, so
// that the expert rows of an expert are in the order of the places.
__global__ void __launch_bounds__(kMaxSortWarps * 32)
    sort_expert_rows_kernel(const __grid_constant__ SortExpertRowsParams p) {
  // By expert: a count for each warp, which becomes the number of places in the stretches before;
  // then the number of all, which becomes the first expert row. The odd distance keeps the lanes in
  // different banks, whether they visit warps or experts.
  extern __shared__ int32_t counts[];
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const int32_t num_threads = static_cast<int32_t>(blockDim.x);
  const int32_t num_warps = num_threads / 32;
  const int32_t stride = num_warps + 1;
  let_successor_start();
  for (int32_t i = thread; i < p.num_experts * stride; i += num_threads) counts[i] = 0;
  __syncthreads();
  wait_for_predecessor();
  const int32_t num_places = min(*p.num_rows, p.max_rows) * p.top_k;
  const int32_t per_warp = (num_places + num_threads - 1) / num_threads * 32;
  const int32_t begin = warp * per_warp;
  const int32_t end = min(begin + per_warp, num_places);
  for_places(p.experts, begin, end, [&](int32_t, int32_t expert) {
    if (expert >= 0) atomicAdd(counts + expert * stride + warp, 1);
  });
  __syncthreads();
  for (int32_t expert = warp; expert < p.num_experts; expert += num_warps) {
    int32_t* const of_warps = counts + expert * stride;
    const int32_t own = lane < num_warps ? of_warps[lane] : 0;
    const int32_t sum = sum_up_to_lane(own, lane);
    if (lane < num_warps) of_warps[lane] = sum - own;
    if (lane == 31) of_warps[num_warps] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    const int32_t per_lane = (p.num_experts + 31) / 32;
    const int32_t first = lane * per_lane;
    const int32_t last = min(first + per_lane, p.num_experts);
    int32_t sum = 0;
    int32_t num_hit = 0;
    for (int32_t expert = first; expert < last; ++expert) {
      const int32_t count = counts[expert * stride + num_warps];
      sum += count;
      num_hit += count > 0 ? 1 : 0;
    }
    int32_t row = sum_up_to_lane(sum, lane) - sum;
    for (int32_t expert = first; expert < last; ++expert) {
      int32_t& total = counts[expert * stride + num_warps];
      const int32_t count = total;
      total = row;
      p.expert_begin[expert] = row;
      row += count;
    }
    num_hit = __reduce_add_sync(kAllLanes, num_hit);
    if (lane == 0) {
      p.expert_begin[p.num_experts] = num_places;
      if (p.counters != nullptr) {
        p.counters[0] += num_hit;
        p.counters[1] += 1;
      }
    }
  }
  __syncthreads();
  for_places(p.experts, begin, end, [&](int32_t place, int32_t expert) {
    const uint32_t same = __match_any_sync(kAllLanes, expert);
    const int32_t before = __popc(same & ((1u << lane) - 1u));
    int32_t* const of_warps = counts + max(expert, 0) * stride;
    if (expert >= 0) {
      const int32_t row = of_warps[num_warps] + of_warps[warp] + before;
      p.source_row[row] = place / p.top_k;
      p.expert_row[place] = row;
    }
    __syncwarp();
    if (expert >= 0 && before == 0) of_warps[warp] += __popc(same);
    __syncwarp();
  });
}

// As many warps as have room for their counts: 32 up to 341 experts, 8 for 1024.
int32_t sort_warps(int32_t num_experts) {
  int32_t num_warps = kMaxSortWarps;
  while ((num_warps + 1) * num_experts > kMaxCounts) num_warps /= 2;
  return num_warps;
}
static_assert(9 * kMaxExperts <= kMaxCounts);

}  // namespace
}  // namespace cuda

void route_experts(CudaContext& ctx, const RouteExpertsParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.num_experts > 0 && p.num_experts <= kMaxExperts, "num_experts ", p.num_experts,
                 " is not in 1 to ", kMaxExperts);
  PACELINE_CHECK(p.top_k > 0 && p.top_k <= std::min(p.num_experts, kMaxTopK), "top_k ", p.top_k,
                 " is not in 1 to ", std::min(p.num_experts, kMaxTopK));
  PACELINE_CHECK(p.rule == RouterRule::kSoftmaxOfChosen, "unknown router rule");
  const auto kernel = p.num_experts <= 32    ? route_experts_kernel<1>
                      : p.num_experts <= 128 ? route_experts_kernel<4>
                                             : route_experts_kernel<kMaxExperts / 32>;
  launch(ctx, "route_experts", kernel,
         dim3(static_cast<unsigned>((p.max_rows + kRouteWarps - 1) / kRouteWarps)),
         dim3(kRouteWarps * 32), 0, p);
}

void sort_expert_rows(CudaContext& ctx, const SortExpertRowsParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.num_experts > 0 && p.num_experts <= kMaxExperts, "num_experts ", p.num_experts,
                 " is not in 1 to ", kMaxExperts);
  const int32_t num_warps = sort_warps(p.num_experts);
  const auto bytes = static_cast<size_t>((num_warps + 1) * p.num_experts) * sizeof(int32_t);
  launch(ctx, "sort_expert_rows", sort_expert_rows_kernel, dim3(1),
         dim3(static_cast<unsigned>(num_warps * 32)), bytes, p);
}

}  // namespace paceline
