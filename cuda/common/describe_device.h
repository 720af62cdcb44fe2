// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace paceline {

struct CudaContext;

namespace cuda {

// Fills the members of `ctx` that say what the calling thread's GPU is. Portable kernels are chosen
// on a device that does not run those of sm_90a, and where asks_for_portable_kernels. Throws
// Unsupported where the build has no kernels for the device.
void describe_device(CudaContext& ctx);

// Whether the calling thread's GPU runs the kernels of sm_90a, and this build has them.
[[nodiscard]] bool runs_sm90a();

// Whether PACELINE_PORTABLE is 1. Throws InvalidArgument for another value than 0 and 1.
[[nodiscard]] bool asks_for_portable_kernels();

// The architectures that this build has kernels for: "80,90a".
[[nodiscard]] std::string_view built_architectures();

}  // namespace cuda
}  // namespace paceline
