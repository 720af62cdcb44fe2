// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <paceline/model.h>

#include "device/device_memory.h"

namespace paceline {

// The public split_model after its checks: tests may give one GPU to several ranks, which then take
// turns on it.
[[nodiscard]] std::shared_ptr<const Model> split_over_gpus(const Model& whole,
                                                           std::span<const int32_t> gpus,
                                                           GpuShare share);

// Where the weights of a rank go.
struct RankMemory {
  DeviceMemory* memory;
  int32_t gpu = 0;  // if the memory is that of one
};
// The same for memory of any device, so that tests need no GPU.
[[nodiscard]] std::shared_ptr<const Model> split_over(const Model& whole, Device device,
                                                      std::span<const RankMemory> memories,
                                                      GpuShare share);

}  // namespace paceline
