// SPDX-License-Identifier: Apache-2.0

#include "gemm/packed_launch.cuh"

namespace paceline::cuda {
template <>
void launch_expert_gemm<WeightFormat::kInt4>(CudaContext& ctx, const ExpertGemmParams& p,
                                             const ProductCall& call) {
  constexpr WeightFormat kInt4 = WeightFormat::kInt4;
  // Only the warps of int4_kernel.cuh gather tokens.
  if (p.weight.first.order != nullptr || rows_to_expect(p) <= 16) {
    return launch_warps<kInt4, false>(ctx, p, call);
  }
  // The tile that leaves the busiest multiprocessor the least to do, at the times of fp8.
  const double costs[] = {tile_cost(ctx, p, 64, 32, 17.0), tile_cost(ctx, p, 64, 64, 17.5),
                          tile_cost(ctx, p, 128, 64, 25.5), tile_cost(ctx, p, 128, 128, 41.0)};
  switch (std::min_element(std::begin(costs), std::end(costs)) - std::begin(costs)) {
    case 0:
      return launch_wide<WideShape<kInt4, 1, 32, 3>, false>(ctx, p, call);
    case 1:
      return launch_wide<WideShape<kInt4, 1, 64, 2>, false>(ctx, p, call);
    case 2:
      return launch_wide<WideShape<kInt4, 2, 64>, false>(ctx, p, call);
    default:
      return launch_wide<WideShape<kInt4, 2, 128>, false>(ctx, p, call);
  }
}

}  // namespace paceline::cuda
