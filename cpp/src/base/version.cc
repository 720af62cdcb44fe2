// SPDX-License-Identifier: Apache-2.0
#include <paceline/device.h>
#include <paceline/version.h>

#include <sched.h>

#include <algorithm>
#include <thread>

#include "base/boundary.h"
#include "base/check.h"

namespace paceline {
namespace {

// The number of cores that this process may use, which containers and taskset limit.
int32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

const char* cpu_features() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return "avx512f";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2 fma";
  return "baseline";
}

}  // namespace

const char* version() { return PACELINE_VERSION; }

BuildInfo build_info() {
  return at_boundary([&] {
    return BuildInfo{.compiler = concat("g++ ", __VERSION__),
                     .cpu_features = cpu_features(),
                     .has_cuda = cuda_status().is_built,
                     .num_cores = usable_cores()};
  });
}

}  // namespace paceline
