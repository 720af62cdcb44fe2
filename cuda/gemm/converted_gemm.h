// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of one matrix of packed int4 weights on sm_90a, whose tiles are those of bfloat16
// weights (converted_kernel.cuh).

#include "gemm/gemm_args.h"
#include "ops/ops.h"

namespace paceline::cuda {

// Whether launch_converted computes this product.
[[nodiscard]] bool takes_converted(const CudaContext& ctx, const GemmParams& p);

// Launches the tile that is fastest for the shape. takes_converted must be true.
void launch_converted(CudaContext& ctx, const GemmParams& p, const ProductEnd& end = {});

// Whether the activation is faster as the end of such a product.
[[nodiscard]] bool takes_converted_activation(const CudaContext& ctx, const GemmParams& p);

}  // namespace paceline::cuda
