// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replaces operator new by one that fails on demand. For one source file of a binary.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace paceline::testing {

// Allocations fail on one side: on the thread of the test, or on all others, such as those of
// engines.
enum class Side : int { kNone, kEngine, kTest };

inline std::atomic<Side> fault_side{Side::kNone};
inline std::atomic<int64_t> fault_countdown{0};    // allocations before the first that fails
inline std::atomic<int64_t> fault_duration_us{0};  // how long all fail from then on; 0: one fails
inline std::atomic<int64_t> fault_end_us{0};
inline std::atomic<int64_t> num_faults{0};
inline thread_local bool is_test_thread = false;
inline thread_local bool is_in_device = false;  // a device's failures are another matter

inline int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline bool allocation_fails() {
  const Side side = fault_side.load(std::memory_order_relaxed);
  if (side == Side::kNone || is_in_device || (side == Side::kTest) != is_test_thread) return false;
  const int64_t before = fault_countdown.fetch_sub(1);
  if (before > 0) return false;
  if (before == 0) {
    fault_end_us = now_us() + fault_duration_us;
  } else if (now_us() >= fault_end_us) {
    return false;
  }
  ++num_faults;
  return true;
}

// From now on: the allocation after `after` others fails, or all do for `duration_us` from then on.
inline void fail_allocations(Side side, int64_t after, int64_t duration_us = 0) {
  fault_side = Side::kNone;
  num_faults = 0;
  fault_end_us = 0;
  fault_countdown = after;
  fault_duration_us = duration_us;
  fault_side = side;
}

inline void* allocate(size_t size) {
  if (allocation_fails()) throw std::bad_alloc();
  void* const memory = std::malloc(std::max<size_t>(size, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace paceline::testing

void* operator new(size_t size) { return paceline::testing::allocate(size); }
void* operator new[](size_t size) { return paceline::testing::allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
