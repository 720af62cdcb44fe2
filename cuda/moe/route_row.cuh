// SPDX-License-Identifier: Apache-2.0
#pragma once

// The choice of a row's experts by one warp. It depends only on the row's own logits.

#include <cstdint>
#include <type_traits>

#include "base/check.h"
#include "base/ordered.h"
#include "common/reduce.cuh"
#include "ops/moe.h"

namespace paceline::cuda {

// What decides the choice of a row, as ordered bits. Lane l holds the experts l, l + 32, ...; 0: no
// expert, one that cannot be chosen, or already chosen.
template <int32_t kPerLane>
struct RowKeys {
  uint32_t keys[kPerLane];
};

// The logits alone.
template <int32_t kPerLane>
__device__ __forceinline__ RowKeys<kPerLane> logit_keys(const float* logits, int32_t num_experts) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  RowKeys<kPerLane> row;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t expert = lane + 32 * i;
    row.keys[i] = expert < num_experts ? to_ordered(comparable(logits[expert])) : 0;
  }
  return row;
}

// What a row chose for one of its places.
struct Choice {
  int32_t expert;
  float value;  // of the expert's key
};

// Chooses the experts of a row; every lane of the warp calls it. Lane l gets the choice of place l.
template <int32_t kPerLane>
__device__ __forceinline__ Choice choose(RowKeys<kPerLane> row, int32_t top_k) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  Choice own = {0, 0.0f};
  for (int32_t place = 0; place < top_k; ++place) {
    uint32_t best = row.keys[0];
    int32_t expert = lane;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (row.keys[i] <= best) continue;
      best = row.keys[i];
      expert = lane + 32 * i;
    }
    const uint32_t highest = __reduce_max_sync(kAllLanes, best);
    expert = __reduce_min_sync(kAllLanes, best == highest ? expert : kMaxExperts);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i == expert) row.keys[i] = 0;
    }
    if (lane == place) own = {expert, from_ordered(highest)};
  }
  return own;
}

// Writes a row's choices and their weights, a softmax of logits; every lane of the warp calls it.
// `keys` are those of all experts.
template <RouterRule kRule, int32_t kPerLane>
__device__ __forceinline__ void write_choices(const RouteExpertsParams& p, int32_t row,
                                              const RowKeys<kPerLane>& keys, const Choice& own) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const float best = __shfl_sync(kAllLanes, own.value, 0);
  const float weight = expf((own.value - best) * p.logit_scale);
  float sum = 0.0f;
  if constexpr (kRule == RouterRule::kSoftmax) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (keys.keys[i] == 0) continue;
      sum += expf((from_ordered(keys.keys[i]) - best) * p.logit_scale);
    }
    sum = warp_sum(sum);
  } else {
    for (int32_t place = 0; place < p.top_k; ++place) sum += __shfl_sync(kAllLanes, weight, place);
  }
  if (lane >= p.top_k) return;
  const float scale = p.expert_scales != nullptr ? p.expert_scales[own.expert] : 1.0f;
  p.experts[int64_t{row} * p.top_k + lane] = own.expert;
  p.weights[int64_t{row} * p.top_k + lane] = weight / sum * scale;
}

inline void check_params(const RouteExpertsParams& p) { check_routing(p); }

inline void check_params(const SortExpertRowsParams& p) {
  PACELINE_CHECK(p.num_experts > 0 && p.num_experts <= kMaxExperts, "num_experts ", p.num_experts,
                 " is not in 1 to ", kMaxExperts);
}

// Calls run(number) with the number of logits that a lane holds, as a constant.
template <class Run>
void with_logits_per_lane(int32_t num_experts, Run run) {
  if (num_experts <= 32) return run(std::integral_constant<int32_t, 1>());
  if (num_experts <= 128) return run(std::integral_constant<int32_t, 4>());
  if (num_experts <= 256) return run(std::integral_constant<int32_t, 8>());
  if (num_experts <= 512) return run(std::integral_constant<int32_t, 16>());
  run(std::integral_constant<int32_t, kMaxExperts / 32>());
}

}  // namespace paceline::cuda
