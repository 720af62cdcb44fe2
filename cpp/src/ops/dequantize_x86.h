// SPDX-License-Identifier: Apache-2.0
#pragma once

// The dequantisation to bfloat16 for processors with AVX-512 or AVX2. Look-ups take a third to a
// fifth of the time of the general code in dequantize.cc.

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "ops/weight_matrix.h"

namespace paceline {

#define PACELINE_AVX512_TARGET gnu::target("avx512f,avx512bw,avx512dq,avx512vl")

// Without a mask, GCC 12 warns of its own headers.
inline constexpr __mmask32 kAllLanes = 0xffffffffu;

// The sixteen values of an element for each scale, as bfloat16.
using Mxfp4Table = std::array<std::array<uint16_t, 16>, 256>;
alignas(32) inline constexpr Mxfp4Table kMxfp4Table = [] {
  constexpr int kExponents[8] = {0, -1, 0, 0, 1, 1, 2, 2};
  Mxfp4Table table = {};
  for (int scale = 0; scale < 256; ++scale) {
    for (int bits = 0; bits < 16; ++bits) {
      const int magnitude = bits & 7;
      const int exponent = scale + kExponents[magnitude];
      const int mantissa = magnitude < 2 ? 0 : (magnitude & 1) << 6;
      int value = (exponent << 7) + mantissa;
      if (exponent < 1) value = (0x80 + mantissa) >> (1 - exponent);  // subnormal
      if (exponent > 254) value = 0x7f80;
      if (magnitude == 0) value = 0;
      if (scale == 255) value = 0x7fc0;
      table[static_cast<size_t>(scale)][static_cast<size_t>(bits)] =
          static_cast<uint16_t>(value | (bits & 8) << 12);
    }
  }
  return table;
}();

// A row of mxfp4: num_blocks blocks, each with a scale.
[[PACELINE_AVX512_TARGET, gnu::noinline]] inline void mxfp4_row_avx512(const uint8_t* from,
                                                                       const uint8_t* scales,
                                                                       uint16_t* to,
                                                                       int32_t num_blocks,
                                                                       const char* prefetch) {
  for (int32_t block = 0; block < num_blocks; ++block) {
    if (block % 4 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + block * 16, 0, 2);
    const __m512i table = _mm512_maskz_broadcast_i64x4(
        0xff,
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMxfp4Table[scales[block]].data())));
    const __m512i bytes = _mm512_maskz_cvtepu8_epi32(
        0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + int64_t{block} * 16)));
    // The low five bits of a 16-bit lane are the index, of which the table repeats the highest.
    const __m512i index = _mm512_or_si512(bytes, _mm512_maskz_slli_epi32(0xffff, bytes, 12));
    _mm512_storeu_si512(to + int64_t{block} * kMxfp4Columns,
                        _mm512_maskz_permutexvar_epi16(kAllLanes, index, table));
  }
}

// AVX2 looks up bytes: those of the low and those of the high halves of the values.
[[gnu::target("avx2"), gnu::noinline]] inline void mxfp4_row_avx2(const uint8_t* from,
                                                                  const uint8_t* scales,
                                                                  uint16_t* to, int32_t num_blocks,
                                                                  const char* prefetch) {
  const __m128i low_byte = _mm_set1_epi16(0xff);
  const __m128i low_four = _mm_set1_epi8(0xf);
  for (int32_t block = 0; block < num_blocks; ++block) {
    if (block % 4 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + block * 16, 0, 2);
    const auto* const table = reinterpret_cast<const __m128i*>(kMxfp4Table[scales[block]].data());
    const __m128i first = _mm_loadu_si128(table);
    const __m128i second = _mm_loadu_si128(table + 1);
    const __m128i lows =
        _mm_packus_epi16(_mm_and_si128(first, low_byte), _mm_and_si128(second, low_byte));
    const __m128i highs = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    const __m128i bytes =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + int64_t{block} * 16));
    const __m128i even = _mm_and_si128(bytes, low_four);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low_four);
    auto* out = reinterpret_cast<__m128i*>(to + int64_t{block} * kMxfp4Columns);
    for (const __m128i index : {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)}) {
      const __m128i low = _mm_shuffle_epi8(lows, index);
      const __m128i high = _mm_shuffle_epi8(highs, index);
      _mm_storeu_si128(out++, _mm_unpacklo_epi8(low, high));
      _mm_storeu_si128(out++, _mm_unpackhi_epi8(low, high));
    }
  }
}

// code - zero for every zero point and code.
using Int4Differences = std::array<std::array<float, 16>, 16>;
alignas(64) inline constexpr Int4Differences kInt4Differences = [] {
  Int4Differences table = {};
  for (int zero = 0; zero < 16; ++zero) {
    for (int code = 0; code < 16; ++code) {
      table[static_cast<size_t>(zero)][static_cast<size_t>(code)] = static_cast<float>(code - zero);
    }
  }
  return table;
}();

// Sixteen elements times a scale, as bfloat16.
[[PACELINE_AVX512_TARGET, gnu::always_inline]] inline __m256i scaled_elements_avx512(
    const float* elements, float scale) {
  const __m512i values =
      _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(elements), _mm512_set1_ps(scale)));
  // To nearest, ties to even.
  const __m512i odd =
      _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, values, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(_mm512_add_epi32(values, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_srli_epi32(0xffff, rounded, 16));
}

// The sixteen values of a tile of int4, which has one scale and one zero point, twice.
[[PACELINE_AVX512_TARGET, gnu::always_inline]] inline __m512i int4_table_avx512(float scale,
                                                                                int zero) {
  const auto* const differences = kInt4Differences[static_cast<size_t>(zero)].data();
  return _mm512_maskz_broadcast_i64x4(0xff, scaled_elements_avx512(differences, scale));
}

// The thirty-two values of a block, as in mxfp4_row_avx512.
[[PACELINE_AVX512_TARGET, gnu::always_inline]] inline __m512i int4_values_avx512(
    const uint8_t* from, __m512i table) {
  const __m512i bytes =
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m512i index = _mm512_or_si512(bytes, _mm512_maskz_slli_epi32(0xffff, bytes, 12));
  return _mm512_maskz_permutexvar_epi16(kAllLanes, index, table);
}

// A row of int4: num_tiles tiles of `blocks` blocks of kInt4Columns columns. zeros: null, or those
// of the tiles. The values of a tile are computed once and then looked up.
[[PACELINE_AVX512_TARGET, gnu::noinline]] inline void int4_row_avx512(
    const uint8_t* from, const float* scales, const uint8_t* zeros, uint16_t* to, int32_t num_tiles,
    int32_t blocks, const char* prefetch) {
  int32_t at = 0;
  for (int32_t tile = 0; tile < num_tiles; ++tile) {
    const __m512i table =
        int4_table_avx512(scales[tile], zeros == nullptr ? kInt4Zero : zeros[tile]);
    for (const int32_t end = at + blocks; at < end; ++at) {
      if (at % 4 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + at * 16, 0, 2);
      _mm512_storeu_si512(to + int64_t{at} * kInt4Columns,
                          int4_values_avx512(from + int64_t{at} * 16, table));
    }
  }
}

// The low and the high bytes of sixteen values of bfloat16, which AVX2 looks up apart.
struct ValueBytes {
  __m128i lows;
  __m128i highs;
};

// Sixteen elements times a scale.
[[gnu::target("avx2"), gnu::always_inline]] inline ValueBytes scaled_elements_avx2(
    const float* elements, float scale) {
  // Elements i to i + 3 and i + 8 to i + 11, so that packing leaves eight in order in each half.
  const auto upper_halves = [&](int i) __attribute__((target("avx2"), always_inline)) {
    const __m256 eight = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(elements + i)),
                                              _mm_load_ps(elements + i + 8), 1);
    const __m256i values = _mm256_castps_si256(_mm256_mul_ps(eight, _mm256_set1_ps(scale)));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(values, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(values, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_srli_epi32(rounded, 16);
  };
  const __m256i values = _mm256_packus_epi32(upper_halves(0), upper_halves(4));
  const __m256i low_bytes = _mm256_and_si256(values, _mm256_set1_epi16(0xff));
  const __m256i bytes = _mm256_packus_epi16(low_bytes, _mm256_srli_epi16(values, 8));
  const __m128i first = _mm256_castsi256_si128(bytes);
  const __m128i second = _mm256_extracti128_si256(bytes, 1);
  return {.lows = _mm_unpacklo_epi64(first, second), .highs = _mm_unpackhi_epi64(first, second)};
}

[[gnu::target("avx2"), gnu::noinline]] inline void int4_row_avx2(const uint8_t* from,
                                                                 const float* scales,
                                                                 const uint8_t* zeros, uint16_t* to,
                                                                 int32_t num_tiles, int32_t blocks,
                                                                 const char* prefetch) {
  const __m128i low_four = _mm_set1_epi8(0xf);
  int32_t at = 0;
  for (int32_t tile = 0; tile < num_tiles; ++tile) {
    const size_t zero = zeros == nullptr ? kInt4Zero : zeros[tile];
    const float* const differences = kInt4Differences[zero].data();
    const auto [lows, highs] = scaled_elements_avx2(differences, scales[tile]);
    for (const int32_t end = at + blocks; at < end; ++at) {
      if (at % 4 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + at * 16, 0, 2);
      const __m128i bytes =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + int64_t{at} * 16));
      const __m128i even = _mm_and_si128(bytes, low_four);
      const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low_four);
      auto* out = reinterpret_cast<__m128i*>(to + int64_t{at} * kInt4Columns);
      for (const __m128i index : {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)}) {
        const __m128i low = _mm_shuffle_epi8(lows, index);
        const __m128i high = _mm_shuffle_epi8(highs, index);
        _mm_storeu_si128(out++, _mm_unpacklo_epi8(low, high));
        _mm_storeu_si128(out++, _mm_unpackhi_epi8(low, high));
      }
    }
  }
}

// Every element of e2m1.
alignas(64) inline constexpr std::array<float, 16> kE2m1Elements = {
    0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// A row of nvfp4: num_blocks blocks of 2 kNvfp4Columns columns, which have two scales.
[[PACELINE_AVX512_TARGET, gnu::noinline]] inline void nvfp4_row_avx512(const uint8_t* from,
                                                                       const float* scales,
                                                                       uint16_t* to,
                                                                       int32_t num_blocks,
                                                                       const char* prefetch) {
  // Lanes of the second half of a block look their values up in the second half of the table.
  const __m512i four_bits = _mm512_set1_epi16(0xf);
  const __m512i half = _mm512_maskz_set1_epi16(0xffff0000u, 16);
  for (int32_t block = 0; block < num_blocks; ++block) {
    if (block % 4 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + block * 16, 0, 2);
    const float* const elements = kE2m1Elements.data();
    const __m512i table = _mm512_maskz_inserti64x4(
        0xff, _mm512_castsi256_si512(scaled_elements_avx512(elements, scales[2 * block])),
        scaled_elements_avx512(elements, scales[2 * block + 1]), 1);
    const __m512i bytes = _mm512_maskz_cvtepu8_epi32(
        0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + int64_t{block} * 16)));
    const __m512i codes = _mm512_or_si512(bytes, _mm512_maskz_slli_epi32(0xffff, bytes, 12));
    const __m512i index = _mm512_or_si512(_mm512_and_si512(codes, four_bits), half);
    _mm512_storeu_si512(to + int64_t{block} * 2 * kNvfp4Columns,
                        _mm512_maskz_permutexvar_epi16(kAllLanes, index, table));
  }
}

[[gnu::target("avx2"), gnu::noinline]] inline void nvfp4_row_avx2(const uint8_t* from,
                                                                  const float* scales, uint16_t* to,
                                                                  int32_t num_blocks,
                                                                  const char* prefetch) {
  const __m128i low_four = _mm_set1_epi8(0xf);
  for (int32_t tile = 0; tile < 2 * num_blocks; ++tile) {
    if (tile % 8 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + tile * 8, 0, 2);
    const auto [lows, highs] = scaled_elements_avx2(kE2m1Elements.data(), scales[tile]);
    const __m128i bytes =
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + int64_t{tile} * 8));
    const __m128i index = _mm_unpacklo_epi8(_mm_and_si128(bytes, low_four),
                                            _mm_and_si128(_mm_srli_epi16(bytes, 4), low_four));
    const __m128i low = _mm_shuffle_epi8(lows, index);
    const __m128i high = _mm_shuffle_epi8(highs, index);
    auto* const out = reinterpret_cast<__m128i*>(to + int64_t{tile} * kNvfp4Columns);
    _mm_storeu_si128(out, _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi8(low, high));
  }
}

// The exponents of scales whose products with every element of e4m3 but zero and NaN are normal
// bfloat16, as the functions below need it.
inline constexpr int kMinFp8Exponent = -117;
inline constexpr int kMaxFp8Exponent = 119;

// The values of the magnitudes 0 to 7.
inline constexpr uint16_t kE4m3Subnormals[8] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                0x3c00, 0x3c20, 0x3c40, 0x3c60};

// Thirty-two elements of e4m3 times 2^exponent as bfloat16.
[[PACELINE_AVX512_TARGET, gnu::always_inline]] inline __m512i e4m3_times_power(__m512i bits,
                                                                               __m512i offset,
                                                                               __m512i table) {
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_maskz_slli_epi16(kAllLanes, magnitude, 4), offset);
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x78));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
  const __m512i value =
      _mm512_mask_permutexvar_epi16(normal, is_subnormal | is_nan, magnitude, table);
  const __m512i sign = _mm512_and_si512(_mm512_maskz_slli_epi16(kAllLanes, bits, 8),
                                        _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  return _mm512_or_si512(value, sign);
}

[[PACELINE_AVX512_TARGET, gnu::noinline]] inline void fp8_tile_avx512(const uint8_t* from,
                                                                      uint16_t* to, int32_t count,
                                                                      int exponent,
                                                                      const char* prefetch) {
  // The subnormal elements, which their magnitudes select, and NaN, whose magnitude selects
  // lane 31.
  alignas(64) static constexpr std::array<uint16_t, 32> kValues = [] {
    std::array<uint16_t, 32> values = {};
    for (size_t i = 0; i < 8; ++i) values[i] = kE4m3Subnormals[i];
    values[31] = 0x7fc0;
    return values;
  }();
  constexpr __mmask32 kSubnormals = 0xfe;
  const __m512i shift = _mm512_set1_epi16(static_cast<int16_t>(exponent << 7));
  const __m512i offset = _mm512_add_epi16(shift, _mm512_set1_epi16(120 << 7));
  const __m512i values = _mm512_load_si512(kValues.data());
  const __m512i table = _mm512_mask_add_epi16(values, kSubnormals, values, shift);
  int32_t i = 0;
  for (; i + 32 <= count; i += 32) {
    if (i % 64 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + i, 0, 2);
    const __m512i bits = _mm512_maskz_cvtepu8_epi16(
        kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    _mm512_storeu_si512(to + i, e4m3_times_power(bits, offset, table));
  }
  if (i < count) {
    const __mmask32 mask = (1u << (count - i)) - 1;
    const __m512i bits =
        _mm512_maskz_cvtepu8_epi16(kAllLanes, _mm256_maskz_loadu_epi8(mask, from + i));
    _mm512_mask_storeu_epi16(to + i, mask, e4m3_times_power(bits, offset, table));
  }
}

// Sixteen elements, likewise. `table`: the subnormal values times 2^exponent, twice.
[[gnu::target("avx2"), gnu::always_inline]] inline __m256i e4m3_times_power(__m256i bits,
                                                                            __m256i offset,
                                                                            __m256i table) {
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
  const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), offset);
  // The two bytes of an entry: 2 * magnitude and the one after it.
  const __m256i index = _mm256_add_epi16(_mm256_mullo_epi16(magnitude, _mm256_set1_epi16(0x0202)),
                                         _mm256_set1_epi16(0x0100));
  const __m256i is_subnormal = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  __m256i value = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(table, index), is_subnormal);
  value = _mm256_blendv_epi8(value, _mm256_set1_epi16(0x7fc0), is_nan);
  const __m256i sign =
      _mm256_and_si256(_mm256_slli_epi16(bits, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  return _mm256_or_si256(value, sign);
}

[[gnu::target("avx2"), gnu::noinline]] inline void fp8_tile_avx2(const uint8_t* from, uint16_t* to,
                                                                 int32_t count, int exponent,
                                                                 const char* prefetch) {
  alignas(16) uint16_t values[8] = {};
  for (size_t i = 1; i < 8; ++i) {
    values[i] = static_cast<uint16_t>(kE4m3Subnormals[i] + (exponent << 7));
  }
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
  const __m256i offset = _mm256_set1_epi16(static_cast<int16_t>((120 + exponent) << 7));
  const auto convert = [&](const uint8_t* in, uint16_t* out) __attribute__((target("avx2"))) {
    const __m256i bits =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), e4m3_times_power(bits, offset, table));
  };
  int32_t i = 0;
  for (; i + 16 <= count; i += 16) {
    if (i % 64 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + i, 0, 2);
    convert(from + i, to + i);
  }
  if (i < count) {
    uint8_t in[16] = {};
    uint16_t out[16];
    for (int32_t j = 0; j < count - i; ++j) in[j] = from[i + j];
    convert(in, out);
    for (int32_t j = 0; j < count - i; ++j) to[i + j] = out[j];
  }
}

}  // namespace paceline

#endif
