// SPDX-License-Identifier: Apache-2.0
#include "common/describe_device.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <paceline/error.h>

#include "base/check.h"
#include "common/device_scope.h"
#include "common/status.h"
#include "device/cuda_context.h"
#include "device/cuda_support.h"

namespace paceline::cuda {
namespace {

int32_t attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, current_device()), "cudaDeviceGetAttribute");
  return value;
}

int32_t capability() {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
         attribute(cudaDevAttrComputeCapabilityMinor);
}

// Of kernels for the device; throws Unsupported where there are none.
CudaKernels kernels_of_device() {
  const CudaKernels kernels = cuda_kernels_for("a card", capability(), built_architectures());
  if (!kernels.reason.empty()) throw Unsupported(kernels.reason);
  return kernels;
}

}  // namespace

bool asks_for_portable_kernels() {
  const char* const text = std::getenv("PACELINE_PORTABLE");
  const std::string_view value = text != nullptr ? text : "0";
  if (value != "0" && value != "1") {
    throw InvalidArgument(concat("PACELINE_PORTABLE is \"", value, "\"; allowed: 0 and 1"));
  }
  return value == "1";
}

std::string_view built_architectures() { return PACELINE_CUDA_ARCHITECTURES; }

bool runs_sm90a() { return kernels_of_device().has_sm90a; }

void describe_device(CudaContext& ctx) {
  ctx.num_sms = attribute(cudaDevAttrMultiProcessorCount);
  ctx.block_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ctx.sm_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const CudaKernels kernels = kernels_of_device();
  // What counts is what kernels were compiled for: only since sm_90 they wait for their
  // predecessors.
  ctx.has_early_starts = kernels.architecture >= 90;
  ctx.is_portable = asks_for_portable_kernels() || !kernels.has_sm90a;
  ctx.has_clusters = !ctx.is_portable;
}

}  // namespace paceline::cuda
