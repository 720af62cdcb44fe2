// SPDX-License-Identifier: Apache-2.0
#pragma once

// The choice of a row's experts by the scores of its logits, by one warp. Lane l holds the
// experts l, l + 32, ..., the group l and, at the end, the result of place l.

#include <cstdint>

#include "base/ordered.h"
#include "base/sigmoid.h"
#include "common/reduce.cuh"
#include "moe/route_row.cuh"
#include "ops/moe.h"

namespace paceline::cuda {

// The score of a logit.
template <RouterRule kRule>
__device__ __forceinline__ float score_of(float logit) {
  static_assert(kRule == RouterRule::kSigmoid || kRule == RouterRule::kSqrtSoftplus);
  return kRule == RouterRule::kSigmoid ? sigmoid_same_bits(logit) : sqrt_softplus_same_bits(logit);
}

// The lowest lane that has `value`.
__device__ __forceinline__ int32_t first_lane_with(uint32_t value, uint32_t own) {
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, own == value))) - 1;
}

// One bit for each group whose experts can be chosen. `keys` are those of a lane's experts.
template <int32_t kPerLane>
__device__ __forceinline__ uint32_t best_groups(const ScoreRouting& routing, int32_t size,
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

// The corrections of a lane's experts.
template <int32_t kPerLane>
struct Corrections {
  __device__ __forceinline__ Corrections(const float* correction, int32_t num_experts) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t expert = static_cast<int32_t>(threadIdx.x) % 32 + 32 * i;
      values[i] = expert < num_experts ? correction[expert] : 0.0f;
    }
  }

  float values[kPerLane];
};

// Corrected scores; every lane of the warp calls it. logit_of(i) is the logit of a lane's expert i.
template <RouterRule kRule, int32_t kPerLane, class LogitOf>
__device__ __forceinline__ RowKeys<kPerLane> score_keys(const RouteExpertsParams& p,
                                                        const LogitOf& logit_of,
                                                        const Corrections<kPerLane>& corrections) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  RowKeys<kPerLane> row;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t expert = lane + 32 * i;
    row.keys[i] = 0;
    if (expert >= p.num_experts) continue;
    row.keys[i] = to_ordered(comparable(score_of<kRule>(logit_of(i)) + corrections.values[i]));
  }
  if (p.scoring.num_groups == 1) return row;
  const int32_t size = p.num_experts / p.scoring.num_groups;
  const uint32_t open = best_groups(p.scoring, size, lane, row.keys);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t group = (lane + 32 * i) / size;
    if (group < p.scoring.num_groups && (open >> group & 1u) == 0) row.keys[i] = 0;
  }
  return row;
}

// Writes a row's choices and their weights, from their scores; every lane of the warp calls it,
// lane l with the expert of place l.
template <RouterRule kRule>
__device__ __forceinline__ void write_scored_choices(const RouteExpertsParams& p, int32_t row,
                                                     const float* logits, int32_t expert) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  float weight = lane < p.top_k ? score_of<kRule>(logits[expert]) : 0.0f;
  float sum = 0.0f;
  for (int32_t place = 0; place < p.top_k; ++place) sum += __shfl_sync(kAllLanes, weight, place);
  if (lane >= p.top_k) return;
  if (p.scoring.normalises) weight /= sum + 1e-20f;
  p.experts[int64_t{row} * p.top_k + lane] = expert;
  p.weights[int64_t{row} * p.top_k + lane] = weight * p.scoring.scale;
}

// Routes rows by their scores; one object for each warp, made before the kernel waits.
template <RouterRule kRule, int32_t kPerLane>
class ScoreRouter {
 public:
  static constexpr int32_t kLogitsPerLane = kPerLane;
  __device__ __forceinline__ explicit ScoreRouter(const RouteExpertsParams& p)
      : corrections_(p.correction, p.num_experts) {}
  // Returns a lane's choice.
  __device__ __forceinline__ int32_t route(const RouteExpertsParams& p, int32_t row) const {
    // Logits are loaded together, and before the row is known to exist: one latency. Many of them
    // would take too many registers.
    constexpr bool kLoadsFirst = kPerLane <= 8;
    const int32_t num_rows = *p.num_rows;
    const float* const logits = p.logits + row * p.logits_stride;
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    float loaded[kLoadsFirst ? kPerLane : 1] = {};
    if constexpr (kLoadsFirst) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        loaded[i] = lane + 32 * i < p.num_experts ? logits[lane + 32 * i] : 0.0f;
      }
    }
    const auto logit_of = [&](int i) { return kLoadsFirst ? loaded[i] : logits[lane + 32 * i]; };
    const Choice choice = choose(score_keys<kRule>(p, logit_of, corrections_), p.top_k);
    if (row < num_rows) write_scored_choices<kRule>(p, row, logits, choice.expert);
    return choice.expert;
  }

 private:
  Corrections<kPerLane> corrections_;
};

// Routes rows by their tokens.
class TokenRouter {
 public:
  static constexpr int32_t kLogitsPerLane = 1;
  __device__ __forceinline__ explicit TokenRouter(const RouteExpertsParams&) {}
  __device__ __forceinline__ int32_t route(const RouteExpertsParams& p, int32_t row) const {
    const int32_t num_rows = *p.num_rows;
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t token = p.token_ids[row];
    const int64_t known = token >= 0 && token < p.vocab_size ? token : 0;
    const int32_t expert = lane < p.top_k ? p.token_experts[known * p.top_k + lane] : 0;
    if (row < num_rows) {
      write_scored_choices<RouterRule::kSqrtSoftplus>(p, row, p.logits + row * p.logits_stride,
                                                      expert);
    }
    return expert;
  }
};

}  // namespace paceline::cuda
