// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for the CUDA toolkit's header of this name, as far as our kernels and their launches
// use it (emulator.h). Arithmetic is that of the host, which rounds as the GPU does; functions that
// the GPU approximates are as exact as the host's library.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <string>
#include <tuple>
#include <utility>

#include "emulator.h"
#include "shared_range.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local

// The names under which kernels declare dynamic shared memory.
namespace paceline::cuda {
namespace {
extern thread_local float values[] asm("emulated_dynamic_shared");
extern thread_local int32_t counts[] asm("emulated_dynamic_shared");
extern thread_local std::byte storage[] asm("emulated_dynamic_shared");
extern thread_local std::byte shared[] asm("emulated_dynamic_shared");
}  // namespace
extern thread_local std::byte packed_storage[] asm("emulated_dynamic_shared");
namespace join {
namespace {
extern thread_local float x[] asm("emulated_dynamic_shared");
}  // namespace
}  // namespace join
namespace compressed {
extern thread_local std::byte shared[] asm("emulated_dynamic_shared");
}
namespace latent {
namespace {
extern thread_local std::byte storage[] asm("emulated_dynamic_shared");
}  // namespace
}  // namespace latent
namespace paged {
extern thread_local std::byte shared[] asm("emulated_dynamic_shared");
}
namespace portable {
extern thread_local std::byte shared[] asm("emulated_dynamic_shared");
}
}  // namespace paceline::cuda

struct uint2 {
  uint32_t x, y;
} __align__(8);
struct uint3 {
  uint32_t x, y, z;
};
struct uint4 {
  uint32_t x, y, z, w;
} __align__(16);
struct int2 {
  int32_t x, y;
} __align__(8);
struct int4 {
  int32_t x, y, z, w;
} __align__(16);
struct ulonglong2 {
  unsigned long long x, y;
} __align__(16);
struct float2 {
  float x, y;
} __align__(8);
struct float4 {
  float x, y, z, w;
} __align__(16);
struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
  constexpr dim3(uint32_t vx = 1, uint32_t vy = 1, uint32_t vz = 1) : x(vx), y(vy), z(vz) {}
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

// --- the host's part -----------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;

enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributePreferredSharedMemoryCarveout
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      uint32_t x, y, z;
    } clusterDim;
    uint32_t sharedMemCarveout;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  uint32_t numAttrs = 0;
};

namespace paceline::emulator {

inline std::string& last_error() {
  static std::string text;
  return text;
}
inline cudaError_t status_of(std::string error) {
  if (error.empty()) return cudaSuccess;
  last_error() = std::move(error);
  return cudaErrorLaunchFailure;
}

}  // namespace paceline::emulator

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "emulation"; }
inline const char* cudaGetErrorString(cudaError_t) {
  return paceline::emulator::last_error().c_str();
}

// Returns when all blocks have run.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  namespace emulator = paceline::emulator;
  const std::tuple<Params...> values(std::forward<Args>(args)...);
  emulator::Launch launch = {.kernel = reinterpret_cast<const void*>(kernel),
                             .run_thread = [&values, kernel] { std::apply(kernel, values); },
                             .grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z},
                             .block = {config->blockDim.x, config->blockDim.y, config->blockDim.z},
                             .cluster = {},
                             .dynamic_shared_bytes = config->dynamicSmemBytes};
  for (uint32_t i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
    const auto& cluster = attribute.val.clusterDim;
    launch.cluster = {cluster.x, cluster.y, cluster.z};
  }
  return emulator::status_of(emulator::run(launch));
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int num_bytes) {
  return static_cast<size_t>(num_bytes) <= paceline::emulator::max_shared_bytes()
             ? cudaSuccess
             : cudaErrorInvalidValue;
}
// There is one device.
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  attributes->sharedSizeBytes = 8 << 10;
  return cudaSuccess;
}
// Few, so that clusters take several rows each.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* num_clusters, Kernel* kernel,
                                           const cudaLaunchConfig_t* config) {
  const dim3& grid = config->gridDim;
  paceline::emulator::set_cluster(reinterpret_cast<const void*>(kernel), {grid.x, grid.y, grid.z});
  *num_clusters = 3;
  return cudaSuccess;
}

// Kernels are not timed.
inline cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
enum { cudaEventRecordExternal = 1 };
inline cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, uint32_t) {
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaSuccess; }

#include "device_functions.h"
