// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts our calls that allocate on the device or make the host wait for it, so that a test can
// show that an iteration makes neither.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace paceline::cuda {

struct DeviceCalls {
  std::atomic<int64_t> num_allocations = 0;
  std::atomic<int64_t> num_synchronizations = 0;
};
[[nodiscard]] DeviceCalls& device_calls();

// Waits for a stream; throws DeviceError naming `what`.
void synchronize(cudaStream_t stream, const char* what);

}  // namespace paceline::cuda
