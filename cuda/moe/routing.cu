// SPDX-License-Identifier: Apache-2.0

// Which experts a row visits, and where its expert rows lie. Routing depends only on the row's own
// logits. Sorting counts integers: its order is that of the places, whatever warp arrives first.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/check.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "moe/route_row.cuh"
#include "moe/router_product.cuh"
#include "moe/scored_row.cuh"
#include "ops/moe.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kRouteWarps = 4;  // rows of a block
constexpr int32_t kMaxSortWarps = 32;
constexpr int32_t kMaxCounts = 11264;  // of a block's shared memory: 44 KB
constexpr int32_t kLoadsAhead = 4;     // of a lane

// Routes rows by their logits; see ScoreRouter.
template <RouterRule kRule, int32_t kPerLane>
class LogitRouter {
 public:
  static constexpr int32_t kLogitsPerLane = kPerLane;
  __device__ __forceinline__ explicit LogitRouter(const RouteExpertsParams&) {}
  // The row is below max_rows. Returns the choice of place l in lane l.
  __device__ __forceinline__ int32_t route(const RouteExpertsParams& p, int32_t row) const {
    const int32_t num_rows = *p.num_rows;
    const auto keys = logit_keys<kPerLane>(p.logits + row * p.logits_stride, p.num_experts);
    const Choice own = choose(keys, p.top_k);
    if (row < num_rows) write_choices<kRule>(p, row, keys, own);
    return own.expert;
  }
};

// A warp chooses the experts of one row.
template <class Router>
__global__ void __launch_bounds__(kRouteWarps * 32)
    route_experts_kernel(const __grid_constant__ RouteExpertsParams p) {
  let_successor_start();
  const Router router(p);
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x * kRouteWarps + threadIdx.x / 32);
  if (row < p.max_rows) router.route(p, row);
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

// The counts of a counting sort by one block. Each warp takes a stretch of the places and has its
// own counts, so that the expert rows of an expert are in the order of the places. By expert: a
// count for each warp, which becomes the number of places in the stretches before; then the number
// of all, which becomes the first expert row. The odd distance keeps the lanes in different banks,
// whether they visit warps or experts.
__device__ __forceinline__ int32_t* cleared_counts(int32_t num_experts) {
  extern __shared__ int32_t counts[];
  const int32_t num_threads = static_cast<int32_t>(blockDim.x);
  const int32_t size = num_experts * (num_threads / 32 + 1);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < size; i += num_threads) counts[i] = 0;
  __syncthreads();
  return counts;
}

__device__ __forceinline__ void sort_places(const SortExpertRowsParams& p, int32_t* counts) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t num_threads = static_cast<int32_t>(blockDim.x);
  const int32_t num_warps = num_threads / 32;
  const int32_t stride = num_warps + 1;
  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  const int32_t num_places = num_rows * p.top_k;
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
      if (p.has_shared) p.expert_begin[p.num_experts + 1] = num_places + num_rows;
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
  if (!p.has_shared) return;
  for (int32_t row = static_cast<int32_t>(threadIdx.x); row < num_rows; row += num_threads) {
    p.source_row[num_places + row] = row;
  }
}

__global__ void __launch_bounds__(kMaxSortWarps * 32)
    sort_expert_rows_kernel(const __grid_constant__ SortExpertRowsParams p) {
  let_successor_start();
  int32_t* const counts = cleared_counts(p.num_experts);
  wait_for_predecessor();
  sort_places(p, counts);
}

// Warps of a block that also routes: as many as have registers for the logits.
constexpr int32_t max_warps_of(int32_t logits_per_lane) {
  return logits_per_lane <= 4 ? kMaxSortWarps : 16;
}

// Few places are sorted without counts: each is compared with all others.
constexpr int32_t kFewPlaces = 64;

// How many of the places have an expert below `expert`, or the same one and come before `place`.
struct Before {
  int32_t lower = 0;
  int32_t same = 0;
};
__device__ __forceinline__ Before places_before(const int32_t (&experts)[kFewPlaces],
                                                int32_t num_places, int32_t expert, int32_t place) {
  Before before;
  for (int32_t first = 0; first < num_places; first += 4) {
    const int4 four = *reinterpret_cast<const int4*>(experts + first);
    const int32_t others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      before.lower += others[i] < expert ? 1 : 0;
      before.same += others[i] == expert && first + i < place ? 1 : 0;
    }
  }
  return before;
}

// Sorts places whose experts are in shared memory, those beyond the last one kMaxExperts.
__device__ __forceinline__ void sort_few_places(const SortExpertRowsParams& p,
                                                const int32_t (&experts)[kFewPlaces],
                                                int32_t num_rows) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto num_threads = static_cast<int32_t>(blockDim.x);
  const int32_t num_places = num_rows * p.top_k;
  const bool counts = p.counters != nullptr;
  int64_t counted[2] = {};
  if (counts && thread == 0) {
    counted[0] = p.counters[0];
    counted[1] = p.counters[1];
  }
  bool is_first = false;  // of its expert
  if (thread < num_places) {
    const int32_t expert = experts[thread];
    const Before before = places_before(experts, num_places, expert, thread);
    is_first = before.same == 0;
    p.source_row[before.lower + before.same] = thread / p.top_k;
    p.expert_row[thread] = before.lower + before.same;
  }
  for (int32_t expert = thread; expert <= p.num_experts; expert += num_threads) {
    p.expert_begin[expert] = places_before(experts, num_places, expert, 0).lower;
  }
  if (p.has_shared) {
    if (thread == 0) p.expert_begin[p.num_experts + 1] = num_places + num_rows;
    if (thread < num_rows) p.source_row[num_places + thread] = thread;
  }
  if (!counts) return;
  const int32_t num_hit = __syncthreads_count(is_first);
  if (thread == 0) {
    p.counters[0] = counted[0] + num_hit;
    p.counters[1] = counted[1] + 1;
  }
}

// A warp of the block chooses the experts of each row.
template <class Router>
__device__ __forceinline__ void choose_rows(const RouteAndSortParams& p, const Router& router,
                                            int32_t num_rows, int32_t (&chosen)[kFewPlaces]) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t top_k = p.sort.top_k;
  if (warp >= p.route.max_rows) return;
  const int32_t expert = router.route(p.route, warp);
  const int32_t place = warp * top_k + thread % 32;
  if (thread % 32 < top_k && warp < num_rows && place < kFewPlaces) chosen[place] = expert;
}

// Both for no more rows than warps.
template <class Router>
__global__ void __launch_bounds__(max_warps_of(Router::kLogitsPerLane) * 32)
    route_and_sort_kernel(const __grid_constant__ RouteAndSortParams p) {
  __shared__ __align__(16) int32_t chosen[kFewPlaces];
  let_successor_start();
  const Router router(p.route);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < kFewPlaces) chosen[thread] = kMaxExperts;
  int32_t* const counts = cleared_counts(p.sort.num_experts);
  wait_for_predecessor();
  const int32_t num_rows = min(*p.sort.num_rows, p.sort.max_rows);
  choose_rows(p, router, num_rows, chosen);
  __syncthreads();  // the chosen experts are visible
  if (num_rows * p.sort.top_k <= kFewPlaces) {
    sort_few_places(p.sort, chosen, num_rows);
  } else {
    sort_places(p.sort, counts);
  }
}

// All of run_router for few rows and experts. Its places are few enough to be sorted without
// counts. Since sm_90, as its weights come by bulk copies.
template <class Router>
__global__ void __launch_bounds__(kRouterThreads)
    router_kernel(const __grid_constant__ RouteAndSortParams p,
                  const __grid_constant__ GemmParams product) {
#if PACELINE_HAS_CLUSTERS
  extern __shared__ __align__(128) std::byte storage[];
  __shared__ __align__(16) int32_t chosen[kFewPlaces];
  __shared__ uint64_t arrived;
  let_successor_start();
  const Router router(p.route);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < kFewPlaces) chosen[thread] = kMaxExperts;
  request_router_weights(product, shared_address(storage), &arrived);
  wait_for_predecessor();
  const int32_t num_rows = min(*p.sort.num_rows, p.sort.max_rows);
  compute_router_logits(product, shared_address(storage), &arrived);
  __syncthreads();  // the logits are visible
  choose_rows(p, router, num_rows, chosen);
  __syncthreads();  // the chosen experts are visible
  sort_few_places(p.sort, chosen, num_rows);
#endif
}

// As many warps as have room for their counts: 32 up to 341 experts, 8 for 1024.
int32_t sort_warps(int32_t num_experts, int32_t max_warps) {
  int32_t num_warps = max_warps;
  while ((num_warps + 1) * num_experts > kMaxCounts) num_warps /= 2;
  return num_warps;
}
static_assert(9 * kMaxExperts <= kMaxCounts);

// Launches a kernel of one block that sorts.
template <class Params>
void launch_sort(CudaContext& ctx, const char* name, void (*kernel)(Params), int32_t num_experts,
                 int32_t num_warps, const Params& p) {
  const auto bytes = static_cast<size_t>((num_warps + 1) * num_experts) * sizeof(int32_t);
  launch(ctx, name, kernel, dim3(1), dim3(static_cast<unsigned>(num_warps * 32)), bytes, p);
}

// Calls run(std::type_identity<Router>()) with the router of a rule and a number of experts.
template <RouterRule kRule, class Run>
void with_score_router(int32_t num_experts, Run run) {
  if (num_experts <= 64) return run(std::type_identity<ScoreRouter<kRule, 2>>());
  if (num_experts <= 256) return run(std::type_identity<ScoreRouter<kRule, 8>>());
  run(std::type_identity<ScoreRouter<kRule, kMaxExperts / 32>>());
}
template <RouterRule kRule, class Run>
void with_logit_router(int32_t num_experts, Run run) {
  with_logits_per_lane(num_experts, [&](auto per_lane) {
    run(std::type_identity<LogitRouter<kRule, per_lane()>>());
  });
}
template <class Run>
void with_router(const RouteExpertsParams& p, Run run) {
  if (p.token_experts != nullptr) return run(std::type_identity<TokenRouter>());
  switch (p.rule) {
    case RouterRule::kSoftmaxOfChosen:
      return with_logit_router<RouterRule::kSoftmaxOfChosen>(p.num_experts, run);
    case RouterRule::kSoftmax:
      return with_logit_router<RouterRule::kSoftmax>(p.num_experts, run);
    case RouterRule::kSigmoid:
      return with_score_router<RouterRule::kSigmoid>(p.num_experts, run);
    case RouterRule::kSqrtSoftplus:
      return with_score_router<RouterRule::kSqrtSoftplus>(p.num_experts, run);
  }
}

void launch_router(CudaContext& ctx, const RouterParams& p) {
  check_params(p.route);
  check_params(p.sort);
  with_router(p.route, [&]<class Router>(std::type_identity<Router>) {
    static OncePerDevice allow;
    allow([] { allow_shared_bytes(router_kernel<Router>, kMaxRouterBytes, "router"); });
    launch(ctx, "router", router_kernel<Router>, dim3(1), dim3(kRouterThreads),
           static_cast<size_t>(router_bytes(p.product)),
           RouteAndSortParams{.route = p.route, .sort = p.sort}, p.product);
  });
}

}  // namespace
}  // namespace cuda

void route_experts(CudaContext& ctx, const RouteExpertsParams& p) {
  using namespace cuda;
  check_params(p);
  const dim3 grid(static_cast<unsigned>((p.max_rows + kRouteWarps - 1) / kRouteWarps));
  with_router(p, [&]<class Router>(std::type_identity<Router>) {
    launch(ctx, "route_experts", route_experts_kernel<Router>, grid, dim3(kRouteWarps * 32), 0, p);
  });
}

void sort_expert_rows(CudaContext& ctx, const SortExpertRowsParams& p) {
  using namespace cuda;
  check_params(p);
  launch_sort(ctx, "sort_expert_rows", sort_expert_rows_kernel, p.num_experts,
              sort_warps(p.num_experts, kMaxSortWarps), p);
}

void route_and_sort(CudaContext& ctx, const RouteAndSortParams& p) {
  using namespace cuda;
  check_params(p.route);
  check_params(p.sort);
  with_router(p.route, [&]<class Router>(std::type_identity<Router>) {
    const int32_t num_warps = sort_warps(p.sort.num_experts, max_warps_of(Router::kLogitsPerLane));
    if (p.route.max_rows <= num_warps) {
      launch_sort(ctx, "route_and_sort", route_and_sort_kernel<Router>, p.sort.num_experts,
                  num_warps, p);
      return;
    }
    route_experts(ctx, p.route);
    sort_expert_rows(ctx, p.sort);
  });
}

void run_router(CudaContext& ctx, const RouterParams& p) {
  using namespace cuda;
  if (ctx.has_clusters && is_router_product(p.product) &&
      p.route.max_rows * p.route.top_k <= kFewPlaces) {
    return launch_router(ctx, p);
  }
  gemm(ctx, p.product);
  route_and_sort(ctx, {.route = p.route, .sort = p.sort});
}

}  // namespace paceline
