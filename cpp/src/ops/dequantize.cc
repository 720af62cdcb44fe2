// SPDX-License-Identifier: Apache-2.0
#include "ops/dequantize.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <type_traits>

#include "base/check.h"
#include "base/float_types.h"
#include "base/vector_math.h"
#include "ops/dequantize_x86.h"

namespace paceline {
namespace {

using B16 = uint8_t __attribute__((vector_size(16)));
using B16Any = uint8_t __attribute__((vector_size(16), aligned(1), may_alias));
using H16 = uint16_t __attribute__((vector_size(32)));

// One row of a matrix.
struct RowArgs {
  const uint8_t* from;
  const std::byte* scales;         // of the row's tiles: float or, with mxfp4, uint8_t
  const uint8_t* zeros = nullptr;  // with int4: of the row's tiles, or null
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

constexpr int32_t kNibbleColumns = 32;

// 16 bytes of two codes each, the first in the low four bits: one code in each lane.
struct Nibbles {
  [[gnu::always_inline]] explicit Nibbles(const uint8_t* from)
      : low(load_bytes(from) & 0xf), high(load_bytes(from) >> 4) {}

  [[gnu::always_inline]] V16u first() const { return widen(__builtin_shuffle(low, high, kFirst)); }
  [[gnu::always_inline]] V16u second() const {
    return widen(__builtin_shuffle(low, high, kFirst + 8));
  }

  static constexpr B16 kFirst = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  B16 low;
  B16 high;
};

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
  *reinterpret_cast<InMemory<V16>::Bf16s*>(to) =
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
  static_assert(kMxfp4Columns == kNibbleColumns);
  [[gnu::always_inline]] static void run(const RowArgs* args) {
    const auto* const scales = reinterpret_cast<const uint8_t*>(args->scales);
    const uint8_t* const from = args->from;
    Value* const to = static_cast<Value*>(args->to);
    const char* const prefetch = args->prefetch;
    const int32_t num_blocks = args->k / kMxfp4Columns;
    for (int32_t block = 0; block < num_blocks; ++block) {
      if (block % 4 == 0 && prefetch != nullptr) __builtin_prefetch(prefetch + block * 16, 0, 2);
      const Nibbles codes(from + int64_t{block} * 16);
      const uint32_t byte = scales[block];
      const uint32_t scale_bits = byte == 0 ? 1u << 22 : byte == 255 ? 0x7fc00000u : byte << 23;
      const V16 scale = reinterpret_cast<V16>(V16u{} + scale_bits);
      Value* const out = to + int64_t{block} * kMxfp4Columns;
      store_value(out, e2m1_values(codes.first()) * scale);
      store_value(out + 16, e2m1_values(codes.second()) * scale);
    }
  }
};

// Numbers of float16 in the low halves of lanes, as floats. The subnormal ones are 0.5 + mantissa *
// 2^-24, minus 0.5, which computes with no subnormal float.
template <class Register, class Words = typename Unsigned<Register>::Words>
[[gnu::always_inline]] inline Words fp16_values(const Words& halves) {
  const Words magnitude = halves & 0x7fffu;
  const Words normal = (magnitude << 13) + (112u << 23);
  const Register subnormal = reinterpret_cast<Register>(magnitude + 0x3f000000u) - 0.5f;
  using Ints = decltype(subnormal < subnormal);
  const Ints compared = reinterpret_cast<Ints>(magnitude);
  const Words value = compared < 0x400 ? reinterpret_cast<Words>(subnormal) : normal;
  return value | ((halves & 0x8000u) << 16);
}

struct Int4ScalesArgs {
  const uint16_t* from;
  int32_t count;
  bool is_float16;
  float* to;
};

struct Int4Scales {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const Int4ScalesArgs* args) {
    using Register = typename RegisterOf<Lanes>::Type;
    using Words = typename Unsigned<Register>::Words;
    constexpr int32_t kLanes = sizeof(Register) / sizeof(float);
    const auto convert = [&](const uint16_t* from, float* to) __attribute__((always_inline)) {
      const auto& halves = *reinterpret_cast<const typename InMemory<Register>::Bf16s*>(from);
      const Words wide = __builtin_convertvector(halves, Words);
      const Words floats = args->is_float16 ? fp16_values<Register>(wide) : wide << 16;
      store(to, reinterpret_cast<Register>(floats));
    };
    int32_t i = 0;
    for (; i + kLanes <= args->count; i += kLanes) convert(args->from + i, args->to + i);
    if (i == args->count) return;
    const auto rest = static_cast<size_t>(args->count - i);
    uint16_t halves[kLanes] = {};
    float floats[kLanes];
    __builtin_memcpy(halves, args->from + i, rest * sizeof(uint16_t));
    convert(halves, floats);
    __builtin_memcpy(args->to + i, floats, rest * sizeof(float));
  }
};

// To the nearest bfloat16, ties to even; `value` is finite.
[[gnu::always_inline]] inline V16 rounded_to_bf16(const V16& value) {
  const V16u bits = reinterpret_cast<V16u>(value);
  return reinterpret_cast<V16>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

template <class Value>
struct Int4Row {
  [[gnu::always_inline]] static void run(const RowArgs* args) {
    for (int32_t begin = 0, tile = 0; begin < args->k; begin += args->scale_cols, ++tile) {
      const V16 scale = broadcast(reinterpret_cast<const float*>(args->scales)[tile]);
      const V16 zero =
          broadcast(static_cast<float>(args->zeros == nullptr ? kInt4Zero : args->zeros[tile]));
      for (int32_t block = begin; block < begin + args->scale_cols; block += kInt4Columns) {
        if (block % 128 == 0 && args->prefetch != nullptr) {
          __builtin_prefetch(args->prefetch + block / 2, 0, 2);
        }
        const Nibbles codes(args->from + block / 2);
        Value* const out = static_cast<Value*>(args->to) + block;
        const auto store_half = [&](Value* to, const V16u& half) {
          const V16 code = __builtin_convertvector(reinterpret_cast<V16i>(half), V16);
          store_value(to, rounded_to_bf16((code - zero) * scale));
        };
        store_half(out, codes.first());
        store_half(out + 16, codes.second());
      }
    }
  }
};

template <class Value>
struct Nvfp4Row {
  [[gnu::always_inline]] static void run(const RowArgs* args) {
    const auto* const scales = reinterpret_cast<const float*>(args->scales);
    for (int32_t begin = 0; begin < args->k; begin += kNibbleColumns) {
      if (begin % 128 == 0 && args->prefetch != nullptr) {
        __builtin_prefetch(args->prefetch + begin / 2, 0, 2);
      }
      const Nibbles codes(args->from + begin / 2);
      const float* const its = scales + begin / kNvfp4Columns;
      Value* const out = static_cast<Value*>(args->to) + begin;
      store_value(out, rounded_to_bf16(e2m1_values(codes.first()) * broadcast(its[0])));
      store_value(out + 16, rounded_to_bf16(e2m1_values(codes.second()) * broadcast(its[1])));
    }
  }
};

#if defined(__x86_64__)
// The exponent of a scale that the code of dequantize_x86.h takes.
[[nodiscard]] std::optional<int> normal_exponent(float scale) {
  const auto bits = std::bit_cast<uint32_t>(scale);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const bool is_power_of_two = bits << 9 == 0 && bits >> 31 == 0;
  if (!is_power_of_two || exponent < kMinFp8Exponent || exponent > kMaxFp8Exponent) {
    return std::nullopt;
  }
  return exponent;
}

// Returns false where the code of dequantize_x86.h does not take the row.
[[nodiscard]] bool dequantize_row_x86(WeightFormat format, const RowArgs& args) {
  const bool is_avx512 = best_isa() == Isa::kAvx512;
  if (best_isa() == Isa::kBaseline) return false;
  auto* const to = static_cast<uint16_t*>(args.to);
  if (format == WeightFormat::kMxfp4) {
    const auto* const scales = reinterpret_cast<const uint8_t*>(args.scales);
    const auto run = is_avx512 ? mxfp4_row_avx512 : mxfp4_row_avx2;
    run(args.from, scales, to, args.k / kMxfp4Columns, args.prefetch);
    return true;
  }
  if (format == WeightFormat::kNvfp4) {
    const auto run = is_avx512 ? nvfp4_row_avx512 : nvfp4_row_avx2;
    run(args.from, reinterpret_cast<const float*>(args.scales), to, args.k / kNibbleColumns,
        args.prefetch);
    return true;
  }
  if (format == WeightFormat::kInt4) {
    const auto run = is_avx512 ? int4_row_avx512 : int4_row_avx2;
    run(args.from, reinterpret_cast<const float*>(args.scales), args.zeros, to,
        args.k / args.scale_cols, args.scale_cols / kInt4Columns, args.prefetch);
    return true;
  }
  const auto* const scales = reinterpret_cast<const float*>(args.scales);
  const auto run = is_avx512 ? fp8_tile_avx512 : fp8_tile_avx2;
  for (int32_t begin = 0, tile = 0; begin < args.k; begin += args.scale_cols, ++tile) {
    const std::optional<int> exponent = args.is_scaled ? normal_exponent(scales[tile]) : 0;
    if (!exponent) return false;
    run(args.from + begin, to + begin, std::min(args.scale_cols, args.k - begin), *exponent,
        args.prefetch == nullptr ? nullptr : args.prefetch + begin);
  }
  return true;
}
#endif

template <class Value>
void dequantize_row(WeightFormat format, const RowArgs& args) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Value, uint16_t>) {
    if (dequantize_row_x86(format, args)) return;
  }
#endif
  switch (format) {
    case WeightFormat::kPlain:
      break;
    case WeightFormat::kFp8:
      return run_best_isa<Fp8Row<Value>>(&args);
    case WeightFormat::kMxfp4:
      return run_best_isa<Mxfp4Row<Value>>(&args);
    case WeightFormat::kInt4:
      return run_best_isa<Int4Row<Value>>(&args);
    case WeightFormat::kNvfp4:
      return run_best_isa<Nvfp4Row<Value>>(&args);
  }
}

}  // namespace

void int4_scales(const WeightMatrix& weight, int64_t first, int32_t count, float* to) {
  const Int4ScalesArgs args = {.from = reinterpret_cast<const uint16_t*>(weight.scales) + first,
                               .count = count,
                               .is_float16 = weight.scale_dtype == DType::kFloat16,
                               .to = to};
  run_best_isa<Int4Scales>(&args);
}

const float* fp8_scales(const WeightMatrix& weight, int32_t row) {
  const int64_t num_tiles = (weight.k + weight.scale_cols - 1) / weight.scale_cols;
  return reinterpret_cast<const float*>(weight.scales) + row / weight.scale_rows * num_tiles;
}

namespace {

// Rows of int4, whose scales are converted piece by piece.
template <class Value>
void dequantize_int4_row(const WeightMatrix& weight, int32_t row, Value* to, const char* prefetch) {
  constexpr int32_t kPiece = 256;
  const auto num_scales = static_cast<int32_t>(weight.num_scale_cols());
  const auto* const from = reinterpret_cast<const uint8_t*>(weight.data) + row * weight.row_bytes();
  alignas(64) float scales[kPiece];
  for (int32_t tile = 0; tile < num_scales; tile += kPiece) {
    const int32_t count = std::min(kPiece, num_scales - tile);
    const int64_t first = int64_t{row} * num_scales + tile;
    int4_scales(weight, first, count, scales);
    const int64_t begin = int64_t{tile} * weight.scale_cols;
    dequantize_row<Value>(weight.format,
                          {.from = from + begin / 2,
                           .scales = reinterpret_cast<const std::byte*>(scales),
                           .zeros = weight.zeros == nullptr ? nullptr : weight.zeros + first,
                           .k = count * weight.scale_cols,
                           .scale_cols = weight.scale_cols,
                           .to = to + begin,
                           .is_scaled = true,
                           .prefetch = prefetch == nullptr ? nullptr : prefetch + begin / 2});
  }
}

}  // namespace

template <class Value>
void dequantize_rows(const WeightMatrix& weight, int32_t row, int32_t num_rows, Value* to,
                     const std::byte* prefetch) {
  PACELINE_CHECK(weight.format != WeightFormat::kPlain, "plain rows have no scales");
  const bool is_fp8 = weight.format == WeightFormat::kFp8;
  // Of a row, where every row has its own.
  const int64_t scale_bytes = is_fp8 ? 0 : weight.scales_bytes() / std::max(weight.n, 1);
  const int64_t row_bytes = weight.row_bytes();
  for (int32_t i = row; i < row + num_rows; ++i) {
    Value* const its_to = to + int64_t{i - row} * weight.k;
    const char* const its_prefetch =
        prefetch == nullptr ? nullptr
                            : reinterpret_cast<const char*>(prefetch) + (i - row) * row_bytes;
    if (weight.format == WeightFormat::kInt4) {
      dequantize_int4_row(weight, i, its_to, its_prefetch);
      continue;
    }
    dequantize_row<Value>(
        weight.format, {.from = reinterpret_cast<const uint8_t*>(weight.data) + i * row_bytes,
                        .scales = is_fp8 ? reinterpret_cast<const std::byte*>(fp8_scales(weight, i))
                                         : weight.scales + i * scale_bytes,
                        .k = weight.k,
                        .scale_cols = weight.scale_cols,
                        .to = its_to,
                        .is_scaled = has_exact_values(weight),
                        .prefetch = its_prefetch});
  }
}

template void dequantize_rows(const WeightMatrix&, int32_t, int32_t, float*, const std::byte*);
template void dequantize_rows(const WeightMatrix&, int32_t, int32_t, uint16_t*, const std::byte*);

}  // namespace paceline
