// SPDX-License-Identifier: Apache-2.0

// The experts of rows by the scores of their logits, or by their tokens. A warp routes one row.

#include "moe/scored_routing.h"

#include <cstdint>

#include "common/launch.cuh"
#include "moe/scored_row.cuh"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kWarps = 4;  // rows of a block

template <RouterRule kRule, int32_t kPerLane>
__global__ void __launch_bounds__(kWarps * 32)
    route_by_score_kernel(const __grid_constant__ RouteExpertsParams p) {
  let_successor_start();
  const Corrections<kPerLane> corrections(p.correction, p.num_experts);
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (row >= min(*p.num_rows, p.max_rows)) return;
  const float* const logits = p.logits + int64_t{row} * p.num_experts;
  const Choice own = choose(score_keys<kRule, kPerLane>(p, logits, corrections), p.top_k);
  write_scored_choices<kRule>(p, row, logits, own.expert);
}

__global__ void __launch_bounds__(kWarps * 32)
    route_by_token_kernel(const __grid_constant__ RouteExpertsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (row >= min(*p.num_rows, p.max_rows)) return;
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t token = p.token_ids[row];
  const int64_t known = token >= 0 && token < p.vocab_size ? token : 0;
  const int32_t expert = lane < p.top_k ? p.token_experts[known * p.top_k + lane] : 0;
  write_scored_choices<RouterRule::kSqrtSoftplus>(p, row, p.logits + int64_t{row} * p.num_experts,
                                                  expert);
}

template <RouterRule kRule>
auto kernel_of(int32_t num_experts) {
  return num_experts <= 64    ? route_by_score_kernel<kRule, 2>
         : num_experts <= 256 ? route_by_score_kernel<kRule, 8>
                              : route_by_score_kernel<kRule, kMaxExperts / 32>;
}

}  // namespace

void route_by_score(CudaContext& ctx, const RouteExpertsParams& p) {
  auto* const kernel = p.token_experts != nullptr ? route_by_token_kernel
                       : p.rule == RouterRule::kSigmoid
                           ? kernel_of<RouterRule::kSigmoid>(p.num_experts)
                           : kernel_of<RouterRule::kSqrtSoftplus>(p.num_experts);
  const dim3 grid(static_cast<unsigned>((p.max_rows + kWarps - 1) / kWarps));
  launch(ctx, "route_by_score", kernel, grid, dim3(kWarps * 32), 0, p);
}

}  // namespace cuda
}  // namespace paceline
