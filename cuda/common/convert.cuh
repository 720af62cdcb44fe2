// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of float32 or bfloat16 in memory, float in registers.

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include <paceline/dtype.h>

#include "base/check.h"

namespace paceline::cuda {

// The widest access of a thread, and the alignment that it requires.
inline constexpr int32_t kVectorBytes = 16;

[[nodiscard]] inline bool is_vector_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

template <int kBytes>
struct MemoryWord;
template <>
struct MemoryWord<2> {
  using Type = uint16_t;
};
template <>
struct MemoryWord<4> {
  using Type = uint32_t;
};
template <>
struct MemoryWord<8> {
  using Type = uint2;
};
template <>
struct MemoryWord<16> {
  using Type = uint4;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(float x, float* to) { *to = x; }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }

// Loads kCount (a power of two) consecutive elements in as few accesses as possible. `from` is
// aligned to their total size, or to 16 bytes if that is larger.
template <int kCount, class T>
__device__ __forceinline__ void load_vector(const T* from, float (&to)[kCount]) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  constexpr int kWordBytes = kBytes < kVectorBytes ? kBytes : kVectorBytes;
  constexpr int kWordElements = kWordBytes / static_cast<int>(sizeof(T));
  using Word = typename MemoryWord<kWordBytes>::Type;
#pragma unroll
  for (int i = 0; i < kCount; i += kWordElements) {
    const Word word = *reinterpret_cast<const Word*>(from + i);
    T elements[kWordElements];
    memcpy(elements, &word, kWordBytes);
#pragma unroll
    for (int j = 0; j < kWordElements; ++j) to[i + j] = widen(elements[j]);
  }
}

template <int kCount, class T>
__device__ __forceinline__ void store_vector(const float (&from)[kCount], T* to) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  constexpr int kWordBytes = kBytes < kVectorBytes ? kBytes : kVectorBytes;
  constexpr int kWordElements = kWordBytes / static_cast<int>(sizeof(T));
  using Word = typename MemoryWord<kWordBytes>::Type;
#pragma unroll
  for (int i = 0; i < kCount; i += kWordElements) {
    T elements[kWordElements];
#pragma unroll
    for (int j = 0; j < kWordElements; ++j) narrow(from[i + j], &elements[j]);
    Word word;
    memcpy(&word, elements, kWordBytes);
    *reinterpret_cast<Word*>(to + i) = word;
  }
}

// Loads the first `count` of kCount consecutive elements, and zeros for the others. With kIsVector
// count is <= 0 or at least kCount, and the addresses are aligned as above.
template <bool kIsVector, int kCount, class T>
__device__ __forceinline__ void load_first(const T* from, int32_t count, float (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = 0.0f;
  if constexpr (kIsVector) {
    if (count > 0) load_vector(from, to);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) to[i] = widen(from[i]);
    }
  }
}

template <bool kIsVector, int kCount, class T>
__device__ __forceinline__ void store_first(const float (&from)[kCount], int32_t count, T* to) {
  if constexpr (kIsVector) {
    if (count > 0) store_vector(from, to);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) narrow(from[i], to + i);
    }
  }
}

// Calls run(T{}) with the element type of `dtype`.
template <class Run>
void with_element_type(DType dtype, const char* what, Run run) {
  PACELINE_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16, what, " of ",
                 dtype_name(dtype), "; it can be float32 or bfloat16");
  if (dtype == DType::kFloat32) {
    run(float{});
  } else {
    run(__nv_bfloat16{});
  }
}

}  // namespace paceline::cuda
