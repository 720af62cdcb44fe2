// SPDX-License-Identifier: Apache-2.0
#pragma once

// The memory of a device: allocations and copies at start-up. Iterations do not use it, because
// they never allocate.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include <paceline/device.h>
#include <paceline/dtype.h>

#include "device/packed_tiles.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// A matrix with strides; a vector is one row. The strides are in elements. `data` may have
// any alignment on the host, and that of its elements on a GPU.
struct SourceMatrix {
  const std::byte* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
};

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // Zeroed memory, aligned to 256 bytes. Throws OutOfMemory naming the purpose and the size in MiB.
  [[nodiscard]] virtual std::byte* allocate(int64_t bytes, std::string_view purpose) = 0;
  virtual void release(std::byte* data, int64_t bytes) noexcept = 0;

  // Zeroed host memory that host and device both access while iterations run; pinned for a GPU.
  // Throws OutOfMemory.
  [[nodiscard]] virtual std::byte* allocate_shared(int64_t bytes, std::string_view purpose) = 0;
  virtual void release_shared(std::byte* data, int64_t bytes) noexcept = 0;

  // Whether the host may write to allocated memory.
  [[nodiscard]] virtual bool is_host_memory() const = 0;

  // Copy from and to the host. Both return when the copy is complete.
  virtual void upload(std::byte* to, const void* from, int64_t bytes) = 0;
  virtual void download(void* to, const std::byte* from, int64_t bytes) = 0;

  // Uploads weights through a pinned buffer. The caller takes `staging()`, fills as much of it as
  // it likes and calls `upload_staged`. The copy runs while the caller fills the next piece;
  // `finish` waits for the last copy. Only for memory that is not the host's.
  [[nodiscard]] virtual std::span<std::byte> staging() = 0;
  virtual void upload_staged(std::byte* to, int64_t bytes) = 0;
  virtual void finish() = 0;

  // Memory of this device, of the calling thread and as large as staging(), that rows pass through
  // on their way to pack(); until finish(). Throws OutOfMemory.
  [[nodiscard]] virtual std::span<std::byte> scratch() = 0;
  // Writes rows [first, first + count) of a tensor, counted over all of its matrices, which lie
  // row-major at `from` in memory of this device; `from` is aligned to 16 bytes. Other rows of the
  // matrices stay as they are. Runs behind the uploads so far; `finish` waits for it. Only for
  // memory that is not the host's.
  virtual void pack(const PackedTensor& to, int64_t first, int64_t count,
                    const std::byte* from) = 0;

  // Converts a matrix in memory of this device to row-major elements of another dtype, and waits
  // for it. The pairs of dtypes, and the bits, are those of the host's copy_weight. Only for memory
  // that is not the host's.
  virtual void convert(std::byte* to, DType to_dtype, const SourceMatrix& from,
                       DType from_dtype) = 0;
  // The stream of these copies, as DLPack passes it to the producer of a tensor: what the producer
  // has enqueued is waited for. Only for memory that is not the host's.
  [[nodiscard]] virtual uintptr_t stream() const = 0;

  // Fills `to` with elements [first, first + count) of those that Philox draws from 65,536
  // quantiles in memory of this device, the same on every device, and waits for it; for
  // ModelBuilder::fill_dummy. `first` is a multiple of 8.
  virtual void fill_from_quantiles(std::byte* to, int64_t first, int64_t count, DType dtype,
                                   uint64_t seed, uint32_t salt, const std::byte* quantiles) = 0;
};

[[nodiscard]] DeviceMemory& host_memory();
// The memory of a GPU that the process sees. Throws Unsupported with the cure when the CUDA backend
// is not built, without a driver or a GPU of a supported architecture, and without a GPU of this
// number.
[[nodiscard]] DeviceMemory& cuda_memory(int32_t gpu = 0);
// Lets each of the GPUs write to the memory of the others. Throws Unsupported where they are not of
// one kind, or cannot.
void connect_gpus(std::span<const int32_t> gpus);
[[nodiscard]] DeviceMemory& device_memory(Device device);

// Copies device memory to the host after the ops called so far have run, and waits for the copy.
void copy_to_host(CpuContext& ctx, void* to, const void* from, int64_t bytes);
void copy_to_host(CudaContext& ctx, void* to, const void* from, int64_t bytes);

// Copies memory of the device to memory of the same device after the ops called so far have run.
// The later ops of the context run after the copy.
void copy_on_device(CpuContext& ctx, void* to, const void* from, int64_t bytes);
void copy_on_device(CudaContext& ctx, void* to, const void* from, int64_t bytes);

// Owns memory of a device; move-only.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceMemory& memory, int64_t bytes, std::string_view purpose)
      : memory_(&memory),
        data_(bytes > 0 ? memory.allocate(bytes, purpose) : nullptr),
        bytes_(bytes) {}
  ~DeviceBuffer() { reset(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : memory_(other.memory_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    if (this != &other) {
      reset();
      memory_ = other.memory_;
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] int64_t bytes() const { return bytes_; }
  // Only for a buffer that was allocated.
  [[nodiscard]] DeviceMemory& memory() const { return *memory_; }

 private:
  void reset() noexcept {
    if (data_ != nullptr) memory_->release(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
  }

  DeviceMemory* memory_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace paceline
