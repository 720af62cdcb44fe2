// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of one row whose kernel also computes what stands before them: the norm of the row.

#include "ops/ops.h"

namespace paceline::cuda {

// Whether the kernel of normed products serves these ops, and is faster than two launches.
[[nodiscard]] bool takes_norm(const CudaContext& ctx, const NormedGemmParams& p);

// takes_norm must be true.
void launch_normed_gemm(CudaContext& ctx, const NormedGemmParams& p);

}  // namespace paceline::cuda
