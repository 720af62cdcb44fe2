// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for the CUDA toolkit's header of this name, as far as our kernels use it.

#include <cstdint>

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(uint32_t{value.bits} << 16);
}
// To the nearest, ties to even; every NaN becomes the same one.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float __low2float(__nv_bfloat162 pair) { return __bfloat162float(pair.x); }
inline float __high2float(__nv_bfloat162 pair) { return __bfloat162float(pair.y); }
