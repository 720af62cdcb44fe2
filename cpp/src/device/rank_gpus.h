// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which GPUs can share a model as ranks. Pure functions of what the driver says of them, so that
// tests need no GPU.

#include <cstdint>
#include <span>
#include <string>

namespace paceline {

struct GpuFacts {
  int32_t gpu;
  std::string name;
  int64_t memory_bytes;
};

// Throws Unsupported unless the GPUs have one name and equal memory, but for less than 16 bytes.
void check_equal_gpus(std::span<const GpuFacts> gpus);

// Throws Unsupported if `gpu` cannot access the memory of `peer`.
void check_peer_access(int32_t gpu, int32_t peer, bool can_access);

}  // namespace paceline
