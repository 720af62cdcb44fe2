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
[[nodiscard]] PACELINE_API BuildInfo build_info();

// Measures the read bandwidth of this machine's memory with num_threads threads (0 is all cores),
// in bytes per second; it bounds the speed of decoding on the CPU. Takes about half a second.
// Throws DeviceError when the threads cannot be started and OutOfMemory without 512 MiB.
[[nodiscard]] PACELINE_API double measure_read_bandwidth(int32_t num_threads);

}  // namespace paceline
