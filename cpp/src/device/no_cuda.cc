// SPDX-License-Identifier: Apache-2.0

// The CUDA queries of a build without the CUDA backend; cuda/common/cuda_memory.cu has those of a
// build with it.

#include <paceline/device.h>
#include <paceline/error.h>

#include "base/boundary.h"
#include "device/device_memory.h"

namespace paceline {
namespace {

constexpr const char* kReason =
    "this build has no CUDA backend; use device 'cpu', or build with -DPACELINE_CUDA=ON";

}  // namespace

CudaStatus cuda_status() {
  return at_boundary([] { return CudaStatus{.reason = kReason}; });
}

int64_t cuda_free_bytes(int32_t) {
  return at_boundary([]() -> int64_t { throw Unsupported(kReason); });
}

void set_cublaslt_path(const std::string&) {}

double measure_cuda_read_bandwidth() {
  return at_boundary([]() -> double { throw Unsupported(kReason); });
}

DeviceMemory& cuda_memory(int32_t) { throw Unsupported(kReason); }

void connect_gpus(std::span<const int32_t>) { throw Unsupported(kReason); }

}  // namespace paceline
