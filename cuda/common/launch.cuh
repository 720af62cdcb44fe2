// SPDX-License-Identifier: Apache-2.0
#pragma once

// How every kernel of Paceline is launched, and what every kernel does first and last.
//
// All launches are programmatic dependent launches: a kernel may start while the one before it
// still runs. Hence two rules for every kernel, without exception:
//   1. Every thread calls `wait_for_predecessor()` before it touches memory that an earlier kernel
//      writes or reads (weights, rotary tables and other constants may be read before).
//   2. `let_successor_start()` is called as early as possible; it orders nothing, the successor
//      still waits for this kernel to complete before it passes its own wait.
// A kernel that returns early calls wait_for_predecessor() first, too.

#include <cuda_runtime.h>

#include <utility>

#include "common/kernel_trace.h"
#include "common/status.h"
#include "device/cuda_context.h"

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

// Enqueues kernel(args...) on the context's stream. An empty grid launches nothing.
template <class... Params, class... Args>
void launch(CudaContext& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = ctx.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), name);
  if (ctx.trace != nullptr) ctx.trace->mark(name);
}

// Raises the limit of dynamic shared memory of a kernel; above 48 KB it has to be asked for.
template <class... Params>
void allow_shared_bytes(void (*kernel)(Params...), size_t bytes, const char* name) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        name);
}

}  // namespace paceline::cuda
