// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace paceline {

// Zeroed host memory, aligned to 64 bytes; move-only. It is the device memory of the CPU backend.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  // Throws OutOfMemory, which names `purpose`.
  AlignedBuffer(int64_t bytes, std::string_view purpose);
  ~AlignedBuffer() { reset(); }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    if (this != &other) {
      reset();
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }

  // Give up ownership, and take it again.
  [[nodiscard]] std::byte* release() noexcept {
    bytes_ = 0;
    return std::exchange(data_, nullptr);
  }
  static AlignedBuffer adopt(std::byte* data, int64_t bytes) noexcept {
    AlignedBuffer buffer;
    buffer.data_ = data;
    buffer.bytes_ = bytes;
    return buffer;
  }

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  void reset() noexcept;

  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// The product of two sizes. Throws InvalidArgument when it overflows.
[[nodiscard]] int64_t checked_mul(int64_t a, int64_t b);

}  // namespace paceline
