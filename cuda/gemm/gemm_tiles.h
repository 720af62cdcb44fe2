// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of bfloat16 weights on sm_90a, by bulk tensor copies and wgmma.

#include "gemm/gemm_args.h"
#include "ops/ops.h"

namespace paceline::cuda {

// Launches the tile that is fastest for the shape.
void launch_tiles(CudaContext& ctx, const GemmParams& p, const ProductEnd& end = {});

// Whether launch_tiles takes a residual for this product.
[[nodiscard]] bool takes_residual(const GemmParams& p);

// Whether the activation is faster as the end of the product.
[[nodiscard]] bool takes_activation(const CudaContext& ctx, const GemmParams& p);

}  // namespace paceline::cuda
