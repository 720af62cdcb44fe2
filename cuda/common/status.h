// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <paceline/error.h>

#include "base/check.h"

namespace paceline::cuda {

// Throws DeviceError; `what` names the call or the kernel.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // clears it: the next call must not report a non-sticky error again
  throw DeviceError(concat(what, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status)));
}

}  // namespace paceline::cuda
