// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for cuda/common/packed_copies.cuh.

#include <cuda_bf16.h>

#include <cstdint>

namespace paceline::cuda {

inline void copy_weights_16(uint32_t to, const void* from, uint64_t) {
  emulator::copy_later(emulator::shared_pointer(to, 16), from, 16);
}
inline void copy_weights_4(uint32_t to, const void* from, uint64_t) {
  emulator::copy_later(emulator::shared_pointer(to, 4), from, 4);
}
// All or nothing.
inline void copy_or_zero_16(uint32_t to, const void* from, uint32_t bytes, uint64_t) {
  emulator::copy_later(emulator::shared_pointer(to, 16), bytes == 16 ? from : nullptr, 16);
}
inline void copy_or_zero_8(uint32_t to, const void* from, uint32_t bytes, uint64_t) {
  emulator::copy_later(emulator::shared_pointer(to, 8), bytes == 8 ? from : nullptr, 8);
}
inline void copy_or_zero_4(uint32_t to, const void* from, uint32_t bytes, uint64_t) {
  emulator::copy_later(emulator::shared_pointer(to, 4), bytes == 4 ? from : nullptr, 4);
}

inline uint64_t row_address(const void* first, int32_t row, int32_t stride) {
  return reinterpret_cast<uint64_t>(first) + static_cast<uint64_t>(int64_t{row} * stride);
}

// The product of two bfloat16 is exact as a float, but for what a bfloat16 cannot hold either.
template <uint32_t kMask>
inline uint32_t masked_with(uint32_t word, uint32_t bits) {
  return (word & kMask) | bits;
}

template <bool kIsUpper>
inline uint32_t multiply_pair(uint32_t pair, uint32_t by) {
  const float factor = __uint_as_float(kIsUpper ? by & 0xffff0000u : by << 16);
  const uint32_t low = __float2bfloat16_rn(__uint_as_float(pair << 16) * factor).bits;
  const uint32_t high = __float2bfloat16_rn(__uint_as_float(pair & 0xffff0000u) * factor).bits;
  return high << 16 | low;
}

// Sums are of few bits here, so they are exact as doubles.
template <bool kIsUpper>
inline uint32_t multiply_add_pair(uint32_t pair, uint32_t by, uint32_t add) {
  const double factor = __uint_as_float(kIsUpper ? by & 0xffff0000u : by << 16);
  const auto sum = [&](uint32_t of_pair, uint32_t of_add) {
    const double exact = __uint_as_float(of_pair) * factor + __uint_as_float(of_add);
    return uint32_t{__float2bfloat16_rn(static_cast<float>(exact)).bits};
  };
  return sum(pair & 0xffff0000u, add & 0xffff0000u) << 16 | sum(pair << 16, add << 16);
}
template <bool kIsUpper>
inline uint32_t add_to_pair(uint32_t pair, uint32_t by) {
  const uint32_t twice = kIsUpper ? by >> 16 | (by & 0xffff0000u) : by << 16 | (by & 0xffffu);
  return multiply_add_pair<false>(pair, 0x3f80u, twice);
}

// The exponent of a float16 is 112 below that of the float with the same bits.
template <bool kIsUpper>
inline float half_of(uint32_t pair) {
  const uint32_t bits = kIsUpper ? pair >> 16 : pair & 0xffffu;
  return __uint_as_float((bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13) * 0x1p112f;
}

}  // namespace paceline::cuda
