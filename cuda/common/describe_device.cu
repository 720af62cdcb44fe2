// SPDX-License-Identifier: Apache-2.0
#include "common/describe_device.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <paceline/error.h>

#include "base/check.h"
#include "common/status.h"
#include "device/cuda_context.h"

namespace paceline::cuda {
namespace {

int32_t attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, 0), "cudaDeviceGetAttribute");
  return value;
}

int32_t capability() {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
         attribute(cudaDevAttrComputeCapabilityMinor);
}

bool asks_for_portable_kernels() {
  const char* const text = std::getenv("PACELINE_PORTABLE");
  const std::string_view value = text != nullptr ? text : "0";
  if (value != "0" && value != "1") {
    throw InvalidArgument(concat("PACELINE_PORTABLE is \"", value, "\"; allowed: 0 and 1"));
  }
  return value == "1";
}

}  // namespace

bool runs_sm90a() { return capability() == 90; }

void describe_device(CudaContext& ctx) {
  ctx.num_sms = attribute(cudaDevAttrMultiProcessorCount);
  ctx.block_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ctx.sm_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ctx.has_early_starts = capability() >= 90;
  ctx.is_portable = asks_for_portable_kernels() || !runs_sm90a();
}

}  // namespace paceline::cuda
