// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which GPUs a build of the CUDA backend runs on, and with which kernels. Pure functions of what
// the device says and of what was compiled, so that tests need no GPU.

#include <cstdint>
#include <string>
#include <string_view>

namespace paceline {

// The least compute capability that kernels are written for.
inline constexpr int32_t kLeastCudaCapability = 80;

// GPUs of one machine, at most.
inline constexpr int32_t kMaxCudaDevices = 16;

// What a device runs of a build's kernels.
struct CudaKernels {
  // Why it runs none, with the cure; empty if it does. The other members mean nothing then.
  std::string reason;
  // Compiled for this architecture; below the device's capability where the driver compiles what
  // was compiled for an older one.
  int32_t architecture = 0;
  bool has_sm90a = false;  // whether the kernels of sm_90a are among them
};

// `name` and `capability` (90: sm_90) are of the device; `architectures` those of the build, as
// PACELINE_CUDA_ARCHITECTURES gives them: "80;90a", or with commas. The greatest of them without a
// letter is compiled in a form for later devices, too.
[[nodiscard]] CudaKernels cuda_kernels_for(const std::string& name, int32_t capability,
                                           std::string_view architectures);

// Whether the project's tests have run on devices of this capability. On others kernels were
// compiled, and run in the emulator.
[[nodiscard]] bool has_cuda_capability_run(int32_t capability);

}  // namespace paceline
