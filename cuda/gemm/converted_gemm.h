// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of one matrix of packed weights on sm_90a, whose tiles are those of bfloat16 weights
// (converted_kernel.cuh): of int4 and nvfp4, and of fp8 where they are faster than those of
// packed_launch.cuh.

#include "gemm/gemm_args.h"
#include "ops/ops.h"

namespace paceline::cuda {

// Whether launch_converted computes this product.
[[nodiscard]] bool takes_converted(const CudaContext& ctx, const GemmParams& p);

// Launches the tile that is fastest for the shape. takes_converted must be true.
void launch_converted(CudaContext& ctx, const GemmParams& p, const ProductEnd& end = {});

// Whether such a product may end in an activation or add to a residual (ProductEnd). Those of fp8
// have tiles of more tokens.
[[nodiscard]] bool has_converted_ends(const CudaContext& ctx, const GemmParams& p);

// Whether the activation is faster as its end.
[[nodiscard]] bool takes_converted_activation(const CudaContext& ctx, const GemmParams& p);

// The same of weights of one format, which takes_converted has let through.
template <WeightFormat format>
void launch_converted(CudaContext& ctx, const GemmParams& p, const ProductEnd& end);
template <WeightFormat format>
[[nodiscard]] bool takes_converted_activation(const CudaContext& ctx, const GemmParams& p);

}  // namespace paceline::cuda
