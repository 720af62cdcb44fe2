// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "device/device_memory.h"
#include "model/weights/weight_layout.h"

namespace paceline {

// Where the elements of a tensor go in the arena: side by side, or packed. Rows that are packed
// pass through the scratch memory of the device.
class ArenaTarget {
 public:
  ArenaTarget(const NamedWeight& named, const DeviceBuffer& arena)
      : memory_(arena.memory()),
        to_(arena.data() + named.offset),
        item_bytes_(dtype_bytes(named.dtype)),
        packed_(named.packed) {
    if (packed_) packed_->matrix = to_;
  }

  [[nodiscard]] DeviceMemory& memory() const { return memory_; }
  [[nodiscard]] bool is_packed() const { return packed_.has_value(); }
  // Address of element `first` of a tensor that is not packed.
  [[nodiscard]] std::byte* at(int64_t first) const { return to_ + first * item_bytes_; }

  // The most elements that fit `bytes` and can be written at once: whole rows if they are packed,
  // as many as tiles have, which is also what fill_from_quantiles asks for.
  [[nodiscard]] int64_t elements_in(size_t bytes) const {
    const int64_t elements = static_cast<int64_t>(bytes) / item_bytes_;
    if (!packed_) return elements;
    const int64_t of_tiles = kPackedRows * row_elements();
    return elements / of_tiles * of_tiles;
  }

  // Writes elements [first, first + count), which fill(to) puts row-major at `to`, in memory of the
  // device.
  template <class Fill>
  void write(int64_t first, int64_t count, const Fill& fill) const {
    if (!packed_) return fill(at(first));
    std::byte* const rows = memory_.scratch().data();
    fill(rows);
    memory_.pack(*packed_, first / row_elements(), count / row_elements(), rows);
  }
  // The same for the elements at the beginning of staging().
  void upload_staged(int64_t first, int64_t count) const {
    write(first, count, [&](std::byte* to) { memory_.upload_staged(to, count * item_bytes_); });
  }

 private:
  [[nodiscard]] int64_t row_elements() const { return packed_->row_bytes / item_bytes_; }

  DeviceMemory& memory_;
  std::byte* to_;
  int64_t item_bytes_;
  std::optional<PackedTensor> packed_;
};

}  // namespace paceline
