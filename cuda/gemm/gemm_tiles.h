// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of bfloat16 weights on sm_90a, by bulk tensor copies and wgmma.

#include "ops/ops.h"

namespace paceline::cuda {

// Launches the tile that is fastest for the shape. With an activation, whose product is bfloat16
// and has no bias, y is that of the activation.
void launch_tiles(CudaContext& ctx, const GemmParams& p,
                  const GatedActivationParams* activation = nullptr);

// Whether the activation is faster as the end of the product.
[[nodiscard]] bool takes_activation(const CudaContext& ctx, const GemmParams& p);

}  // namespace paceline::cuda
