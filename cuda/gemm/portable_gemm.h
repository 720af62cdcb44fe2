// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products in bfloat16 on every GPU since sm_80, by cp.async and mma.sync: of one matrix and by
// expert. Their bits are those of the kernels of sm_90a on the same device.

#include "gemm/expert_launch.h"
#include "ops/ops.h"

namespace paceline::cuda {

// `call.activation` must be null. With `halves`, the rows of the one matrix are gates and then
// their ups, the product is bfloat16 and has no bias, and y is that of the activation.
void launch_portable_gemm(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call,
                          const GatedActivationParams* halves = nullptr);

// The same of packed weights with scales. `call.activation` may be that of kMxfp4.
void launch_portable_packed(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call);

// Whether the activation is the end of the product.
[[nodiscard]] bool takes_portable_activation(const GemmParams& p);

}  // namespace paceline::cuda
