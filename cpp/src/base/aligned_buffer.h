// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace paceline {

// Zeroed host memory aligned to 64 bytes; move-only. The CPU backend's device memory.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  // `purpose` is named in the message when memory cannot be had.
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

  // Gives up ownership, and takes it again.
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

// Multiplies byte counts; throws InvalidArgument instead of wrapping around.
[[nodiscard]] int64_t checked_mul(int64_t a, int64_t b);

}  // namespace paceline
