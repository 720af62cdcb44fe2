// SPDX-License-Identifier: Apache-2.0
#include "guarded_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace paceline::emulator {
namespace {

constexpr std::byte kGuard{0xff};
constexpr size_t kGuardBytes = 64;  // before the beginning
constexpr size_t kAlignment = 16;

}  // namespace

GuardedMemory::GuardedMemory(size_t num_bytes) : size_(num_bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  page_bytes_ = (rounded + kGuardBytes + page - 1) / page * page;
  void* const memory = mmap(nullptr, page_bytes_ + page, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  pages_ = static_cast<std::byte*>(memory);
  if (mprotect(pages_ + page_bytes_, page, PROT_NONE) != 0) throw std::bad_alloc();
  begin_ = pages_ + page_bytes_ - rounded;
  std::memset(begin_ - kGuardBytes, static_cast<int>(kGuard), kGuardBytes);
  std::memset(begin_ + size_, static_cast<int>(kGuard), rounded - size_);
}

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept
    : pages_(std::exchange(other.pages_, nullptr)),
      page_bytes_(other.page_bytes_),
      begin_(other.begin_),
      size_(other.size_) {}

GuardedMemory::~GuardedMemory() {
  if (pages_ == nullptr) return;
  munmap(pages_, page_bytes_ + static_cast<size_t>(sysconf(_SC_PAGESIZE)));
}

bool GuardedMemory::are_guards_intact() const {
  const auto is_guard = [](std::byte byte) { return byte == kGuard; };
  return std::all_of(begin_ - kGuardBytes, begin_, is_guard) &&
         std::all_of(begin_ + size_, pages_ + page_bytes_, is_guard);
}

}  // namespace paceline::emulator
