// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tile of gemm_dot_tile.h for an int4 matrix and few rows of x: weights are dequantised in
// registers, not in memory. A look-up gives thirty-two of them, so that the product of one row
// follows memory, which the detour through the cache would not. The bits are those of dot_tile on
// dequantised weights: the same values meet the same lanes in the same order.

#if defined(__x86_64__)

#include "ops/dequantize_x86.h"
#include "ops/gemm_dot_tile.h"
#include "ops/register_tile.h"

namespace paceline {

// The sixteen values of a group, before they are rounded.
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline __m512 int4_dot_values(float scale, int zero) {
  const float* const differences = kInt4Differences[static_cast<size_t>(zero)].data();
  return _mm512_mul_ps(_mm512_load_ps(differences), _mm512_set1_ps(scale));
}

// The thirty-two values of a block, from a table of the values of two columns: the lower half is
// the first one's. Bit 4 of an index, which belongs to another code, has to name the half.
template <bool kIsSecond>
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline __m512i int4_pair_values(const uint8_t* from,
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

// x is packed, and `weight` is null.
using Int4DotArgs = RegisterArgs<uint16_t>;

// The products of thirty-two columns.
template <int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline void int4_dot_step(
    const Int4DotArgs& args, const uint8_t* codes, int64_t block,
    const __m512i (&tables)[(kCols + 1) / 2], __m512 (&acc)[kRows][kCols]) {
  __builtin_prefetch(args.prefetch + block * 16 * kCols, 0, 2);
  const uint16_t* const x = args.x + block * kInt4Columns;
  for (int c = 0; c < kCols; ++c) {
    const uint8_t* const from = codes + c * args.row_bytes;
    const auto values =
        reinterpret_cast<__m512bh>(c % 2 == 0 ? int4_pair_values<false>(from, tables[c / 2])
                                              : int4_pair_values<true>(from, tables[c / 2]));
    for (int r = 0; r < kRows; ++r) {
      const auto xv = reinterpret_cast<__m512bh>(_mm512_loadu_si512(x + r * args.x_stride));
      acc[r][c] = _mm512_dpbf16_ps(acc[r][c], xv, values);
    }
  }
}

template <int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::noinline]] void int4_dot_tile(const Int4DotArgs& args) {
  const int64_t num_groups = args.num_groups;
  const int32_t blocks = args.scale_cols / kInt4Columns;
  const uint8_t* codes = args.elements;
  __m512 acc[kRows][kCols] = {};
  int64_t block = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    // Rounded to nearest, ties to even. No value is subnormal, since no scale is (weight_scales.h).
    __m512i tables[(kCols + 1) / 2];
    for (int c = 0; c < kCols; c += 2) {
      const int64_t at = c * num_groups + group;
      const int64_t next = c + 1 < kCols ? at + num_groups : at;
      tables[c / 2] = reinterpret_cast<__m512i>(
          _mm512_cvtne2ps_pbh(int4_dot_values(args.row_scales[next], args.zeros[next]),
                              int4_dot_values(args.row_scales[at], args.zeros[at])));
    }
    if (blocks == 1) {
      int4_dot_step(args, codes, block++, tables, acc);
      codes += 16;
      continue;
    }
    for (const int64_t end = block + blocks; block < end; ++block, codes += 16) {
      int4_dot_step(args, codes, block, tables, acc);
    }
  }
  store_dots(args, acc);
}

}  // namespace paceline

#endif
