// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <paceline/model.h>

namespace paceline {

// The public split_model after its checks: tests may give one GPU to several ranks, which then take
// turns on it.
[[nodiscard]] std::shared_ptr<const Model> split_over_gpus(
    const std::shared_ptr<const Model>& whole, std::span<const int32_t> gpus, GpuShare share);

}  // namespace paceline
