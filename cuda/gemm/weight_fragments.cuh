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
// To move the bits of two neighbours in K (kBits each, the lower column first), one byte
// permutation makes a register of the bytes
//   [low, low, high, high]
// where `low` and `high` have their element in the highest bits. Then the signs are in bits 15 and
// 31, and the other bits of the elements, which the lower byte of each half has in bits 6 and
// below, are where they belong after a shift to the left: by 2 (e2m1) or 4 (e4m3).

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

// Both halves of the register are `value`, which is a bfloat16.
__device__ __forceinline__ uint32_t twice(float value) {
  return __byte_perm(__float_as_uint(value), 0, 0x3232);
}

template <WeightFormat format>
struct ElementBits;
template <>
struct ElementBits<WeightFormat::kFp8> {
  static constexpr int32_t kShift = 4;
  static constexpr uint32_t kMask = 0x07f007f0u;
  static constexpr float kPower = 0x1p120f;
  // The largest scale whose product with kPower is a bfloat16.
  static constexpr float kMaxScale = 0x1p7f;
};
template <>
struct ElementBits<WeightFormat::kMxfp4> {
  static constexpr int32_t kShift = 2;
  static constexpr uint32_t kMask = 0x01c001c0u;
  static constexpr float kPower = 0x1p126f;
  static constexpr uint32_t kMaxScaleByte = 128;  // 2
};

// Two elements from the bytes described above.
template <WeightFormat format>
__device__ __forceinline__ uint32_t expand_pair(uint32_t bytes) {
  using Bits = ElementBits<format>;
  return (bytes & 0x80008000u) | ((bytes << Bits::kShift) & Bits::kMask);
}

// Reads the operand of a thread from a stage of the ring. A stage has 128 columns of K. `load`
// fills the registers of four products of 16 columns each: a[4 i] to a[4 i + 3] are those of
// product i (wgmma_register_products.cuh).
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
    // Byte t of the word shifted by 4 twice, and of the word itself twice.
    select_ = 0x4400u + 0x1111u * static_cast<uint32_t>(lane % 4);
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
    const uint32_t bytes = __byte_perm(word << 4, word, select_);
    const uint32_t pair = multiply_pair(expand_pair<WeightFormat::kMxfp4>(bytes), by.first);
    return kIsTwice ? multiply_pair(pair, by.second) : pair;
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
    select_ = lane % 2 == 0 ? 0x1100u : 0x3322u;
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
    const uint32_t bytes = __byte_perm(word, 0, select_);
    const uint32_t pair = multiply_pair(expand_pair<WeightFormat::kFp8>(bytes), by.first);
    return kIsTwice ? multiply_pair(pair, by.second) : pair;
  }

  int32_t first_;
  int32_t swizzle_;
  uint32_t select_;
};

}  // namespace paceline::cuda
