// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tile of gemm_dot_tile.h for a matrix of fp8 and few rows of x: weights become bfloat16 in
// registers, not in memory, by two look-ups of sixty-four bytes. The bits are those of dot_tile and
// scaled_dot_tile on dequantised weights: the same values meet the same lanes in the same order.

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "ops/dequantize_x86.h"
#include "ops/gemm_dot_tile.h"
#include "ops/register_tile.h"

#define PACELINE_BYTE_DOT_TARGETS PACELINE_DOT_TARGETS ",avx512vbmi"
#define PACELINE_BYTE_DOT_TARGET gnu::target(PACELINE_BYTE_DOT_TARGETS)

namespace paceline {

// Whether the processor has the tile's instructions: a dot product, and look-ups of bytes.
[[nodiscard]] inline bool has_byte_dot_product() {
  static const bool has_bytes = has_dot_product() && __builtin_cpu_supports("avx512vbmi") != 0;
  return has_bytes;
}

// The 128 magnitudes of e4m3 times a power of two, as the low and the high bytes of bfloat16.
struct Fp8Bytes {
  alignas(64) std::array<uint8_t, 128> lows;
  std::array<uint8_t, 128> highs;
};

// Those of 2^(i - 127) for every i. Values that are no normal bfloat16, which exact scales do not
// give (weight_scales.h), are 0 and infinity.
inline constexpr std::array<Fp8Bytes, 256> kFp8Bytes = [] {
  std::array<Fp8Bytes, 256> tables = {};
  for (int scale = 0; scale < 256; ++scale) {
    for (int bits = 1; bits < 128; ++bits) {
      const int unscaled = bits < 8 ? kE4m3Subnormals[bits] : (bits << 4) + (120 << 7);
      int value = unscaled + (scale - 127) * (1 << 7);
      if (value < 0x80) value = 0;
      if (value > 0x7f80) value = 0x7f80;
      if (bits == 127) value = 0x7fc0;
      Fp8Bytes& table = tables[static_cast<size_t>(scale)];
      table.lows[static_cast<size_t>(bits)] = static_cast<uint8_t>(value & 0xff);
      table.highs[static_cast<size_t>(bits)] = static_cast<uint8_t>(value >> 8);
    }
  }
  return tables;
}();

// x is packed, and `weight` is null.
using Fp8DotArgs = RegisterArgs<uint16_t>;

inline constexpr int32_t kFp8BlockColumns = 64;

// The products of a block with one column of the tile.
template <int kRows>
[[PACELINE_BYTE_DOT_TARGET, gnu::always_inline]] inline void fp8_dot_step(
    const uint16_t* x, int64_t x_stride, const uint8_t* elements, const __m512i (&tables)[4],
    __m512 (&acc)[kRows]) {
  // Interleaving takes eight bytes of each sixteen: first those of the first half of the block.
  const __m512i halves = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  const __m512i bits = _mm512_maskz_permutexvar_epi64(0xff, halves, _mm512_loadu_si512(elements));
  const __m512i low = _mm512_permutex2var_epi8(tables[0], bits, tables[1]);
  const __m512i magnitude = _mm512_permutex2var_epi8(tables[2], bits, tables[3]);
  constexpr int kWithSign = 0xf8;  // a | (b & c)
  const __m512i high = _mm512_ternarylogic_epi32(
      magnitude, bits, _mm512_set1_epi8(static_cast<char>(0x80)), kWithSign);
  const auto first = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(low, high));
  const auto second = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(low, high));
  for (int r = 0; r < kRows; ++r) {
    const uint16_t* const its = x + r * x_stride;
    acc[r] = _mm512_dpbf16_ps(acc[r], reinterpret_cast<__m512bh>(_mm512_loadu_si512(its)), first);
    acc[r] =
        _mm512_dpbf16_ps(acc[r], reinterpret_cast<__m512bh>(_mm512_loadu_si512(its + 32)), second);
  }
}

// kIsExact: elements times their scales are multiplied; otherwise scales multiply sums. k, and
// scale_cols below it, are multiples of kFp8BlockColumns.
template <bool kIsExact, int kRows, int kCols>
[[PACELINE_BYTE_DOT_TARGET, gnu::noinline]] void fp8_dot_tile(const Fp8DotArgs& args) {
  const int64_t k = args.k;
  const char* prefetch = args.prefetch;
  __m512 sums[kCols][kRows] = {};
  int64_t begin = 0;
  for (int32_t tile = 0; begin < k; ++tile) {
    const int64_t end = std::min<int64_t>(k, begin + args.scale_cols);
    for (int c = 0; c < kCols; ++c) {
      const float scale = args.scales[c][tile];
      const size_t at = kIsExact ? std::bit_cast<uint32_t>(scale) >> 23 : 127;
      const Fp8Bytes& bytes = kFp8Bytes[at];
      const __m512i tables[4] = {
          _mm512_load_si512(bytes.lows.data()), _mm512_load_si512(bytes.lows.data() + 64),
          _mm512_load_si512(bytes.highs.data()), _mm512_load_si512(bytes.highs.data() + 64)};
      __m512 acc[kRows] = {};
      if (kIsExact) std::copy_n(sums[c], kRows, acc);
      const uint8_t* const elements = args.elements + c * args.row_bytes;
      for (int64_t offset = begin; offset < end; offset += kFp8BlockColumns) {
        __builtin_prefetch(prefetch, 0, 2);
        prefetch += kFp8BlockColumns;
        fp8_dot_step(args.x + offset, args.x_stride, elements + offset, tables, acc);
      }
      for (int r = 0; r < kRows; ++r) {
        sums[c][r] = kIsExact ? acc[r] : _mm512_fmadd_ps(_mm512_set1_ps(scale), acc[r], sums[c][r]);
      }
    }
    begin = end;
  }
  __m512 by_rows[kRows][kCols];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) by_rows[r][c] = sums[c][r];
  }
  store_dots(args, by_rows);
}

}  // namespace paceline

#endif
