// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for cuda/common/early_start.cuh.

#include <cuda_runtime.h>

namespace paceline::cuda {

inline void wait_for_predecessor() { emulator::wait_for_predecessor(); }
inline void let_successor_start() {}

}  // namespace paceline::cuda
