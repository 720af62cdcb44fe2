// SPDX-License-Identifier: Apache-2.0

// The experts of rows by the sigmoids of their logits. A warp routes one row.

#include "moe/sigmoid_routing.h"

#include <cstdint>

#include "common/launch.cuh"
#include "moe/sigmoid_row.cuh"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kWarps = 4;  // rows of a block

template <int32_t kPerLane>
__global__ void __launch_bounds__(kWarps * 32)
    route_by_sigmoid_kernel(const __grid_constant__ RouteExpertsParams p) {
  let_successor_start();
  const Corrections<kPerLane> corrections(p.correction, p.num_experts);
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (row >= min(*p.num_rows, p.max_rows)) return;
  const float* const logits = p.logits + int64_t{row} * p.num_experts;
  const Choice own = choose(sigmoid_keys<kPerLane>(p, logits, corrections), p.top_k);
  write_sigmoid_choices(p, row, logits, own);
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
