// SPDX-License-Identifier: Apache-2.0
// A library with a function that takes all memory of the process for a while.

#include <sys/resource.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <thread>

// Leaves no block of 16 bytes to any thread that shares this thread's heap.
extern "C" void exhaust_memory(long milliseconds) {
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit nothing_more = {.rlim_cur = 1, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_AS, &nothing_more);
  void* taken = nullptr;
  for (size_t size = size_t{1} << 20; size >= 16; size /= 2) {
    while (void* block = std::malloc(size)) {
      *static_cast<void**>(block) = taken;
      taken = block;
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  while (taken != nullptr) {
    void* next = *static_cast<void**>(taken);
    std::free(taken);
    taken = next;
  }
  setrlimit(RLIMIT_AS, &before);
}
