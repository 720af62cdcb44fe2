// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"

namespace paceline {

// Hands out device memory that lives as long as the arena: every buffer of the step is taken once
// at start, at its largest size, and keeps its address. Counts bytes. Not thread-safe.
class DeviceArena {
 public:
  // `count` zeroed elements, 64 B aligned.
  template <class T>
  [[nodiscard]] T* allocate(int64_t count, std::string_view purpose) {
    return reinterpret_cast<T*>(
        allocate_bytes(checked_mul(count, static_cast<int64_t>(sizeof(T))), purpose));
  }
  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  std::byte* allocate_bytes(int64_t bytes, std::string_view purpose);

  std::vector<AlignedBuffer> chunks_;
  int64_t chunk_used_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace paceline
