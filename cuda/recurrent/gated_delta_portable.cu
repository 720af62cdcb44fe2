// SPDX-License-Identifier: Apache-2.0

#include "recurrent/gated_delta_portable.h"

#include "recurrent/chunk_kernel.cuh"

namespace paceline::cuda {

void gated_delta_of_chunks(CudaContext& ctx, const GatedDeltaParams& p) {
  launch_chunks<LoopVariant>(ctx, p);
}

}  // namespace paceline::cuda
