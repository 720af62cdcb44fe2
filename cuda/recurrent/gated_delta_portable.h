// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.h"
#include "ops/recurrent.h"

namespace paceline::cuda {

// gated_delta without clusters, with the bits of the kernels that have them.
// Of layers that the kernel of chunks takes.
void gated_delta_of_chunks(CudaContext& ctx, const GatedDeltaParams& p);
// Of any sizes. A block's registers have no room for the state of a head, some of which lies in
// local memory: correct, but slow.
void gated_delta_of_any_size(CudaContext& ctx, const GatedDeltaParams& p);

}  // namespace paceline::cuda
