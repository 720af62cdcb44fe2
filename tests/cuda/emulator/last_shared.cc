// SPDX-License-Identifier: Apache-2.0
//
// Linked after all kernels: the end of static shared memory.

#include "shared_range.h"

namespace paceline::emulator {
alignas(16) constinit thread_local std::byte last_shared[16] = {};
}  // namespace paceline::emulator
