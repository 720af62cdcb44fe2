// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tile of gemm_dot_tile.h for a matrix of four bits and few rows of x: weights are
// dequantised in registers, not in memory. A look-up gives thirty-two of them, so that the product
// of one row follows memory, which the detour through the cache would not. The bits are those of
// dot_tile on dequantised weights: the same values meet the same lanes in the same order.

#if defined(__x86_64__)

#include "ops/dequantize_x86.h"
#include "ops/gemm_dot_tile.h"
#include "ops/register_tile.h"

namespace paceline {

// x is packed, and `weight` is null.
using FourBitDotArgs = RegisterArgs<uint16_t>;

// A source of weights: `table` has the sixteen values of group `first`, then those of `second`,
// which count over the groups of all columns of the tile.
struct Int4DotSource {
  // Rounded to nearest, ties to even. No value is subnormal, since no scale is (weight_scales.h).
  [[PACELINE_DOT_TARGET, gnu::always_inline]] static __m512i table(const FourBitDotArgs& args,
                                                                   int64_t first, int64_t second) {
    const auto values =
        [&](int64_t group) __attribute__((target(PACELINE_DOT_TARGETS), always_inline)) {
          return _mm512_mul_ps(_mm512_load_ps(kInt4Differences[args.zeros[group]].data()),
                               _mm512_set1_ps(args.row_scales[group]));
        };
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values(second), values(first)));
  }
};

struct Mxfp4DotSource {
  [[PACELINE_DOT_TARGET, gnu::always_inline]] static __m512i table(const FourBitDotArgs& args,
                                                                   int64_t first, int64_t second) {
    const auto values = [&](int64_t group)
                            __attribute__((target(PACELINE_DOT_TARGETS), always_inline)) {
                              return _mm256_load_si256(reinterpret_cast<const __m256i*>(
                                  kMxfp4Table[args.row_exponents[group]].data()));
                            };
    return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(values(first)), values(second), 1);
  }
};

// The thirty-two values of a block, from a table of the values of two columns: the lower half is
// the first one's. Bit 4 of an index, which belongs to another code, has to name the half.
template <bool kIsSecond>
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline __m512i pair_values(const uint8_t* from,
                                                                       __m512i table) {
  const __m512i bytes =
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  constexpr int kBoth = 0xfe;     // a | b | c
  constexpr int kWithout = 0x54;  // (a | b) & ~c
  const __m512i index =
      _mm512_ternarylogic_epi32(bytes, _mm512_maskz_slli_epi32(0xffff, bytes, 12),
                                _mm512_set1_epi32(0x00100010), kIsSecond ? kBoth : kWithout);
  return _mm512_maskz_permutexvar_epi16(kAllLanes, index, table);
}

inline constexpr int32_t kFourBitColumns = 32;  // of a block
static_assert(kInt4Columns == kFourBitColumns && kMxfp4Columns == kFourBitColumns);
static_assert(2 * kNvfp4Columns == kFourBitColumns);

// Adds the products of a block with column `c` of the tile.
template <int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline void add_products(const FourBitDotArgs& args,
                                                                     int64_t block, __m512i values,
                                                                     int c,
                                                                     __m512 (&acc)[kRows][kCols]) {
  const uint16_t* const x = args.x + block * kFourBitColumns;
  for (int r = 0; r < kRows; ++r) {
    const auto xv = reinterpret_cast<__m512bh>(_mm512_loadu_si512(x + r * args.x_stride));
    acc[r][c] = _mm512_dpbf16_ps(acc[r][c], xv, reinterpret_cast<__m512bh>(values));
  }
}

// The products of a block.
template <int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline void four_bit_dot_step(
    const FourBitDotArgs& args, const uint8_t* codes, int64_t block,
    const __m512i (&tables)[(kCols + 1) / 2], __m512 (&acc)[kRows][kCols]) {
  __builtin_prefetch(args.prefetch + block * 16 * kCols, 0, 2);
  for (int c = 0; c < kCols; ++c) {
    const uint8_t* const from = codes + c * args.row_bytes;
    const __m512i values = c % 2 == 0 ? pair_values<false>(from, tables[c / 2])
                                      : pair_values<true>(from, tables[c / 2]);
    add_products(args, block, values, c, acc);
  }
}

template <class Source, int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::noinline]] void four_bit_dot_tile(const FourBitDotArgs& args) {
  const int64_t num_groups = args.num_groups;
  const int32_t blocks = args.scale_cols / kFourBitColumns;
  const uint8_t* codes = args.elements;
  __m512 acc[kRows][kCols] = {};
  int64_t block = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    __m512i tables[(kCols + 1) / 2];
    for (int c = 0; c < kCols; c += 2) {
      const int64_t first = c * num_groups + group;
      tables[c / 2] = Source::table(args, first, c + 1 < kCols ? first + num_groups : first);
    }
    if (blocks == 1) {
      four_bit_dot_step(args, codes, block++, tables, acc);
      codes += 16;
      continue;
    }
    for (const int64_t end = block + blocks; block < end; ++block, codes += 16) {
      four_bit_dot_step(args, codes, block, tables, acc);
    }
  }
  store_dots(args, acc);
}

// The thirty-two values of a block of nvfp4, whose halves have a scale each. A table serves one
// block, and each half of it one half of the block.
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline __m512i nvfp4_values(const uint8_t* from,
                                                                        const float* scales) {
  const __m512 elements = _mm512_load_ps(kE2m1Elements.data());
  // Rounded to nearest, ties to even. No value is subnormal (weight_scales.h).
  const auto table = reinterpret_cast<__m512i>(
      _mm512_cvtne2ps_pbh(_mm512_mul_ps(elements, _mm512_set1_ps(scales[1])),
                          _mm512_mul_ps(elements, _mm512_set1_ps(scales[0]))));
  const __m512i bytes =
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  constexpr int kEither = 0xa8;  // (a | b) & c
  const __m512i codes = _mm512_ternarylogic_epi32(bytes, _mm512_maskz_slli_epi32(0xffff, bytes, 12),
                                                  _mm512_set1_epi32(0x000f000f), kEither);
  const __m512i half = _mm512_maskz_set1_epi32(0xff00, 0x00100010);
  return _mm512_maskz_permutexvar_epi16(kAllLanes, _mm512_or_si512(codes, half), table);
}

template <int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::noinline]] void nvfp4_dot_tile(const FourBitDotArgs& args) {
  const int64_t blocks = args.num_groups / 2;
  __m512 acc[kRows][kCols] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    __builtin_prefetch(args.prefetch + block * 16 * kCols, 0, 2);
    for (int c = 0; c < kCols; ++c) {
      const uint8_t* const from = args.elements + c * args.row_bytes + block * 16;
      const float* const scales = args.row_scales + int64_t{c} * args.num_groups + 2 * block;
      add_products(args, block, nvfp4_values(from, scales), c, acc);
    }
  }
  store_dots(args, acc);
}

}  // namespace paceline

#endif
