// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"

namespace paceline::cuda {

// The GPU that the calling thread uses.
[[nodiscard]] inline int32_t current_device() {
  int gpu = 0;
  check(cudaGetDevice(&gpu), "cudaGetDevice");
  return gpu;
}

// Makes a GPU the one that the calling thread uses, and restores the one before. Kernels can be
// launched, and memory allocated, on that one only.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t gpu) : before_(current_device()), gpu_(gpu) {
    if (gpu_ != before_) check(cudaSetDevice(gpu_), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (gpu_ != before_) (void)cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int32_t before_;
  int32_t gpu_;
};

}  // namespace paceline::cuda
