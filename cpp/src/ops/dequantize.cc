// SPDX-License-Identifier: Apache-2.0
#include "ops/dequantize.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <type_traits>

#include "base/check.h"
#include "base/float_types.h"
#include "base/vector_math.h"

namespace paceline {
namespace {

using B16 = uint8_t __attribute__((vector_size(16)));
using B16Any = uint8_t __attribute__((vector_size(16), aligned(1), may_alias));
using H16 = uint16_t __attribute__((vector_size(32)));

// One row of a matrix.
struct RowArgs {
  const uint8_t* from;
  const std::byte* scales;  // of the row's tiles: float or, with mxfp4, uint8_t
  int32_t k;
  int32_t scale_cols;
  void* to;
  bool is_scaled;  // elements are multiplied by their scales
  const char* prefetch;
};

[[gnu::always_inline]] inline B16 load_bytes(const uint8_t* from) {
  return *reinterpret_cast<const B16Any*>(from);
}

// In two steps, because GCC 12 converts from 8 to 32 bits element by element.
[[gnu::always_inline]] inline V16u widen(const B16& bytes) {
  return __builtin_convertvector(__builtin_convertvector(bytes, H16), V16u);
}

// The vector code of e4m3_to_float and e2m1_to_float: one element in each lane.
[[gnu::always_inline]] inline V16 e4m3_values(const V16u& bits) {
  const V16u magnitude = bits & 0x7fu;
  const V16u normal = (magnitude << 20) + (120u << 23);
  // 2^14 + mantissa * 2^-9, minus 2^14.
  const V16 subnormal = reinterpret_cast<V16>(magnitude + 0x46800000u) - 0x1p14f;
  const V16i compared = reinterpret_cast<V16i>(magnitude);
  V16u value = compared < 8 ? reinterpret_cast<V16u>(subnormal) : normal;
  value = compared == 0x7f ? V16u{} + 0x7fc00000u : value;
  return reinterpret_cast<V16>(value | ((bits & 0x80u) << 24));
}

[[gnu::always_inline]] inline V16 e2m1_values(const V16u& bits) {
  const V16u magnitude = bits & 7u;
  const V16i compared = reinterpret_cast<V16i>(magnitude);
  const V16u normal = (magnitude << 22) + (126u << 23);
  V16u value = compared == 1 ? V16u{} + (126u << 23) : normal;  // a half
  value = compared == 0 ? V16u{} : value;
  return reinterpret_cast<V16>(value | ((bits & 8u) << 28));
}

// `value` must be a bfloat16 where a bfloat16 is stored.
[[gnu::always_inline]] inline void store_value(float* to, const V16& value) { store(to, value); }
[[gnu::always_inline]] inline void store_value(uint16_t* to, const V16& value) {
  *reinterpret_cast<H16Any*>(to) =
      __builtin_convertvector(reinterpret_cast<V16u>(value) >> 16, H16);
}

template <class Value>
struct Fp8Row {
  [[gnu::always_inline]] static void run(const RowArgs* args) {
    const auto* const scales = reinterpret_cast<const float*>(args->scales);
    for (int32_t begin = 0, tile = 0; begin < args->k; begin += args->scale_cols, ++tile) {
      const int32_t count = std::min(args->scale_cols, args->k - begin);
      const uint8_t* const from = args->from + begin;
      Value* const to = static_cast<Value*>(args->to) + begin;
      const V16 scale = broadcast(args->is_scaled ? scales[tile] : 1.0f);
      const char* const prefetch = args->prefetch == nullptr ? nullptr : args->prefetch + begin;
      int32_t i = 0;
      for (; i + 16 <= count; i += 16) {
        if (i % 64 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + i, 0, 2);
        store_value(to + i, e4m3_values(widen(load_bytes(from + i))) * scale);
      }
      if (i < count) {
        uint8_t padded[16] = {};
        for (int32_t j = 0; j < count - i; ++j) padded[j] = from[i + j];
        Value values[16];
        store_value(values, e4m3_values(widen(load_bytes(padded))) * scale);
        for (int32_t j = 0; j < count - i; ++j) to[i + j] = values[j];
      }
    }
  }
};

template <class Value>
struct Mxfp4Row {
  [[gnu::always_inline]] static void run(const RowArgs* args) {
    const auto* const scales = reinterpret_cast<const uint8_t*>(args->scales);
    const uint8_t* const from = args->from;
    Value* const to = static_cast<Value*>(args->to);
    const char* const prefetch = args->prefetch;
    const int32_t num_blocks = args->k / kMxfp4Columns;
    for (int32_t block = 0; block < num_blocks; ++block) {
      if (block % 4 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + block * 16, 0, 2);
      const B16 bytes = load_bytes(from + int64_t{block} * 16);
      const B16 low = bytes & 0xf;
      const B16 high = bytes >> 4;
      constexpr B16 kFirst = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
      constexpr B16 kSecond = kFirst + 8;
      const uint32_t byte = scales[block];
      const uint32_t scale_bits = byte == 0 ? 1u << 22 : byte == 255 ? 0x7fc00000u : byte << 23;
      const V16 scale = reinterpret_cast<V16>(V16u{} + scale_bits);
      Value* const out = to + int64_t{block} * kMxfp4Columns;
      store_value(out, e2m1_values(widen(__builtin_shuffle(low, high, kFirst))) * scale);
      store_value(out + 16, e2m1_values(widen(__builtin_shuffle(low, high, kSecond))) * scale);
    }
  }
};

#if defined(__x86_64__)
#define PACELINE_AVX512_TARGET gnu::target("avx512f,avx512bw,avx512dq,avx512vl")

// Without a mask, GCC 12 warns of its own headers.
constexpr __mmask32 kAllLanes = 0xffffffffu;

// The sixteen values of an element for each scale, as bfloat16.
using Mxfp4Table = std::array<std::array<uint16_t, 16>, 256>;
constexpr Mxfp4Table kMxfp4Table = [] {
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

// A look-up in the scale's table takes a third of the instructions of Mxfp4Row.
[[PACELINE_AVX512_TARGET, gnu::noinline]] void mxfp4_row_avx512(const RowArgs& args) {
  const auto* const scales = reinterpret_cast<const uint8_t*>(args.scales);
  const uint8_t* const from = args.from;
  auto* const to = static_cast<uint16_t*>(args.to);
  const char* const prefetch = args.prefetch;
  const int32_t num_blocks = args.k / kMxfp4Columns;
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

// The exponents of scales whose products with every element but zero and NaN are normal bfloat16.
constexpr int kMinExponent = -117;
constexpr int kMaxExponent = 119;

// The exponent of a scale of Fp8Row that is such a power of two.
[[nodiscard]] std::optional<int> normal_exponent(float scale) {
  const auto bits = std::bit_cast<uint32_t>(scale);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const bool is_power_of_two = bits << 9 == 0 && bits >> 31 == 0;
  if (!is_power_of_two || exponent < kMinExponent || exponent > kMaxExponent) return std::nullopt;
  return exponent;
}

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

[[PACELINE_AVX512_TARGET, gnu::noinline]] void fp8_tile_avx512(const uint8_t* from, uint16_t* to,
                                                               int32_t count, int exponent,
                                                               const char* prefetch) {
  // The subnormal elements, which magnitudes 0 to 7 select, and NaN, of which the magnitude selects
  // lane 31.
  alignas(64) static constexpr uint16_t kValues[32] = {
      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, 0, 0, 0, 0, 0, 0, 0, 0,
      0, 0,      0,      0,      0,      0,      0,      0,      0, 0, 0, 0, 0, 0, 0, 0x7fc0};
  constexpr __mmask32 kSubnormals = 0xfe;
  const __m512i shift = _mm512_set1_epi16(static_cast<int16_t>(exponent << 7));
  const __m512i offset = _mm512_add_epi16(shift, _mm512_set1_epi16(120 << 7));
  const __m512i values = _mm512_load_si512(kValues);
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

// Whether all scales of the row are powers of two that fp8_tile_avx512 takes.
[[nodiscard]] bool fp8_row_avx512(const RowArgs& args) {
  const auto* const scales = reinterpret_cast<const float*>(args.scales);
  for (int32_t begin = 0, tile = 0; begin < args.k; begin += args.scale_cols, ++tile) {
    const std::optional<int> exponent = args.is_scaled ? normal_exponent(scales[tile]) : 0;
    if (!exponent) return false;
    const int32_t count = std::min(args.scale_cols, args.k - begin);
    fp8_tile_avx512(args.from + begin, static_cast<uint16_t*>(args.to) + begin, count, *exponent,
                    args.prefetch == nullptr ? nullptr : args.prefetch + begin);
  }
  return true;
}
#endif

template <class Value>
void dequantize_row(WeightFormat format, const RowArgs& args) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Value, uint16_t>) {
    if (best_isa() == Isa::kAvx512) {
      if (format == WeightFormat::kMxfp4) return mxfp4_row_avx512(args);
      if (fp8_row_avx512(args)) return;
    }
  }
#endif
  if (format == WeightFormat::kFp8) return run_best_isa<Fp8Row<Value>>(&args);
  run_best_isa<Mxfp4Row<Value>>(&args);
}

}  // namespace

const float* fp8_scales(const WeightMatrix& weight, int32_t row) {
  const int64_t num_tiles = (weight.k + weight.scale_cols - 1) / weight.scale_cols;
  return reinterpret_cast<const float*>(weight.scales) + row / weight.scale_rows * num_tiles;
}

template <class Value>
void dequantize_rows(const WeightMatrix& weight, int32_t row, int32_t num_rows, Value* to,
                     const std::byte* prefetch) {
  PACELINE_CHECK(weight.format != WeightFormat::kPlain, "plain rows have no scales");
  const bool is_fp8 = weight.format == WeightFormat::kFp8;
  const int64_t row_bytes = weight.row_bytes();
  for (int32_t i = row; i < row + num_rows; ++i) {
    dequantize_row<Value>(
        weight.format, {.from = reinterpret_cast<const uint8_t*>(weight.data) + i * row_bytes,
                        .scales = is_fp8 ? reinterpret_cast<const std::byte*>(fp8_scales(weight, i))
                                         : weight.scales + i * int64_t{weight.k / kMxfp4Columns},
                        .k = weight.k,
                        .scale_cols = weight.scale_cols,
                        .to = to + int64_t{i - row} * weight.k,
                        .is_scaled = has_exact_values(weight),
                        .prefetch = prefetch == nullptr ? nullptr
                                                        : reinterpret_cast<const char*>(prefetch) +
                                                              (i - row) * row_bytes});
  }
}

template void dequantize_rows(const WeightMatrix&, int32_t, int32_t, float*, const std::byte*);
template void dequantize_rows(const WeightMatrix&, int32_t, int32_t, uint16_t*, const std::byte*);

}  // namespace paceline
