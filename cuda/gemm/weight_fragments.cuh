// SPDX-License-Identifier: Apache-2.0
#pragma once

// Weights of 4 and 8 bits in shared memory, converted to the bfloat16 register operand of `wgmma`.
//
// The conversion is exact. Take the bits of an element apart from its sign, exponent and mantissa
// side by side, and move them to where a bfloat16 has the lowest exponent bits and the highest
// mantissa bits:
//   e2m1  s ee m      ->  s 000000ee m000000    e2m1 has the exponent bias 1, bfloat16 127
//   e4m3  s eeee mmm  ->  s 0000eeee mmm0000    e4m3 has the exponent bias 7
// Read as a bfloat16, that is the element times 2^(1 - 127) or 2^(7 - 127). This holds for
// subnormal elements as well, because their bits become those of a subnormal bfloat16. A
// multiplication by a power of two makes it the element, or the element times its scale;
// `mul.bf16x2` does not flush subnormals. NaN, which e4m3 has and e2m1 does not, becomes 480.
//
// To move the bits of two neighbours in K, one byte permutation makes a register of the bytes
//   [low, sign of low, high, sign of high]
// where `low` (of the lower column) and `high` have their element in the highest bits, and a sign
// fills all bits of its byte. After a shift to the left, by 2 (e2m1) or 4 (e4m3), the exponents and
// mantissas are where they belong, and bits 15 and 31 are still signs; a mask clears the rest.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "gemm/gemm_args.h"
#include "ops/weight_matrix.h"

namespace paceline::cuda {

// What multiplies both bfloat16 of a register. Where the scale times the power of two above would
// overflow, `first` is the power alone and `second` the scale.
struct Multiplier {
  uint32_t first;
  uint32_t second;
};

__device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, uint32_t by) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(by));
  return product;
}

// Byte i of the result is byte s % 8 of (high, low), s being the selector's i-th four bits; or, if
// s >= 8, the sign of that byte in all bits.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
  return bytes;
}

// Both halves of the register are `value`, which is a bfloat16.
__device__ __forceinline__ uint32_t twice(float value) {
  return __byte_perm(__float_as_uint(value), 0, 0x3232);
}

template <WeightFormat format>
struct ElementBits;
template <>
struct ElementBits<WeightFormat::kFp8> {
  static constexpr int32_t kShift = 4;
  static constexpr uint32_t kMask = 0x87f087f0u;
  static constexpr float kPower = 0x1p120f;
  // The largest scale whose product with kPower is a bfloat16.
  static constexpr float kMaxScale = 0x1p7f;
};
template <>
struct ElementBits<WeightFormat::kMxfp4> {
  static constexpr int32_t kShift = 2;
  static constexpr uint32_t kMask = 0x81c081c0u;
  static constexpr float kPower = 0x1p126f;
  static constexpr uint32_t kMaxScaleByte = 128;  // 2
};

// Two elements from the bytes described above, each times `by`.
template <WeightFormat format, bool kIsTwice>
__device__ __forceinline__ uint32_t convert_pair(uint32_t bytes, const Multiplier& by) {
  using Bits = ElementBits<format>;
  const uint32_t pair = multiply_pair((bytes << Bits::kShift) & Bits::kMask, by.first);
  return kIsTwice ? multiply_pair(pair, by.second) : pair;
}

// Reads the operand of a thread from a stage of the ring. A stage has 128 columns of K. `load`
// fills the registers of four products of 16 columns each: a[4 i] to a[4 i + 3] are those of
// product i (wgmma_products.cuh).
template <WeightFormat format>
class WeightFragments;

// A row of a stage has 64 bytes, whose 16-byte pieces the copy engine stores in another order:
// piece c of row r is at c ^ (r / 2 % 4) (the 64-byte swizzle). A piece has 32 columns, which is
// what one scale is for. A byte has two columns, so word 2 i of a piece has columns 0 to 7 of a
// product and word 2 i + 1 columns 8 to 15; thread t of a group of four needs byte t of each word.
template <>
class WeightFragments<WeightFormat::kMxfp4> {
 public:
  static constexpr int32_t kRowBytes = 64;

  __device__ __forceinline__ explicit WeightFragments(int32_t first_row) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t row = first_row + lane / 4;
    first_ = row * kRowBytes;
    swizzle_ = row / 2 % 4;  // the same 8 rows further on
    // Byte t of the word shifted by 4 and its sign, byte t of the word itself and its sign.
    select_ = 0xc480u + 0x1111u * static_cast<uint32_t>(lane % 4);
  }

  // of(i, piece): the multiplier of row `row + 8 i` for the half's piece 0 or 1.
  template <bool kIsTwice, class MultiplierOf>
  __device__ __forceinline__ void load(uint32_t (&a)[16], const std::byte* weights, int32_t half,
                                       const MultiplierOf& of) const {
#pragma unroll
    for (int32_t piece = 0; piece < 2; ++piece) {
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const uint4 words = *reinterpret_cast<const uint4*>(weights + first_ + 8 * i * kRowBytes +
                                                            ((2 * half + piece) ^ swizzle_) * 16);
        const Multiplier by = of(i, piece);
        uint32_t* const to = a + 8 * piece + i;
        to[0] = convert<kIsTwice>(words.x, by);
        to[2] = convert<kIsTwice>(words.y, by);
        to[4] = convert<kIsTwice>(words.z, by);
        to[6] = convert<kIsTwice>(words.w, by);
      }
    }
  }

 private:
  template <bool kIsTwice>
  __device__ __forceinline__ uint32_t convert(uint32_t word, const Multiplier& by) const {
    return convert_pair<WeightFormat::kMxfp4, kIsTwice>(permute_bytes(word << 4, word, select_),
                                                        by);
  }

  int32_t first_;
  int32_t swizzle_;
  uint32_t select_;
};

// A row of a stage has 128 bytes; piece c of 16 bytes, the columns of one product, is at c ^ (r %
// 8) (the 128-byte swizzle). Thread t of a group of four needs columns 2 t, 2 t + 1, 2 t + 8 and
// 2 t + 9: a half of word t / 2 and the same half of word t / 2 + 2.
template <>
class WeightFragments<WeightFormat::kFp8> {
 public:
  static constexpr int32_t kRowBytes = 128;

  __device__ __forceinline__ explicit WeightFragments(int32_t first_row) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t row = first_row + lane / 4;
    first_ = row * kRowBytes + lane % 4 / 2 * 4;
    swizzle_ = row % 8;  // the same 8 rows further on
    select_ = lane % 2 == 0 ? 0x9180u : 0xb3a2u;
  }

  // of(i, piece): the multiplier of row `row + 8 i` for the half's 32 columns 0 or 1.
  template <bool kIsTwice, class MultiplierOf>
  __device__ __forceinline__ void load(uint32_t (&a)[16], const std::byte* weights, int32_t half,
                                       const MultiplierOf& of) const {
#pragma unroll
    for (int32_t product = 0; product < 4; ++product) {
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const auto* const words = reinterpret_cast<const uint32_t*>(
            weights + first_ + 8 * i * kRowBytes + ((4 * half + product) ^ swizzle_) * 16);
        const Multiplier by = of(i, product / 2);
        a[4 * product + i] = convert<kIsTwice>(words[0], by);
        a[4 * product + i + 2] = convert<kIsTwice>(words[2], by);
      }
    }
  }

 private:
  template <bool kIsTwice>
  __device__ __forceinline__ uint32_t convert(uint32_t word, const Multiplier& by) const {
    return convert_pair<WeightFormat::kFp8, kIsTwice>(permute_bytes(word, 0, select_), by);
  }

  int32_t first_;
  int32_t swizzle_;
  uint32_t select_;
};

}  // namespace paceline::cuda
