// SPDX-License-Identifier: Apache-2.0
#pragma once

// The launch of every kernel of Paceline, and the two calls that every kernel makes.
//
// Where the device has them (CudaContext::has_early_starts), all launches are programmatic
// dependent launches: a kernel may start while its predecessor still runs. Hence two rules for
// every kernel, without exception:
//   1. Every thread calls `wait_for_predecessor()` before it touches memory that an earlier kernel
//      writes or reads, but for constants (weights, tables) and what expert_kernel.cuh and
//      delays_successor (GemmParams) explain.
//   2. A kernel calls `let_successor_start()` as early as possible. The call orders no memory: the
//      successor's own wait still waits for this kernel to complete.
// A kernel that returns early calls wait_for_predecessor() first, too.

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "common/device_scope.h"
#include "common/early_start.cuh"
#include "common/kernel_trace.h"
#include "common/status.h"
#include "device/cuda_context.h"
#include "device/cuda_support.h"

namespace paceline::cuda {

// Enqueues kernel(args...) on the context's stream, with neighbouring blocks in clusters. An empty
// grid launches nothing.
template <class... Params, class... Args>
void launch_clusters(CudaContext& ctx, const char* name, void (*kernel)(Params...), dim3 grid,
                     dim3 block, dim3 cluster, size_t shared_bytes, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  cudaLaunchAttribute attributes[3] = {};
  uint32_t num_attributes = 0;
  if (ctx.has_early_starts) {
    cudaLaunchAttribute& early = attributes[num_attributes++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster.x * cluster.y * cluster.z > 1) {
    cudaLaunchAttribute& clusters = attributes[num_attributes++];
    clusters.id = cudaLaunchAttributeClusterDimension;
    clusters.val.clusterDim.x = cluster.x;
    clusters.val.clusterDim.y = cluster.y;
    clusters.val.clusterDim.z = cluster.z;
  }
  if (ctx.starts_idle) {
    cudaLaunchAttribute& carveout = attributes[num_attributes++];
    carveout.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    carveout.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    ctx.starts_idle = false;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = ctx.stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), name);
  if (ctx.trace != nullptr) ctx.trace->mark(name);
}

// The same without clusters.
template <class... Params, class... Args>
void launch(CudaContext& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, Args&&... args) {
  launch_clusters(ctx, name, kernel, grid, block, dim3(1), shared_bytes,
                  std::forward<Args>(args)...);
}

// Raises the limit of dynamic shared memory of a kernel; CUDA requires this above 48 KB.
template <class... Params>
void allow_shared_bytes(void (*kernel)(Params...), size_t bytes, const char* name) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        name);
}

// Runs a function once for each GPU, when the first thread that uses this GPU calls. A kernel has
// limits on every GPU. Static.
class OncePerDevice {
 public:
  // Returns the GPU.
  template <class Function>
  int32_t operator()(const Function& function) {
    const int32_t device = current_device();
    std::atomic<bool>& has_run = has_run_.at(static_cast<size_t>(device));
    if (!has_run.load(std::memory_order_acquire)) {
      const std::scoped_lock lock(mutex_);
      if (!has_run.load(std::memory_order_relaxed)) function();
      has_run.store(true, std::memory_order_release);
    }
    return device;
  }

 private:
  std::mutex mutex_;
  std::array<std::atomic<bool>, kMaxCudaDevices> has_run_ = {};
};

}  // namespace paceline::cuda
