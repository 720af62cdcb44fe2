// SPDX-License-Identifier: Apache-2.0
#pragma once

// Devices that hold and run models.

#include <cstdint>
#include <string>

#include <paceline/export.h>

namespace paceline {

// Where weights are held and ops run; kCuda is GPU 0, unless gpus chooses others.
enum class Device : uint8_t { kCpu, kCuda };

// "cpu", "cuda"
[[nodiscard]] PACELINE_API const char* device_name(Device device);

// The state of the CUDA backend. The query needs no driver, and takes no memory of the GPU: the
// process gets a CUDA context only with its first model, executor or measurement there.
struct CudaStatus {
  bool is_built = false;           // this binary contains the CUDA backend
  bool is_usable = false;          // it does, and GPU 0 can run it
  std::string reason;              // why it is not usable, with the cure; empty when usable
  int32_t num_gpus = 0;            // that the process sees
  std::string name;                // of GPU 0, for example "NVIDIA H200"
  int32_t compute_capability = 0;  // of GPU 0; 90 is sm_90
  int32_t num_sms = 0;             // streaming multiprocessors of GPU 0
  int64_t total_bytes = 0;         // memory of GPU 0
  // Shared memory of GPU 0: what a block may have, and what the blocks of a multiprocessor share.
  int64_t block_shared_bytes = 0;
  int64_t sm_shared_bytes = 0;
  std::string architectures;  // that the build has kernels for, for example "80,90a"
  std::string kernels;        // that GPU 0 runs: "sm_90a" or "portable"; empty if not usable
  // Whether the project's tests have run on GPUs of this capability. On others kernels were
  // compiled, and run in an emulator.
  bool has_been_run = false;
};
// Asks for the state of the CUDA backend.
[[nodiscard]] PACELINE_API CudaStatus cuda_status();

// The bytes of a GPU's memory that are free. Gives the process a CUDA context there, which itself
// takes several hundred MB. Throws Unsupported without a usable GPU of this number.
[[nodiscard]] PACELINE_API int64_t cuda_free_bytes(int32_t gpu = 0);

// Sets a folder or file where libcublasLt.so.13 is searched first, before a copy that the process
// has loaded, the loader's path and the CUDA toolkit. Call it before the first CUDA executor is
// constructed.
PACELINE_API void set_cublaslt_path(const std::string& path);

// Measures the read bandwidth of GPU 0's memory, in bytes per second; it bounds the speed of
// decoding. Throws Unsupported without a usable GPU.
[[nodiscard]] PACELINE_API double measure_cuda_read_bandwidth();

}  // namespace paceline
