// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.h"
#include "ops/moe.h"

namespace paceline::cuda {

// route_experts for rules with scores and for tables, whose parameters have been checked.
void route_by_score(CudaContext& ctx, const RouteExpertsParams& p);

}  // namespace paceline::cuda
