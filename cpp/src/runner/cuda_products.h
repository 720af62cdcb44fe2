// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.h"
#include "gemm/gemm_planner.h"
#include "model/forward/decoder.h"
#include "wire/batch_shape.h"

namespace paceline {

// Lets cuBLASLt compete with our own kernels for every product of target and drafter (may be null)
// that has many rows, in decode buckets and in prefill. Runs kernels and waits for them.
void plan_products(CudaContext& ctx, GemmPlanner& planner, const BatchShape& shape,
                   const Decoder& target, const Decoder* drafter);

}  // namespace paceline
