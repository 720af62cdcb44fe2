// SPDX-License-Identifier: Apache-2.0

// Chooses the tile by which sm_90a computes a product of packed nvfp4 weights.

#include <cstdint>

#include "device/cuda_context.h"
#include "gemm/converted_gemm.h"
#include "gemm/converted_launch.cuh"

namespace paceline::cuda {
namespace {

template <class Base, int32_t converters, int32_t ahead, int32_t blocks = 1>
using Nvfp4 = ConvertedTile<Base, WeightFormat::kNvfp4, converters, ahead, blocks>;
// The narrowest tile of many.
using Narrow = Nvfp4<WeightRows<1, 16, 2>, 4, 2, 3>;

}  // namespace

template <>
void launch_converted<WeightFormat::kNvfp4>(CudaContext& ctx, const GemmParams& p,
                                            const ProductEnd& end) {
  if (end.activation != nullptr) return launch_converted_tile<Narrow>(ctx, p, end);
  if (p.max_rows <= 16) {
    launch_cheapest_converted<Nvfp4<ThinRows<16>, 12, 2>, Nvfp4<ThinRows<32>, 12, 2>,
                              Nvfp4<ThinRows<48>, 12, 2>, Narrow>(ctx, p, end);
  } else if (p.max_rows <= 64) {
    launch_cheapest_converted<Nvfp4<TokenRows<1, 32, 2>, 12, 2>, Nvfp4<TokenRows<1, 48, 2>, 12, 2>,
                              Nvfp4<TokenRows<1, 96, 2>, 12, 2>>(ctx, p, end);
  } else {
    launch_cheapest_converted<Nvfp4<WeightRows<1, 128, 2>, 12, 2>,
                              Nvfp4<TokenRows<2, 96, 2>, 12, 2>>(ctx, p, end);
  }
}

template <>
bool takes_converted_activation<WeightFormat::kNvfp4>(const CudaContext& ctx, const GemmParams& p) {
  return num_waves<Narrow>(ctx, p) <= 3;
}

}  // namespace paceline::cuda
