// SPDX-License-Identifier: Apache-2.0
//
// Linked before all kernels: the beginning of static shared memory, and dynamic shared memory. The
// latter has room at its end to detect writes beyond what a launch asked for.

#include "emulator.h"
#include "shared_range.h"

alignas(1024) constinit thread_local std::byte
    emulated_dynamic_shared[paceline::emulator::kMaxDynamicSharedBytes + 1024] = {};

namespace paceline::emulator {
alignas(16) constinit thread_local std::byte first_shared[16] = {};
}  // namespace paceline::emulator
