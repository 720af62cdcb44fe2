// SPDX-License-Identifier: Apache-2.0

// Chooses the tile by which sm_90a computes a product of packed fp8 weights.

#include <cstdint>

#include "device/cuda_context.h"
#include "gemm/converted_gemm.h"
#include "gemm/converted_launch.cuh"

namespace paceline::cuda {
namespace {

template <class Base, int32_t converters, bool has_tile_sums>
using Fp8 = ConvertedTile<Base, WeightFormat::kFp8, converters, 2, 1, has_tile_sums>;

template <bool has_tile_sums>
void launch_for_rows(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  if (p.max_rows <= 64) {
    return launch_cheapest_converted<Fp8<TokenRows<1, 32, 2>, 12, has_tile_sums>,
                                     Fp8<TokenRows<1, 48, 2>, 12, has_tile_sums>,
                                     Fp8<TokenRows<1, 96, 2>, 12, has_tile_sums>>(ctx, p, end);
  }
  // Sums of 128 tokens need the registers of four warps that convert.
  launch_converted_tile<Fp8<WeightRows<1, 128, 2>, 8, has_tile_sums>>(ctx, p, end);
}

}  // namespace

template <>
void launch_converted<WeightFormat::kFp8>(CudaContext& ctx, const GemmParams& p,
                                          const ProductEnd& end) {
  const WeightMatrix& w = p.weight;
  const bool has_tile_sums = !w.has_exact_scales && w.scale_cols < w.k;
  has_tile_sums ? launch_for_rows<true>(ctx, p, end) : launch_for_rows<false>(ctx, p, end);
}

}  // namespace paceline::cuda
