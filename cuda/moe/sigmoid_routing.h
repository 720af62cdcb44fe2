// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.h"
#include "ops/moe.h"

namespace paceline::cuda {

// route_experts for RouterRule::kSigmoid, whose parameters have been checked.
void route_by_sigmoid(CudaContext& ctx, const RouteExpertsParams& p);

}  // namespace paceline::cuda
