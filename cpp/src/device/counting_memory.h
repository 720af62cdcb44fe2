// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/check.h"
#include "device/device_memory.h"

namespace paceline {

// Memory of a device that is only counted: its addresses must not be read or written. It tells how
// much a runner would allocate. Shared memory is real, since the host writes to it.
class CountingMemory final : public DeviceMemory {
 public:
  [[nodiscard]] int64_t bytes() const { return bytes_; }

  std::byte* allocate(int64_t bytes, std::string_view) override {
    constexpr int64_t kAlignment = 256;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<std::byte*>(bytes_);
  }
  void release(std::byte*, int64_t) noexcept override {}
  std::byte* allocate_shared(int64_t bytes, std::string_view purpose) override {
    return host_memory().allocate_shared(bytes, purpose);
  }
  void release_shared(std::byte* data, int64_t bytes) noexcept override {
    host_memory().release_shared(data, bytes);
  }
  bool is_host_memory() const override { return false; }
  void upload(std::byte*, const void*, int64_t) override {}
  void download(void*, const std::byte*, int64_t) override { refuse(); }
  std::span<std::byte> staging() override { refuse(); }
  void upload_staged(std::byte*, int64_t) override { refuse(); }
  void finish() override {}
  std::span<std::byte> scratch() override { refuse(); }
  void pack(const PackedTensor&, int64_t, int64_t, const std::byte*) override { refuse(); }
  void fill_from_quantiles(std::byte*, int64_t, int64_t, DType, uint64_t, uint32_t,
                           const std::byte*) override {
    refuse();
  }
  void convert(std::byte*, DType, const SourceMatrix&, DType) override { refuse(); }
  uintptr_t stream() const override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw InternalError("counted memory has no content"); }

  int64_t bytes_ = 0;
};

}  // namespace paceline
