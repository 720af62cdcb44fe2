// SPDX-License-Identifier: Apache-2.0

// What a build without the CUDA backend answers; cuda/common/cuda_memory.cu is the other one.

#include <paceline/device.h>
#include <paceline/error.h>

#include "device/device_memory.h"

namespace paceline {
namespace {

constexpr const char* kReason =
    "this build has no CUDA backend; use device 'cpu', or build with -DPACELINE_CUDA=ON";

}  // namespace

CudaStatus cuda_status() { return {.reason = kReason}; }

void set_cublaslt_path(const std::string&) {}

double measure_cuda_read_bandwidth() { throw Unsupported(kReason); }

DeviceMemory& cuda_memory() { throw Unsupported(kReason); }

}  // namespace paceline
