// SPDX-License-Identifier: Apache-2.0
#pragma once

// Wrappers of PTX instructions that order some threads of a block or the blocks of a grid, and
// hints to the compiler's allocation of registers.

#include <cstdint>

namespace paceline::cuda {

// A barrier of the kThreads threads that call it with this number, whole warps. Number 0 is that of
// __syncthreads.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void sync_some_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// The same with a number that need not be constant.
template <int32_t kCount>
__device__ __forceinline__ void sync_threads(int32_t number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kCount) : "memory");
}
template <int32_t kCount>
__device__ __forceinline__ void arrive_threads(int32_t number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kCount) : "memory");
}

// Adds without any order.
template <uint32_t kAmount>
__device__ __forceinline__ void add_relaxed(uint32_t* counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "n"(kAmount) : "memory");
}
// Adds, releases and acquires as arrive_and_acquire.
template <uint32_t kAmount>
__device__ __forceinline__ uint32_t add_and_acquire(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "n"(kAmount)
               : "memory");
  return before;
}
// The value, for a thread that waits for other blocks; acquires what they have released.
__device__ __forceinline__ uint32_t poll_and_acquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Adds one and returns the former value. Releases what the block has written and a barrier has
// ordered before the call, and acquires what other blocks have released in the same way.
__device__ __forceinline__ int32_t arrive_and_acquire(int32_t* counter) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// The value, in a register: the compiler can neither load it again nor load more than it in
// advance.
__device__ __forceinline__ float in_register(float value) {
  asm volatile("" : "+f"(value));
  return value;
}
__device__ __forceinline__ int32_t in_register(int32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ const float* in_register(const float* value) {
  asm volatile("" : "+l"(value));
  return value;
}

}  // namespace paceline::cuda
