// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "device/cpu_context.h"
#include "model/weights/model_impl.h"
#include "model/weights/weight_layout.h"

namespace paceline {

// Fills every weight that is neither filled nor optional; see ModelBuilder::fill_dummy.
void fill_dummy_weights(const CpuContext& ctx, uint64_t seed,
                        std::vector<NamedWeight>& named_weights, const Model& model);

}  // namespace paceline
