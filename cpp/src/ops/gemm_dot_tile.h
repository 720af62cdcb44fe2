// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tile of machines with a bfloat16 dot product. They multiply bfloat16 weights with x rounded
// to bfloat16, as GPUs do: an instruction computes thirty-two products instead of sixteen, and the
// weights need not be widened. This lets a verify window of a few rows keep up with memory. The
// order of a sum is again the same for all tiles: lane l adds the pair k = 2l, 2l + 1 of each run
// of 32, and runs are added in ascending order.

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "base/vector_math.h"
#include "ops/gemm_tile.h"

#define PACELINE_DOT_TARGETS \
  "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512"
#define PACELINE_DOT_TARGET gnu::target(PACELINE_DOT_TARGETS)

namespace paceline {

[[nodiscard]] inline bool has_dot_product() {
  static const bool has_dot = [] {
    __builtin_cpu_init();
    return best_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16") != 0;
  }();
  return has_dot;
}

// Converts a row of x to bfloat16, padded with zeros after K up to a multiple of 32.
[[PACELINE_DOT_TARGET, gnu::noinline]] inline void pack_row(const float* x, int32_t k,
                                                            int32_t padded_k, uint16_t* packed) {
  for (int32_t offset = 0; offset < padded_k; offset += 16) {
    const int32_t left = std::clamp(k - offset, 0, 16);
    const auto mask = static_cast<__mmask16>((1u << left) - 1);
    const __m512 values = _mm512_maskz_loadu_ps(mask, x + offset);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + offset),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
  }
}

// x is packed.
using DotTileArgs = TileArgs<uint16_t, uint16_t>;

// Thirty-two products for every output of the tile. `mask` selects the weights that exist.
template <bool kIsWhole, int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline void dot_step(const DotTileArgs& args,
                                                                 int64_t offset, __mmask32 mask,
                                                                 __m512 (&acc)[kRows][kCols]) {
  __m512bh wv[kCols];
  for (int c = 0; c < kCols; ++c) {
    const uint16_t* const from = args.weight + int64_t{c} * args.k + offset;
    wv[c] = reinterpret_cast<__m512bh>(kIsWhole ? _mm512_loadu_si512(from)
                                                : _mm512_maskz_loadu_epi16(mask, from));
  }
  for (int r = 0; r < kRows; ++r) {
    const auto xv =
        reinterpret_cast<__m512bh>(_mm512_loadu_si512(args.x + r * args.x_stride + offset));
    for (int c = 0; c < kCols; ++c) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], xv, wv[c]);
  }
}

template <int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::always_inline]] inline void store_dots(
    const DotTileArgs& args, const __m512 (&acc)[kRows][kCols]) {
  for (int r = 0; r < kRows; ++r) {
    V16 lanes[kCols];  // copies: references to accumulators would keep all of them in memory
    for (int c = 0; c < kCols; ++c) lanes[c] = reinterpret_cast<V16>(acc[r][c]);
    store_sums(args, r, lanes);
  }
}

template <int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::noinline]] void dot_tile(const DotTileArgs& args) {
  const int64_t k = args.k;
  __m512 acc[kRows][kCols] = {};
  int64_t offset = 0;
  if (args.prefetch != nullptr) {
    const char* prefetch = args.prefetch;
    for (; offset + 32 <= k; offset += 32) {
      for (int c = 0; c < kCols; ++c) __builtin_prefetch(prefetch + c * kPrefetchLine, 0, 2);
      prefetch += kCols * kPrefetchLine;
      dot_step<true>(args, offset, 0, acc);
    }
  }
  for (; offset + 32 <= k; offset += 32) dot_step<true>(args, offset, 0, acc);
  if (offset < k) dot_step<false>(args, offset, (1u << (k - offset)) - 1, acc);
  store_dots(args, acc);
}

// The same with scales that multiply sums.
template <int kRows, int kCols>
[[PACELINE_DOT_TARGET, gnu::noinline]] void scaled_dot_tile(const DotTileArgs& args) {
  const int64_t k = args.k;
  __m512 totals[kRows][kCols] = {};
  int64_t offset = 0;
  for (int32_t tile = 0; offset < k; ++tile) {
    const int64_t end = std::min<int64_t>(k, offset + args.scale_cols);
    __m512 acc[kRows][kCols] = {};
    for (; offset + 32 <= end; offset += 32) dot_step<true>(args, offset, 0, acc);
    if (offset < end) dot_step<false>(args, offset, (1u << (end - offset)) - 1, acc);
    offset = end;
    for (int c = 0; c < kCols; ++c) {
      const __m512 scale = _mm512_set1_ps(args.scales[c][tile]);
      for (int r = 0; r < kRows; ++r) {
        totals[r][c] = _mm512_fmadd_ps(scale, acc[r][c], totals[r][c]);
      }
    }
  }
  store_dots(args, totals);
}

}  // namespace paceline

#endif
