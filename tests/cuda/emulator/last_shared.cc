// SPDX-License-Identifier: Apache-2.0
//
// Linked behind all kernels: where static shared memory ends.

#include "shared_range.h"

namespace paceline::emulator {
alignas(16) constinit thread_local std::byte last_shared[16] = {};
}  // namespace paceline::emulator
