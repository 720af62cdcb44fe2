// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two calls of a kernel that may start while its predecessor still runs; launch.cuh has the
// rules.

namespace paceline::cuda {

__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace paceline::cuda
