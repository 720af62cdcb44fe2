// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.h"
#include "ops/ops.h"

namespace paceline::cuda::latent {

// Latent attention in bfloat16 for entries of 512 + 64 elements, as paged attention with one KV
// head. Both give the same bits.
void run_sm90a(CudaContext& ctx, const char* name, const PagedAttentionParams& p);
void run_portable(CudaContext& ctx, const char* name, const PagedAttentionParams& p);

}  // namespace paceline::cuda::latent
