// SPDX-License-Identifier: Apache-2.0

// The GPU's memory, and the checks of the GPU before first use.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <paceline/device.h>
#include <paceline/error.h>

#include "base/boundary.h"
#include "base/philox.h"
#include "common/describe_device.h"
#include "common/device_calls.h"
#include "common/device_scope.h"
#include "common/launch.cuh"
#include "common/pack_rows.h"
#include "device/cuda_support.h"
#include "device/device_memory.h"
#include "device/rank_gpus.h"

namespace paceline {

namespace cuda {

DeviceCalls& device_calls() {
  static DeviceCalls calls;
  return calls;
}

void synchronize(cudaStream_t stream, const char* what) {
  ++device_calls().num_synchronizations;
  check(cudaStreamSynchronize(stream), what);
}

namespace {

// A thread fills 8 elements from 128 random bits. The CPU's version is in dummy_weights.cc and
// gives the same values.
template <class Value>
__global__ void fill_from_quantiles_kernel(Value* out, int64_t first, int64_t count, uint64_t seed,
                                           uint32_t salt, const Value* quantiles) {
  const int64_t num_blocks = (count + 7) / 8;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_blocks; i += stride) {
    const int64_t block = first / 8 + i;
    const NoiseKey key = {.seed = seed,
                          .stream = NoiseStream::kSynthetic,
                          .position = static_cast<uint32_t>(block >> 32),
                          .salt = salt};
    uint32_t words[4];
    philox_words(key, static_cast<uint32_t>(block), words);
#pragma unroll
    for (int32_t word = 0; word < 4; ++word) {
      const int64_t at = i * 8 + word * 2;
      if (at < count) out[at] = quantiles[words[word] & 0xffffu];
      if (at + 1 < count) out[at + 1] = quantiles[words[word] >> 16];
    }
  }
}

// The bits of base/float_types.h, NaN included, so that weights are equal however they arrive.
__device__ __forceinline__ uint16_t bf16_bits(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ uint32_t float_bits_of_half(uint16_t bits) {
  if ((bits & 0x7fffu) > 0x7c00u) {
    return static_cast<uint32_t>(bits & 0x8000u) << 16 | 0x7f800000u |
           static_cast<uint32_t>(bits & 0x3ffu) << 13;
  }
  return __float_as_uint(__half2float(__ushort_as_half(bits)));
}

// One conversion of a weight: elements as they are stored, to elements as the arena holds them.
struct KeepBits {
  template <class T>
  __device__ T operator()(T bits) const {
    return bits;
  }
};
struct FloatToBf16 {
  __device__ uint16_t operator()(uint32_t bits) const { return bf16_bits(bits); }
};
struct Bf16ToFloat {
  __device__ uint32_t operator()(uint16_t bits) const { return static_cast<uint32_t>(bits) << 16; }
};
struct HalfToFloat {
  __device__ uint32_t operator()(uint16_t bits) const { return float_bits_of_half(bits); }
};

template <class In, class Out, class Convert>
__global__ void convert_kernel(SourceMatrix from, Out* to, Convert convert) {
  const In* const data = reinterpret_cast<const In*>(from.data);
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < from.rows * from.cols;
       i += stride) {
    to[i] = convert(data[i / from.cols * from.row_stride + i % from.cols * from.col_stride]);
  }
}

__global__ void read_kernel(const uint4* data, int64_t count, uint32_t* sink) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  uint32_t sum = 0;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = data[i];
    const uint4 b = data[i + stride];
    const uint4 c = data[i + 2 * stride];
    const uint4 d = data[i + 3 * stride];
    sum += (a.x ^ b.y) + (c.z ^ d.w);
  }
  if (sum == 0x12345678u) *sink = sum;  // practically never true; it keeps the loads alive
}

// One pinned buffer in two halves: the host fills one while the other is being copied.
class Staging {
 public:
  ~Staging() { release(); }

  std::span<std::byte> next(cudaStream_t stream) {
    if (data_ == nullptr) {
      check(cudaMallocHost(reinterpret_cast<void**>(&data_), 2 * kHalfBytes), "cudaMallocHost");
      for (cudaEvent_t& event : copied_) {
        check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
        check(cudaEventRecord(event, stream), "cudaEventRecord");
      }
    }
    check(cudaEventSynchronize(copied_[half_]), "staging a weight");
    return {data_ + half_ * kHalfBytes, kHalfBytes};
  }

  void upload(std::byte* to, int64_t bytes, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, data_ + half_ * kHalfBytes, static_cast<size_t>(bytes),
                          cudaMemcpyHostToDevice, stream),
          "copying a weight");
    check(cudaEventRecord(copied_[half_], stream), "cudaEventRecord");
    half_ = 1 - half_;
  }

  // Requires that the stream has been synchronized.
  void release() noexcept {
    if (data_ == nullptr) return;
    for (cudaEvent_t event : copied_) cudaEventDestroy(event);
    cudaFreeHost(data_);
    data_ = nullptr;
  }

  static constexpr size_t kHalfBytes = size_t{32} << 20;

 private:
  std::byte* data_ = nullptr;
  std::array<cudaEvent_t, 2> copied_ = {};
  size_t half_ = 0;
};

// Of the device that the calling thread uses.
int64_t num_multiprocessors() {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_device()),
        "the number of multiprocessors");
  return count;
}

class CudaMemory final : public DeviceMemory {
 public:
  explicit CudaMemory(int32_t gpu) : gpu_(gpu) {
    const DeviceScope scope(gpu_);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }

  std::byte* allocate(int64_t bytes, std::string_view purpose) override {
    const DeviceScope scope(gpu_);
    PACELINE_CHECK(bytes >= 0, "bytes = ", bytes);
    ++device_calls().num_allocations;
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes));
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      size_t free_bytes = 0;
      size_t total_bytes = 0;
      check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
      const auto free_mib = static_cast<int64_t>(free_bytes >> 20);
      const int64_t wanted_mib = (bytes >> 20) + 1;
      throw OutOfMemory(concat(
          "out of GPU memory: ", wanted_mib, " MiB for ", purpose, ", but ", free_mib, " of ",
          total_bytes >> 20, " MiB are free: ", std::max<int64_t>(wanted_mib - free_mib, 1),
          " MiB are missing; lower kv_cache_bytes, max_num_seqs or "
          "max_num_batched_tokens, use a smaller model, or free memory on the GPU"));
    }
    check(status, "cudaMalloc");
    check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream_), "cudaMemset");
    synchronize(stream_, "cudaMemset");
    return static_cast<std::byte*>(data);
  }
  void release(std::byte* data, int64_t) noexcept override { cudaFree(data); }
  std::byte* allocate_shared(int64_t bytes, std::string_view purpose) override {
    const DeviceScope scope(gpu_);
    void* data = nullptr;
    check(cudaHostAlloc(&data, static_cast<size_t>(bytes),
                        cudaHostAllocMapped | cudaHostAllocPortable),
          std::string(purpose).c_str());
    std::memset(data, 0, static_cast<size_t>(bytes));
    return static_cast<std::byte*>(data);
  }
  void release_shared(std::byte* data, int64_t) noexcept override { cudaFreeHost(data); }
  bool is_host_memory() const override { return false; }

  void upload(std::byte* to, const void* from, int64_t bytes) override {
    const DeviceScope scope(gpu_);
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_),
          "upload");
    synchronize(stream_, "upload");
  }
  void download(void* to, const std::byte* from, int64_t bytes) override {
    const DeviceScope scope(gpu_);
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
          "download");
    synchronize(stream_, "download");
  }

  std::span<std::byte> staging() override {
    const DeviceScope scope(gpu_);
    return staging_of_thread().next(stream_);
  }
  void upload_staged(std::byte* to, int64_t bytes) override {
    const DeviceScope scope(gpu_);
    staging_of_thread().upload(to, bytes, stream_);
  }
  void finish() override {
    const DeviceScope scope(gpu_);
    synchronize(stream_, "loading weights");  // of all threads
    staging_of_thread().release();
    scratch_of_thread() = DeviceBuffer();
  }

  std::span<std::byte> scratch() override {
    DeviceBuffer& scratch = scratch_of_thread();
    if (scratch.data() == nullptr) {
      scratch = DeviceBuffer(*this, Staging::kHalfBytes, "packing weights");
    }
    return {scratch.data(), Staging::kHalfBytes};
  }
  void pack(const PackedTensor& to, int64_t first, int64_t count, const std::byte* from) override {
    const DeviceScope scope(gpu_);
    pack_rows(stream_, to, first, count, from);
  }

  void convert(std::byte* to, DType to_dtype, const SourceMatrix& from, DType from_dtype) override {
    const DeviceScope scope(gpu_);
    const bool is_row_major =
        from.col_stride == 1 && (from.rows == 1 || from.row_stride == from.cols);
    if (from_dtype == to_dtype && is_row_major) {
      check(cudaMemcpyAsync(to, from.data,
                            static_cast<size_t>(from.rows * from.cols * dtype_bytes(to_dtype)),
                            cudaMemcpyDeviceToDevice, stream_),
            "copying a weight");
    } else if (dtype_bytes(to_dtype) == 1) {
      PACELINE_CHECK(from_dtype == to_dtype, dtype_name(from_dtype));
      launch_convert<uint8_t, uint8_t>(from, to, KeepBits());
    } else if (to_dtype == DType::kBFloat16) {
      if (from_dtype == DType::kBFloat16) {
        launch_convert<uint16_t, uint16_t>(from, to, KeepBits());
      } else {
        PACELINE_CHECK(from_dtype == DType::kFloat32, dtype_name(from_dtype));
        launch_convert<uint32_t, uint16_t>(from, to, FloatToBf16());
      }
    } else {
      PACELINE_CHECK(to_dtype == DType::kFloat32, dtype_name(to_dtype));
      if (from_dtype == DType::kFloat32) {
        launch_convert<uint32_t, uint32_t>(from, to, KeepBits());
      } else if (from_dtype == DType::kBFloat16) {
        launch_convert<uint16_t, uint32_t>(from, to, Bf16ToFloat());
      } else {
        PACELINE_CHECK(from_dtype == DType::kFloat16, dtype_name(from_dtype));
        launch_convert<uint16_t, uint32_t>(from, to, HalfToFloat());
      }
    }
    synchronize(stream_, "copying a weight");
  }
  uintptr_t stream() const override { return reinterpret_cast<uintptr_t>(stream_); }

  void fill_from_quantiles(std::byte* to, int64_t first, int64_t count, DType dtype, uint64_t seed,
                           uint32_t salt, const std::byte* quantiles) override {
    const DeviceScope scope(gpu_);
    PACELINE_CHECK(first % 8 == 0, first);
    constexpr int32_t kThreads = 256;
    const auto blocks = static_cast<uint32_t>(
        std::clamp<int64_t>((count / 8 + kThreads - 1) / kThreads, 1, 16 * num_multiprocessors()));
    const auto launch = [&]<class Value>() {
      fill_from_quantiles_kernel<<<blocks, kThreads, 0, stream_>>>(
          reinterpret_cast<Value*>(to), first, count, seed, salt,
          reinterpret_cast<const Value*>(quantiles));
    };
    if (dtype_bytes(dtype) == 1) {
      launch.template operator()<uint8_t>();
    } else if (dtype == DType::kBFloat16) {
      launch.template operator()<uint16_t>();
    } else {
      launch.template operator()<float>();
    }
    check(cudaGetLastError(), "fill_from_quantiles");
    synchronize(stream_, "fill_from_quantiles");
  }

 private:
  template <class In, class Out, class Convert>
  void launch_convert(const SourceMatrix& from, std::byte* to, Convert convert) {
    constexpr int32_t kThreads = 256;
    const auto blocks = static_cast<uint32_t>(std::clamp<int64_t>(
        (from.rows * from.cols + kThreads - 1) / kThreads, 1, 16 * num_multiprocessors()));
    convert_kernel<In><<<blocks, kThreads, 0, stream_>>>(from, reinterpret_cast<Out*>(to), convert);
    check(cudaGetLastError(), "converting a weight");
  }

  // One buffer per thread, so that two threads can load models at the same time.
  Staging& staging_of_thread() const {
    thread_local std::array<Staging, kMaxCudaDevices> staging;
    return staging[static_cast<size_t>(gpu_)];
  }

  DeviceBuffer& scratch_of_thread() const {
    thread_local std::array<DeviceBuffer, kMaxCudaDevices> scratch;
    return scratch[static_cast<size_t>(gpu_)];
  }

  int32_t gpu_;
  cudaStream_t stream_ = nullptr;
};

// Throws Unsupported unless kernels run and there is a GPU of this number.
void check_gpu(int32_t gpu) {
  static const CudaStatus status = cuda_status();
  if (!status.is_usable) throw Unsupported(status.reason);
  if (gpu >= 0 && gpu < status.num_gpus) return;
  throw Unsupported(concat("there is no GPU ", gpu, "; allowed: 0 to ", status.num_gpus - 1,
                           ", the GPUs that the process sees (CUDA_VISIBLE_DEVICES chooses them)"));
}

}  // namespace
}  // namespace cuda

void copy_to_host(CudaContext& ctx, void* to, const void* from, int64_t bytes) {
  // Into pageable memory: the call itself waits for the copy.
  ++cuda::device_calls().num_synchronizations;
  cuda::check(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, ctx.stream),
      "copying to the host");
}

void copy_on_device(CudaContext& ctx, void* to, const void* from, int64_t bytes) {
  cuda::check(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, ctx.stream),
      "copying on the device");
}

CudaStatus cuda_status() {
  return at_boundary([&] {
    CudaStatus status = {.is_built = true};
    status.architectures = cuda::built_architectures();
    int count = 0;
    const cudaError_t found = cudaGetDeviceCount(&count);
    if (found != cudaSuccess || count == 0) {
      (void)cudaGetLastError();
      status.reason = concat(
          "no usable GPU: ", found != cudaSuccess ? cudaGetErrorString(found) : "none was found",
          "; check the driver with nvidia-smi, or use device 'cpu'");
      return status;
    }
    cudaDeviceProp properties = {};
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
      status.reason = concat("GPU 0 cannot be used: ", cudaGetErrorString(cudaGetLastError()));
      return status;
    }
    status.num_gpus = std::min(count, kMaxCudaDevices);
    status.name = properties.name;
    status.compute_capability = properties.major * 10 + properties.minor;
    status.num_sms = properties.multiProcessorCount;
    status.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    status.block_shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
    status.sm_shared_bytes = static_cast<int64_t>(properties.sharedMemPerMultiprocessor);
    const CudaKernels kernels =
        cuda_kernels_for(status.name, status.compute_capability, status.architectures);
    status.reason = kernels.reason;
    if (!status.reason.empty()) return status;
    try {
      const bool is_portable = cuda::asks_for_portable_kernels() || !kernels.has_sm90a;
      status.kernels = is_portable ? "portable" : "sm_90a";
    } catch (const InvalidArgument& error) {
      status.reason = error.what();
      return status;
    }
    status.has_been_run = has_cuda_capability_run(status.compute_capability);
    status.is_usable = true;
    return status;
  });
}

int64_t cuda_free_bytes(int32_t gpu) {
  return at_boundary([&]() -> int64_t {
    cuda::check_gpu(gpu);
    const cuda::DeviceScope scope(gpu);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    cuda::check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return static_cast<int64_t>(free_bytes);
  });
}

DeviceMemory& cuda_memory(int32_t gpu) {
  cuda::check_gpu(gpu);
  static std::array<std::optional<cuda::CudaMemory>, kMaxCudaDevices> memories;
  static std::array<std::once_flag, kMaxCudaDevices> made;
  auto& memory = memories[static_cast<size_t>(gpu)];
  std::call_once(made[static_cast<size_t>(gpu)], [&] { memory.emplace(gpu); });
  return *memory;
}

void connect_gpus(std::span<const int32_t> gpus) {
  std::vector<GpuFacts> facts;
  for (const int32_t gpu : gpus) {
    cuda::check_gpu(gpu);
    cudaDeviceProp of_gpu = {};
    cuda::check(cudaGetDeviceProperties(&of_gpu, gpu), "cudaGetDeviceProperties");
    facts.push_back({.gpu = gpu,
                     .name = of_gpu.name,
                     .memory_bytes = static_cast<int64_t>(of_gpu.totalGlobalMem)});
  }
  check_equal_gpus(facts);
  for (const int32_t gpu : gpus) {
    for (const int32_t peer : gpus) {
      if (peer == gpu) continue;
      int can_access = 0;
      cuda::check(cudaDeviceCanAccessPeer(&can_access, gpu, peer), "cudaDeviceCanAccessPeer");
      check_peer_access(gpu, peer, can_access != 0);
      const cuda::DeviceScope scope(gpu);
      const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
      } else {
        cuda::check(status, "cudaDeviceEnablePeerAccess");
      }
    }
  }
}

double measure_cuda_read_bandwidth() {
  return at_boundary([&] {
    constexpr int64_t kBytes = int64_t{4} << 30;
    // The driver clears memory after it has been given back, and takes an eighth of the bandwidth
    // for it: that of 62 GB took less than this (H200).
    constexpr std::chrono::milliseconds kClearing{400};
    std::this_thread::sleep_for(kClearing);
    const DeviceBuffer data(cuda_memory(), kBytes, "the bandwidth test");
    const DeviceBuffer sink(cuda_memory(), 256, "the bandwidth test");
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
    cuda::check(cudaEventCreate(&end), "cudaEventCreate");
    const auto blocks = static_cast<uint32_t>(8 * cuda::num_multiprocessors());
    std::vector<float> times;
    for (int round = 0; round < 9; ++round) {
      cuda::check(cudaEventRecord(begin), "cudaEventRecord");
      cuda::read_kernel<<<blocks, 256>>>(reinterpret_cast<const uint4*>(data.data()), kBytes / 16,
                                         reinterpret_cast<uint32_t*>(sink.data()));
      cuda::check(cudaEventRecord(end), "cudaEventRecord");
      cuda::check(cudaEventSynchronize(end), "the bandwidth test");
      float ms = 0;
      cuda::check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      times.push_back(ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::nth_element(times.begin(), times.begin() + 4, times.end());
    return static_cast<double>(kBytes) / times[4] * 1e3;
  });
}

}  // namespace paceline
