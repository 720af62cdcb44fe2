// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <paceline/export.h>

namespace paceline {

// "0.1.0"
[[nodiscard]] PACELINE_API const char* version();

// How this binary was built, and the machine that it runs on.
struct BuildInfo {
  std::string compiler;
  std::string cpu_features;  // the vector instructions of this machine that the CPU ops use
  bool has_cuda = false;     // the binary contains the CUDA backend
  int32_t num_cores = 0;     // cores that this process may use
};
// Asks how this binary was built.
[[nodiscard]] PACELINE_API BuildInfo build_info();

// Measures the bandwidth at which num_threads threads (0 is all cores) read num_bytes again and
// again, in bytes per second; it bounds the speed of decoding on the CPU. Few bytes stay in the
// caches. 0, and anything above 512 MiB, is 512 MiB, which is read from memory. Takes up to half a
// second. Throws DeviceError when the threads cannot be started and OutOfMemory without num_bytes.
[[nodiscard]] PACELINE_API double measure_read_bandwidth(int32_t num_threads,
                                                         int64_t num_bytes = 0);

// Measures the arithmetic of this machine's vector units with num_threads threads (0 is all cores),
// in operations per second, multiply-adds counting as two: of float32, or if is_bfloat16 of
// whatever multiplies bfloat16 weights fastest. Takes about a tenth of a second. Throws DeviceError
// when the threads cannot be started.
[[nodiscard]] PACELINE_API double measure_arithmetic(int32_t num_threads, bool is_bfloat16);

}  // namespace paceline
