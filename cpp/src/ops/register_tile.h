// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tile of gemm_tile.h for processors with AVX2 and weights of four bits or of bfloat16, which
// become floats in registers: the shortest way there leaves the columns of a run of sixteen in
// another order, so x is brought into that order first, once for all columns of W. The bits are
// those of the other tile on dequantised weights: the same values meet the same lanes in the same
// order.

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/vector_math.h"
#include "ops/dequantize_x86.h"
#include "ops/gemm_tile.h"

#define PACELINE_AVX2_TARGET gnu::target("avx2,fma")

namespace paceline {

// What such a tile takes beside x. `weight` is null, and `prefetch`, that of the elements, is not.
template <class X>
struct RegisterArgs : TileArgs<X, uint16_t> {
  const uint8_t* elements;  // of the tile's first row
  int64_t row_bytes;        // from one row to the next
  int32_t num_groups;       // of scale_cols columns
  // [columns of the tile, num_groups]
  const float* row_scales;       // int4, nvfp4
  const uint8_t* zeros;          // int4
  const uint8_t* row_exponents;  // mxfp4
  int64_t first_group = 0;       // of the tile's first column

  // Makes the next column of the tile the first.
  void step_column() {
    this->y += 1;
    if (this->bias != nullptr) this->bias += 1;
    this->prefetch += row_bytes;
    elements += row_bytes;
    first_group += num_groups;
  }
};

// Sixteen columns.
struct Run {
  __m256 first;
  __m256 second;
};

// A run of bfloat16 as floats: those in the lower, then those in the upper halves of 32 bits.
[[PACELINE_AVX2_TARGET, gnu::always_inline]] inline Run widened(__m256i values) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  return {.first = _mm256_castsi256_ps(_mm256_slli_epi32(values, 16)),
          .second = _mm256_castsi256_ps(_mm256_and_si256(values, upper))};
}

// A source of weights: a Group is what the columns of a group share, and `runs` reads a block of 32
// columns. Lane i of a run has column column_of_lane<kParts>(i).
struct Bf16Source {
  static constexpr int kParts = 2;
  static constexpr int kBlockBytes = 64;
  struct Group {};
  [[PACELINE_AVX2_TARGET, gnu::always_inline]] static Group group(
      const RegisterArgs<float>& /*args*/, int64_t /*at*/) {
    return {};
  }
  [[PACELINE_AVX2_TARGET, gnu::always_inline]] static std::array<Run, 2> runs(
      const Group& /*group*/, const uint8_t* block) {
    const auto* const from = reinterpret_cast<const __m256i*>(block);
    return {widened(_mm256_loadu_si256(from)), widened(_mm256_loadu_si256(from + 1))};
  }
};

// Codes of four bits, by look-ups of the low and of the high bytes of their values.
struct FourBitSource {
  static constexpr int kParts = 4;
  static constexpr int kBlockBytes = 16;
  struct Group {
    __m256i lows;  // twice
    __m256i highs;
  };
  [[PACELINE_AVX2_TARGET, gnu::always_inline]] static std::array<Run, 2> runs(
      const Group& group, const uint8_t* block) {
    const __m128i low_four = _mm_set1_epi8(0xf);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
    const __m128i even = _mm_and_si128(bytes, low_four);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low_four);
    const __m256i index = _mm256_inserti128_si256(_mm256_castsi128_si256(even), odd, 1);
    const __m256i low = _mm256_shuffle_epi8(group.lows, index);
    const __m256i high = _mm256_shuffle_epi8(group.highs, index);
    return {widened(_mm256_unpacklo_epi8(low, high)), widened(_mm256_unpackhi_epi8(low, high))};
  }
};

struct Int4Source : FourBitSource {
  [[PACELINE_AVX2_TARGET, gnu::always_inline]] static Group group(const RegisterArgs<float>& args,
                                                                  int64_t at) {
    const ValueBytes values =
        scaled_elements_avx2(kInt4Differences[args.zeros[at]].data(), args.row_scales[at]);
    return {.lows = _mm256_broadcastsi128_si256(values.lows),
            .highs = _mm256_broadcastsi128_si256(values.highs)};
  }
};

struct Mxfp4Source : FourBitSource {
  struct Bytes {
    alignas(32) std::array<uint8_t, 16> lows;
    std::array<uint8_t, 16> highs;
  };
  static constexpr std::array<Bytes, 256> kBytes = [] {
    std::array<Bytes, 256> bytes = {};
    for (size_t scale = 0; scale < 256; ++scale) {
      for (size_t code = 0; code < 16; ++code) {
        bytes[scale].lows[code] = static_cast<uint8_t>(kMxfp4Table[scale][code] & 0xff);
        bytes[scale].highs[code] = static_cast<uint8_t>(kMxfp4Table[scale][code] >> 8);
      }
    }
    return bytes;
  }();
  [[PACELINE_AVX2_TARGET, gnu::always_inline]] static Group group(const RegisterArgs<float>& args,
                                                                  int64_t at) {
    const Bytes& bytes = kBytes[args.row_exponents[at]];
    const auto twice = [](const std::array<uint8_t, 16>& from)
                           __attribute__((target("avx2,fma"), always_inline)) {
                             return _mm256_broadcastsi128_si256(
                                 _mm_load_si128(reinterpret_cast<const __m128i*>(from.data())));
                           };
    return {.lows = twice(bytes.lows), .highs = twice(bytes.highs)};
  }
};

// Which column of a run a lane has.
template <int kParts>
[[nodiscard]] constexpr int32_t column_of_lane(int32_t lane) {
  return lane % (16 / kParts) * kParts + lane / (16 / kParts);
}

// Brings a row of x into the order of lanes. `order`: that of the columns of W, or null.
template <int kParts>
void order_for_lanes(const float* x, const int32_t* order, int32_t k, float* to) {
  for (int32_t run = 0; run < k; run += 16) {
    for (int32_t lane = 0; lane < 16; ++lane) {
      const int32_t column = run + column_of_lane<kParts>(lane);
      to[run + lane] = x[order == nullptr ? column : order[column]];
    }
  }
}

// x is in the order of lanes, and k is a multiple of 32.
template <class Source, int kRows, int kCols>
[[PACELINE_AVX2_TARGET, gnu::noinline]] void register_tile(const RegisterArgs<float>& args) {
  constexpr int32_t kBlockColumns = 32;
  const int32_t blocks = args.scale_cols / kBlockColumns;
  const int64_t x_stride = args.x_stride;
  Run acc[kCols][kRows];
  for (int c = 0; c < kCols; ++c) {
    for (int r = 0; r < kRows; ++r) acc[c][r] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  }
  const uint8_t* elements = args.elements;
  const float* x = args.x;
  const char* prefetch = args.prefetch;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    typename Source::Group groups[kCols];
    for (int c = 0; c < kCols; ++c) {
      groups[c] = Source::group(args, args.first_group + c * args.num_groups + group);
    }
    for (int32_t block = 0; block < blocks; ++block) {
      __builtin_prefetch(prefetch, 0, 2);
      for (int c = 0; c < kCols; ++c) {
        const std::array<Run, 2> runs = Source::runs(groups[c], elements + c * args.row_bytes);
        for (int half = 0; half < 2; ++half) {
          for (int r = 0; r < kRows; ++r) {
            const float* const from = x + r * x_stride + half * 16;
            Run& sum = acc[c][r];
            sum.first = _mm256_fmadd_ps(_mm256_loadu_ps(from), runs[half].first, sum.first);
            sum.second = _mm256_fmadd_ps(_mm256_loadu_ps(from + 8), runs[half].second, sum.second);
          }
        }
      }
      elements += Source::kBlockBytes;
      prefetch += Source::kBlockBytes * kCols;
      x += kBlockColumns;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    Halves<V8> lanes[kCols];
    for (int c = 0; c < kCols; ++c) {
      float ordered[16];
      float natural[16];
      _mm256_storeu_ps(ordered, acc[c][r].first);
      _mm256_storeu_ps(ordered + 8, acc[c][r].second);
      for (int lane = 0; lane < 16; ++lane) {
        natural[column_of_lane<Source::kParts>(lane)] = ordered[lane];
      }
      lanes[c] = load<Halves<V8>>(natural);
    }
    store_sums(args, r, lanes);
  }
}

}  // namespace paceline

#endif
