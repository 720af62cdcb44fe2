// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where a model lies and runs.

#include <cstdint>
#include <string>

#include <paceline/export.h>

namespace paceline {

enum class Device : uint8_t { kCpu, kCuda };

// "cpu", "cuda"
[[nodiscard]] PACELINE_API const char* device_name(Device device);

// What the CUDA backend finds. Asking never throws and needs no driver.
struct CudaStatus {
  bool is_built = false;           // this binary has the CUDA backend
  bool is_usable = false;          // and there is a GPU that it can run on
  std::string reason;              // why not, with the cure; empty when usable
  std::string name;                // of GPU 0, e.g. "NVIDIA H200"
  int32_t compute_capability = 0;  // 90 = sm_90
  int32_t num_sms = 0;
  int64_t total_bytes = 0;  // memory of the GPU
  int64_t free_bytes = 0;
};
[[nodiscard]] PACELINE_API CudaStatus cuda_status();

// Folder or file in which libcublasLt.so.13 is looked for before the usual places (a copy that the
// process has loaded, the loader's path, the CUDA toolkit). Set before the first CUDA executor.
PACELINE_API void set_cublaslt_path(const std::string& path);

// Bytes a second that GPU 0 reads from its memory: the ceiling of a decode step. Takes a moment.
// Throws Unsupported without a usable GPU.
[[nodiscard]] PACELINE_API double measure_cuda_read_bandwidth();

}  // namespace paceline
