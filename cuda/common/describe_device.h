// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace paceline {

struct CudaContext;

namespace cuda {

// Fills the members of `ctx` that say what GPU 0 is. Portable kernels are chosen on a device that
// is not sm_90, and by PACELINE_PORTABLE=1 on any. Throws InvalidArgument for another value than 0
// and 1.
void describe_device(CudaContext& ctx);

// Whether GPU 0 runs the kernels of sm_90a.
[[nodiscard]] bool runs_sm90a();

}  // namespace cuda
}  // namespace paceline
