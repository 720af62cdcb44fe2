// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <paceline/model.h>

#include "model/weights/rank_weights.h"

namespace paceline {

// The public functions for several GPUs, after their checks: tests may give one GPU to several
// ranks, which then take turns on it.
[[nodiscard]] std::shared_ptr<const Model> split_over_gpus(const Model& whole,
                                                           std::span<const int32_t> gpus,
                                                           GpuShare share);
// The same for memory of any device, so that tests need no GPU.
[[nodiscard]] std::shared_ptr<const Model> split_over(const Model& whole, Device device,
                                                      std::span<const RankMemory> memories,
                                                      GpuShare share);
// ModelBuilder for ranks with such memory.
[[nodiscard]] ModelBuilder builder_over(std::string_view config_json, DType weight_dtype,
                                        Device device, std::span<const RankMemory> memories,
                                        GpuShare share);

// Lets the GPUs work together and returns the memory of each.
[[nodiscard]] std::vector<RankMemory> memories_of(std::span<const int32_t> gpus);
// Throws InvalidArgument unless there are 1 to kMaxRanks different numbers.
void check_gpus(std::span<const int32_t> gpus);

}  // namespace paceline
