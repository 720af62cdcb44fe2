// SPDX-License-Identifier: Apache-2.0
#pragma once

// PTX of the kernels of packed weights: copies with a policy of the L2 cache, and products of pairs
// of bfloat16. Before sm_90 there is no such policy here, as its numbers are those of sm_90, and a
// fused multiply-add takes the place of the product.

#include <cstdint>

namespace paceline::cuda {

__device__ __forceinline__ void copy_weights_16(uint32_t to, const void* from, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy)
               : "memory");
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void copy_weights_4(uint32_t to, const void* from, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "l"(policy)
               : "memory");
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#endif
}

// Copies `bytes` of 16 (of 8, of 4) bytes of weights; the others become zero.
__device__ __forceinline__ void copy_or_zero_16(uint32_t to, const void* from, uint32_t bytes,
                                                uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(bytes), "l"(policy)
               : "memory");
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void copy_or_zero_8(uint32_t to, const void* from, uint32_t bytes,
                                               uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 8, %2, %3;" ::"r"(to),
               "l"(from), "r"(bytes), "l"(policy)
               : "memory");
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void copy_or_zero_4(uint32_t to, const void* from, uint32_t bytes,
                                               uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2, %3;" ::"r"(to),
               "l"(from), "r"(bytes), "l"(policy)
               : "memory");
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
#endif
}

// The address of a row, by one instruction.
__device__ __forceinline__ uint64_t row_address(const void* first, int32_t row, int32_t stride) {
  uint64_t address;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(stride), "l"(first));
  return address;
}

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
// Weights are read once, so they pass the first cache by.
__device__ __forceinline__ uint4 read_weights_16(const void* from, uint64_t policy) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from), "l"(policy));
  return words;
}
__device__ __forceinline__ uint2 read_weights_8(const void* from, uint64_t policy) {
  uint2 words;
  asm volatile("ld.global.nc.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(words.x), "=r"(words.y)
               : "l"(from), "l"(policy));
  return words;
}
__device__ __forceinline__ uint32_t read_weights_4(const void* from, uint64_t policy) {
  uint32_t word;
  asm volatile("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;"
               : "=r"(word)
               : "l"(from), "l"(policy));
  return word;
}
#endif

// word & kMask | bits, by one instruction; of two constants the compiler makes two.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked_with(uint32_t word, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(kMask), "r"(bits));
  return result;
}

// Both bfloat16 of `pair`, times the lower or upper one of `by`. Subnormals are not flushed.
template <bool kIsUpper>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, uint32_t by) {
  uint32_t product;
#if __CUDA_ARCH__ >= 900
  if constexpr (kIsUpper) {
    asm("{ .reg .b16 low, high; .reg .b32 twice; mov.b32 {low, high}, %2;"
        "mov.b32 twice, {high, high}; mul.rn.bf16x2 %0, %1, twice; }"
        : "=r"(product)
        : "r"(pair), "r"(by));
  } else {
    asm("{ .reg .b16 low, high; .reg .b32 twice; mov.b32 {low, high}, %2;"
        "mov.b32 twice, {low, low}; mul.rn.bf16x2 %0, %1, twice; }"
        : "=r"(product)
        : "r"(pair), "r"(by));
  }
#else
  // Plus -0, which keeps the sign of a zero.
  const uint32_t twice = __byte_perm(by, 0, kIsUpper ? 0x3232 : 0x1010);
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(twice), "r"(0x80008000u));
#endif
  return product;
}

// The lower or upper bfloat16 of `by`, twice.
template <bool kIsUpper>
__device__ __forceinline__ uint32_t twice_of(uint32_t by) {
  return __byte_perm(by, 0, kIsUpper ? 0x3232 : 0x1010);
}

// Both bfloat16 of `pair`, plus the lower or upper one of `by`.
template <bool kIsUpper>
__device__ __forceinline__ uint32_t add_to_pair(uint32_t pair, uint32_t by) {
  uint32_t sum;
  const uint32_t twice = twice_of<kIsUpper>(by);
#if __CUDA_ARCH__ >= 900
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(twice));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0x3f803f80u), "r"(twice));
#endif
  return sum;
}

// Both bfloat16 of `pair`, times the lower or upper one of `by`, plus those of `add`, rounded once.
template <bool kIsUpper>
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t pair, uint32_t by, uint32_t add) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(sum)
      : "r"(pair), "r"(twice_of<kIsUpper>(by)), "r"(add));
  return sum;
}

// The lower or upper float16 of `pair`.
template <bool kIsUpper>
__device__ __forceinline__ float half_of(uint32_t pair) {
  float value;
  if constexpr (kIsUpper) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }"
        : "=f"(value)
        : "r"(pair));
  } else {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }"
        : "=f"(value)
        : "r"(pair));
  }
  return value;
}

}  // namespace paceline::cuda
