// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/cpu_context.h"
#include "model/description/decoder_config.h"
#include "model/weights/rank_rows.h"
#include "model/weights/weight_layout.h"

namespace paceline {

// Fills every weight that is neither filled nor optional; see ModelBuilder::fill_dummy.
// rows: what a rank has of the tensors of the whole model, in the same order; empty: the weights
// are those of a whole model.
void fill_dummy_weights(const CpuContext& ctx, uint64_t seed, const DecoderConfig& config,
                        std::vector<NamedWeight>& named_weights, const DeviceBuffer& arena,
                        std::span<const RankRows> rows = {});

}  // namespace paceline
