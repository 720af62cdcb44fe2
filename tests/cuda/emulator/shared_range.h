// SPDX-License-Identifier: Apache-2.0
#pragma once

// The range of shared memory. The linker places thread_local variables in the order of its inputs,
// and first_shared.cc and last_shared.cc are the first and the last of them.

#include <cstddef>
#include <cstdint>

namespace paceline::emulator {

extern constinit thread_local std::byte first_shared[];
extern constinit thread_local std::byte last_shared[];

}  // namespace paceline::emulator

// Dynamic shared memory. Kernels declare it under names of their own; include/cuda_runtime.h
// declares each of them as a name of this array.
extern constinit thread_local std::byte emulated_dynamic_shared[] asm("emulated_dynamic_shared");
