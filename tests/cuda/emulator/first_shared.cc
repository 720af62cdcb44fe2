// SPDX-License-Identifier: Apache-2.0
//
// Linked before all kernels: where static shared memory begins, and dynamic shared memory. Behind
// the latter is room for the check that a kernel keeps to what its launch asked for.

#include "emulator.h"
#include "shared_range.h"

alignas(1024) constinit thread_local std::byte
    emulated_dynamic_shared[paceline::emulator::kMaxDynamicSharedBytes + 1024] = {};

namespace paceline::emulator {
alignas(16) constinit thread_local std::byte first_shared[16] = {};
}  // namespace paceline::emulator
