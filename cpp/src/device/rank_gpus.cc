// SPDX-License-Identifier: Apache-2.0
#include "device/rank_gpus.h"

#include <paceline/error.h>

#include "base/check.h"

namespace paceline {

void check_equal_gpus(std::span<const GpuFacts> gpus) {
  for (const GpuFacts& other : gpus) {
    const GpuFacts& first = gpus.front();
    if (other.name == first.name && other.memory_bytes / 16 == first.memory_bytes / 16) continue;
    throw Unsupported(concat("GPU ", first.gpu, " is ", first.name, " with ",
                             first.memory_bytes >> 20, " MiB, but GPU ", other.gpu, " is ",
                             other.name, " with ", other.memory_bytes >> 20,
                             " MiB; allowed: GPUs of one kind, since all compute equal parts"));
  }
}

void check_peer_access(int32_t gpu, int32_t peer, bool can_access) {
  if (can_access) return;
  throw Unsupported(concat("GPU ", gpu, " cannot access the memory of GPU ", peer,
                           "; allowed: GPUs that can, for example over NVLink (nvidia-smi topo "
                           "-p2p n shows which)"));
}

}  // namespace paceline
