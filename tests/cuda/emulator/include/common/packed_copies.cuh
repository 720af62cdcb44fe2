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
inline void copy_or_zero_4(uint32_t to, const void* from, uint32_t bytes, uint64_t) {
  emulator::copy_later(emulator::shared_pointer(to, 4), bytes == 4 ? from : nullptr, 4);
}

inline uint64_t row_address(const void* first, int32_t row, int32_t stride) {
  return reinterpret_cast<uint64_t>(first) + static_cast<uint64_t>(int64_t{row} * stride);
}

// The product of two bfloat16 is exact as a float, but for what a bfloat16 cannot hold either.
template <bool kIsUpper>
inline uint32_t multiply_pair(uint32_t pair, uint32_t by) {
  const float factor = __uint_as_float(kIsUpper ? by & 0xffff0000u : by << 16);
  const uint32_t low = __float2bfloat16_rn(__uint_as_float(pair << 16) * factor).bits;
  const uint32_t high = __float2bfloat16_rn(__uint_as_float(pair & 0xffff0000u) * factor).bits;
  return high << 16 | low;
}

}  // namespace paceline::cuda
