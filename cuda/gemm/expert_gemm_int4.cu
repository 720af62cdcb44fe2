// SPDX-License-Identifier: Apache-2.0

#include "gemm/packed_launch.cuh"

namespace paceline::cuda {
namespace {

// Matrices of few tiles for each multiprocessor, and at most 16 rows.
template <bool is_float16>
void launch_few_tiles(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const bool is_narrow = rows_to_expect(p) <= 8;
  if (p.weight.first.packed_tile_rows() <= 2 * ctx.num_sms) {
    return is_narrow ? launch_split<SplitInt4Shape<1, 1, is_float16>>(ctx, p, call)
                     : launch_split<SplitInt4Shape<1, 2, is_float16>>(ctx, p, call);
  }
  is_narrow ? launch_split<SplitInt4Shape<2, 1, is_float16>>(ctx, p, call)
            : launch_split<SplitInt4Shape<2, 2, is_float16>>(ctx, p, call);
}

}  // namespace

template <>
void launch_expert_gemm<WeightFormat::kInt4>(CudaContext& ctx, const ExpertGemmParams& p,
                                             const ProductCall& call) {
  constexpr WeightFormat kInt4 = WeightFormat::kInt4;
  const WeightMatrix& w = p.weight.first;
  // Only the warps of int4_kernel.cuh gather tokens.
  if (w.order != nullptr) return launch_warps<kInt4, false>(ctx, p, call);
  if (rows_to_expect(p) <= 16) {
    // As for the other formats (launch_few_rows).
    const bool has_few_tiles = p.expert_begin == nullptr && row_tiles_per_sm(ctx, p) < 5;
    if (!has_few_tiles || w.scale_cols % kPackedColumns != 0) {
      return launch_warps<kInt4, false>(ctx, p, call);
    }
    return w.scale_dtype == DType::kFloat16 ? launch_few_tiles<true>(ctx, p, call)
                                            : launch_few_tiles<false>(ctx, p, call);
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
