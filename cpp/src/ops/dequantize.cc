// SPDX-License-Identifier: Apache-2.0
#include "ops/dequantize.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <type_traits>

#include "base/check.h"
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
  // kFp8: each tile is row `index` of the tiles of num_rows rows, which are together in `to`.
  int32_t index;
  int32_t num_rows;
  bool is_scaled;  // elements are multiplied by their scales
  const char* prefetch;
};

[[gnu::always_inline]] inline V16u widen(const B16& bytes) {
  return __builtin_convertvector(bytes, V16u);
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
      Value* const to = static_cast<Value*>(args->to) + int64_t{begin} * args->num_rows +
                        int64_t{count} * args->index;
      const V16 scale = broadcast(args->is_scaled ? scales[tile] : 1.0f);
      const char* const prefetch = args->prefetch == nullptr ? nullptr : args->prefetch + begin;
      int32_t i = 0;
      for (; i + 16 <= count; i += 16) {
        if (i % 64 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + i, 0, 2);
        store_value(to + i, e4m3_values(widen(*reinterpret_cast<const B16Any*>(from + i))) * scale);
      }
      if (i < count) {
        uint8_t padded[16] = {};
        for (int32_t j = 0; j < count - i; ++j) padded[j] = from[i + j];
        Value values[16];
        store_value(values, e4m3_values(widen(*reinterpret_cast<const B16Any*>(padded))) * scale);
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
      const B16 bytes = *reinterpret_cast<const B16Any*>(from + int64_t{block} * 16);
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
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl"), gnu::noinline]] void mxfp4_row_avx512(
    const RowArgs& args) {
  const auto* const scales = reinterpret_cast<const uint8_t*>(args.scales);
  const uint8_t* const from = args.from;
  auto* const to = static_cast<uint16_t*>(args.to);
  const char* const prefetch = args.prefetch;
  const int32_t num_blocks = args.k / kMxfp4Columns;
  for (int32_t block = 0; block < num_blocks; ++block) {
    if (block % 4 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + block * 16, 0, 2);
    // Masks that select every lane: without one, GCC 12 warns of its own headers.
    const __m512i table = _mm512_maskz_broadcast_i64x4(
        0xff,
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMxfp4Table[scales[block]].data())));
    const __m512i bytes = _mm512_maskz_cvtepu8_epi32(
        0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + int64_t{block} * 16)));
    // The low five bits of a 16-bit lane are the index, of which the table repeats the highest.
    const __m512i index = _mm512_or_si512(bytes, _mm512_maskz_slli_epi32(0xffff, bytes, 12));
    _mm512_storeu_si512(to + int64_t{block} * kMxfp4Columns,
                        _mm512_maskz_permutexvar_epi16(0xffffffffu, index, table));
  }
}
#endif

template <class Value>
void dequantize_row(WeightFormat format, const RowArgs& args) {
  if (format == WeightFormat::kFp8) return run_best_isa<Fp8Row<Value>>(&args);
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Value, uint16_t>) {
    if (best_isa() == Isa::kAvx512) return mxfp4_row_avx512(args);
  }
#endif
  run_best_isa<Mxfp4Row<Value>>(&args);
}

}  // namespace

float fp8_scale(const WeightMatrix& weight, int32_t row, int32_t tile) {
  const int64_t num_tiles = (weight.k + weight.scale_cols - 1) / weight.scale_cols;
  return reinterpret_cast<const float*>(weight.scales)[row / weight.scale_rows * num_tiles + tile];
}

template <class Value>
void dequantize_rows(const WeightMatrix& weight, int32_t row, int32_t num_rows, Value* to,
                     const std::byte* prefetch) {
  PACELINE_CHECK(weight.format != WeightFormat::kPlain, "plain rows have no scales");
  const bool is_fp8 = weight.format == WeightFormat::kFp8;
  const bool is_exact = has_exact_values(weight);
  const int32_t scale_cols = is_fp8 ? std::min(weight.k, weight.scale_cols) : kMxfp4Columns;
  const int64_t scale_bytes = (weight.k + scale_cols - 1) / scale_cols *
                              static_cast<int64_t>(is_fp8 ? sizeof(float) : sizeof(uint8_t));
  const int64_t row_bytes = weight.row_bytes();
  for (int32_t i = 0; i < num_rows; ++i) {
    const int64_t scale_row = is_fp8 ? (row + i) / weight.scale_rows : row + i;
    dequantize_row<Value>(
        weight.format,
        {.from = reinterpret_cast<const uint8_t*>(weight.data) + (row + i) * row_bytes,
         .scales = weight.scales + scale_row * scale_bytes,
         .k = weight.k,
         .scale_cols = scale_cols,
         .to = is_exact ? to + int64_t{i} * weight.k : to,
         .index = is_exact ? 0 : i,
         .num_rows = is_exact ? 1 : num_rows,
         .is_scaled = is_exact,
         .prefetch = prefetch == nullptr
                         ? nullptr
                         : reinterpret_cast<const char*>(prefetch) + i * row_bytes});
  }
}

template void dequantize_rows(const WeightMatrix&, int32_t, int32_t, float*, const std::byte*);
template void dequantize_rows(const WeightMatrix&, int32_t, int32_t, uint16_t*, const std::byte*);

}  // namespace paceline
