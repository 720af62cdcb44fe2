// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory as that of a GPU, for tests without one: weights pass through a small staging buffer of
// each thread, and rows are packed on their way.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <span>
#include <string_view>
#include <thread>

#include "base/check.h"
#include "base/philox.h"
#include "device/device_memory.h"
#include "support/packed_weights.h"

namespace paceline::testing {

class StagedMemory final : public DeviceMemory {
 public:
  static constexpr size_t kStagingBytes = 4096;

  // The threads that have used a staging buffer.
  [[nodiscard]] int64_t num_staging_buffers() const {
    const std::scoped_lock lock(mutex_);
    return std::ssize(threads_);
  }
  // Whether bytes lie in the staging buffer of the calling thread.
  [[nodiscard]] static bool is_staged(std::span<const std::byte> bytes) {
    const std::span<std::byte> buffer = buffer_of_thread();
    return bytes.data() >= buffer.data() &&
           bytes.data() + bytes.size() <= buffer.data() + buffer.size();
  }

  std::byte* allocate(int64_t bytes, std::string_view purpose) override {
    return host_memory().allocate(bytes, purpose);
  }
  void release(std::byte* data, int64_t bytes) noexcept override {
    host_memory().release(data, bytes);
  }
  std::byte* allocate_shared(int64_t bytes, std::string_view purpose) override {
    return allocate(bytes, purpose);
  }
  void release_shared(std::byte* data, int64_t bytes) noexcept override { release(data, bytes); }
  bool is_host_memory() const override { return false; }
  void upload(std::byte* to, const void* from, int64_t bytes) override {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void download(void* to, const std::byte* from, int64_t bytes) override {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  std::span<std::byte> staging() override {
    const std::scoped_lock lock(mutex_);
    threads_.insert(std::this_thread::get_id());
    return buffer_of_thread();
  }
  void upload_staged(std::byte* to, int64_t bytes) override {
    upload(to, buffer_of_thread().data(), bytes);
  }
  void finish() override {}
  std::span<std::byte> scratch() override {
    thread_local std::array<std::byte, kStagingBytes> rows;
    return rows;
  }
  void pack(const PackedTensor& to, int64_t first, int64_t count, const std::byte* from) override {
    const auto* const rows = reinterpret_cast<const uint8_t*>(from);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = to.first_row + (first + i) % to.num_rows;
      std::byte* const matrix = to.matrix + (first + i) / to.num_rows * to.matrix_stride;
      pack_into(to.kind, {rows + i * to.row_bytes, static_cast<size_t>(to.row_bytes)}, to.row_bytes,
                row,
                {reinterpret_cast<uint8_t*>(matrix),
                 static_cast<size_t>(packed_bytes(to.kind, row + 1, to.row_bytes))});
    }
  }
  void convert(std::byte*, DType, const SourceMatrix&, DType) override { refuse(); }
  uintptr_t stream() const override { return 0; }
  void fill_from_quantiles(std::byte* to, int64_t first, int64_t count, DType dtype, uint64_t seed,
                           uint32_t salt, const std::byte* quantiles) override {
    PACELINE_CHECK(first % 8 == 0, first);
    const int64_t bytes = dtype_bytes(dtype);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = (first + i) / 8;
      const NoiseKey key = {.seed = seed,
                            .stream = NoiseStream::kSynthetic,
                            .position = static_cast<uint32_t>(block >> 32),
                            .salt = salt};
      const uint32_t word = philox(key, static_cast<uint32_t>(block))[(first + i) % 8 / 2];
      const uint32_t index = (first + i) % 2 == 0 ? word & 0xffffu : word >> 16;
      std::memcpy(to + i * bytes, quantiles + index * bytes, static_cast<size_t>(bytes));
    }
  }

 private:
  [[nodiscard]] static std::span<std::byte> buffer_of_thread() {
    thread_local std::array<std::byte, kStagingBytes> buffer;
    return buffer;
  }
  [[noreturn]] static void refuse() { throw InternalError("no tensor lies in this memory"); }

  mutable std::mutex mutex_;
  std::set<std::thread::id> threads_;
};

}  // namespace paceline::testing
