// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "device/device_memory.h"

namespace paceline {
namespace {

class HostMemory final : public DeviceMemory {
 public:
  std::byte* allocate(int64_t bytes, std::string_view purpose) override {
    return AlignedBuffer(bytes, purpose).release();
  }
  void release(std::byte* data, int64_t bytes) noexcept override {
    AlignedBuffer::adopt(data, bytes);  // its destructor releases the memory
  }
  std::byte* allocate_shared(int64_t bytes, std::string_view purpose) override {
    return allocate(bytes, purpose);
  }
  void release_shared(std::byte* data, int64_t bytes) noexcept override { release(data, bytes); }
  bool is_host_memory() const override { return true; }
  void upload(std::byte* to, const void* from, int64_t bytes) override {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void download(void* to, const std::byte* from, int64_t bytes) override {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  std::span<std::byte> staging() override { refuse(); }
  void upload_staged(std::byte*, int64_t) override { refuse(); }
  void finish() override {}
  std::span<std::byte> scratch() override { refuse(); }
  void pack(const PackedTensor&, int64_t, int64_t, const std::byte*) override { refuse(); }
  void convert(std::byte*, DType, const SourceMatrix&, DType) override { refuse(); }
  uintptr_t stream() const override { refuse(); }
  void fill_from_quantiles(std::byte*, int64_t, int64_t, DType, uint64_t, uint32_t,
                           const std::byte*) override {
    refuse();
  }

 private:
  [[noreturn]] static void refuse() {
    throw InternalError("host memory is written directly; nothing is staged for it");
  }
};

}  // namespace

DeviceMemory& host_memory() {
  static HostMemory memory;
  return memory;
}

void copy_to_host(CpuContext&, void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void copy_on_device(CpuContext&, void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

const char* device_name(Device device) { return device == Device::kCpu ? "cpu" : "cuda"; }

DeviceMemory& device_memory(Device device) {
  return device == Device::kCpu ? host_memory() : cuda_memory();
}

}  // namespace paceline
