// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "device/device_memory.h"

namespace paceline {

// Hands out device memory that lives as long as the arena. Every buffer of an iteration is
// allocated once at start, at its largest size, and keeps its address. The arena counts bytes by
// purpose. Not thread-safe.
class DeviceArena {
 public:
  // The memory must outlive the arena.
  explicit DeviceArena(DeviceMemory& memory = host_memory()) : memory_(&memory) {}

  // `count` zeroed elements, aligned to 256 bytes.
  template <class T>
  [[nodiscard]] T* allocate(int64_t count, std::string_view purpose) {
    return reinterpret_cast<T*>(
        allocate_bytes(checked_mul(count, static_cast<int64_t>(sizeof(T))), purpose));
  }
  // A copy of `from` on the device.
  template <class T>
  [[nodiscard]] T* allocate_copy(std::span<const T> from, std::string_view purpose) {
    T* data = allocate<T>(static_cast<int64_t>(from.size()), purpose);
    memory_->upload(reinterpret_cast<std::byte*>(data), from.data(),
                    static_cast<int64_t>(from.size_bytes()));
    return data;
  }
  [[nodiscard]] const std::map<std::string, int64_t, std::less<>>& bytes_by_purpose() const {
    return bytes_by_purpose_;
  }

 private:
  std::byte* allocate_bytes(int64_t bytes, std::string_view purpose);

  DeviceMemory* memory_;
  std::vector<DeviceBuffer> chunks_;
  int64_t chunk_used_ = 0;
  std::map<std::string, int64_t, std::less<>> bytes_by_purpose_;
};

}  // namespace paceline
