// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <paceline/export.h>

namespace paceline {

// "0.1.0"
[[nodiscard]] PACELINE_API const char* version();

// What this binary was built with and runs on.
struct BuildInfo {
  std::string compiler;
  std::string cpu_features;  // of this machine, as far as the kernels use them
  bool has_cuda = false;
  int32_t num_cores = 0;     // usable by this process
};
[[nodiscard]] PACELINE_API BuildInfo build_info();

// Bytes a second that this machine reads from memory with num_threads threads (0 = all cores): the
// ceiling that decoding out of cache is held against. Takes about half a second.
[[nodiscard]] PACELINE_API double measure_read_bandwidth(int32_t num_threads);

}  // namespace paceline
