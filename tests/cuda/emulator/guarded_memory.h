// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory between two guards: after it, at most 15 bytes from its end, a page without access rights;
// before it, bytes with a known value, which are checked.

#include <cstddef>
#include <cstdint>
#include <string>

namespace paceline::emulator {

class GuardedMemory {
 public:
  explicit GuardedMemory(size_t num_bytes);
  ~GuardedMemory();
  GuardedMemory(GuardedMemory&& other) noexcept;
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  [[nodiscard]] std::byte* data() const { return begin_; }
  [[nodiscard]] size_t size() const { return size_; }
  // Whether nothing was written before the beginning, or between the end and the page.
  [[nodiscard]] bool are_guards_intact() const;

 private:
  std::byte* pages_ = nullptr;
  size_t page_bytes_ = 0;  // without the page at the end
  std::byte* begin_ = nullptr;
  size_t size_ = 0;
};

}  // namespace paceline::emulator
