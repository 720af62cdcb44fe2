// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tile of a product on the CPU: some rows of x against some rows of W. Both operands are
// contiguous along K, so an output is a dot product: sixteen partial sums, where lane l takes k =
// l, l + 16, l + 32, ... in ascending order (zeros pad the last vector), and then sum_lanes' fixed
// tree. Every tile size below computes exactly that; only the number of outputs computed together
// differs. Hence a row's bits depend on that row alone. On machines with a fused multiply-add,
// every step is one: the compiler contracts x * w + acc, and the test
// Gemm.EveryTileFollowsTheLaneOrder checks it for each tile shape, bit for bit.

#include <algorithm>
#include <cstdint>

#include "base/vector_math.h"

namespace paceline {

// The tile for each instruction set. The registers (32 of 16 floats, 16 of 8, or 16 of 4) must hold
// kRows * kCols accumulators of sixteen floats, kCols vectors of W and one of x.
template <Isa kIsa>
struct TileShape;
template <>
struct TileShape<Isa::kAvx512> {
  static constexpr int kRows = 6;
  static constexpr int kCols = 4;
};
template <>
struct TileShape<Isa::kAvx2> {
  static constexpr int kRows = 3;
  static constexpr int kCols = 2;
};
template <>
struct TileShape<Isa::kBaseline> {
  static constexpr int kRows = 2;
  static constexpr int kCols = 1;
};

inline constexpr int64_t kPrefetchLine = 64;

template <class X, class W>
struct TileArgs {
  const X* x;
  int64_t x_stride;
  const W* weight;  // the tile's first row of W; rows are k apart
  int32_t k;
  const float* bias;  // at the tile's first column, or null
  float* y;
  int64_t y_stride;
  const char* prefetch;  // null: no prefetch
  // Where scales multiply sums: those of each column's row, one for scale_cols columns of K. Each
  // lane is then fma(scale, its sum over those columns, the lane), in ascending order.
  const float* const* scales;
  int32_t scale_cols;  // a multiple of 32, or k
};

// Writes the outputs of row `r` of a tile from their lanes.
template <class Lanes, int kCols, class Args>
[[gnu::always_inline]] inline void store_sums(const Args& args, int r,
                                              const Lanes (&lanes)[kCols]) {
  float* const y = args.y + r * args.y_stride;
  static_assert(kCols <= 4);
  const Sums4 sums = sum_lanes(lanes[0], lanes[1 % kCols], lanes[2 % kCols], lanes[3 % kCols]);
  for (int c = 0; c < kCols; ++c) {
    y[c] = args.bias == nullptr ? sums.sum[c] : sums.sum[c] + args.bias[c];
  }
}

// Adds the products of the last k - offset columns, fewer than 16.
template <class W, class Lanes, int kRows, int kCols>
[[gnu::always_inline]] inline void add_tail(const TileArgs<float, W>& args, int64_t offset,
                                            Lanes (&acc)[kRows][kCols]) {
  const auto tail = static_cast<int32_t>(args.k - offset);
  // GCC contracts only within a basic block. In this straight-line code, unlike in the loop of a
  // kernel, it moved the multiplication of some tiles to another block; the asm statements keep it
  // here.
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      Lanes xv = load_first<Lanes>(args.x + r * args.x_stride + offset, tail);
      Lanes wv = load_first<Lanes>(args.weight + int64_t{c} * args.k + offset, tail);
      asm volatile("" : "+m"(xv), "+m"(wv));
      Lanes sum = acc[r][c] + xv * wv;
      asm volatile("" : "+m"(sum));
      acc[r][c] = sum;
    }
  }
}

// x in float32; W in float32 or bfloat16, which is widened.
template <class W, int kRows, int kCols>
struct TileKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const TileArgs<float, W>* args) {
    const float* const x = args->x;
    const int64_t x_stride = args->x_stride;
    const W* const w = args->weight;
    const int64_t k = args->k;
    Lanes acc[kRows][kCols];
    clear(acc);
    auto step = [&](int64_t offset) __attribute__((always_inline)) {
      Lanes wv[kCols];
      for (int c = 0; c < kCols; ++c) wv[c] = load<Lanes>(w + c * k + offset);
      for (int r = 0; r < kRows; ++r) {
        const Lanes xv = load<Lanes>(x + r * x_stride + offset);
        for (int c = 0; c < kCols; ++c) acc[r][c] += xv * wv[c];
      }
    };
    int64_t offset = 0;
    const char* prefetch = args->prefetch;
    if (prefetch != nullptr) {
      // Prefetches as many bytes as the tile itself reads.
      constexpr int kLines = 32 * sizeof(W) * kCols / kPrefetchLine;
      for (; offset + 32 <= k; offset += 32) {
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(prefetch + i * kPrefetchLine, 0, 2);
        prefetch += kLines * kPrefetchLine;
        step(offset);
        step(offset + 16);
      }
    }
    for (; offset + 16 <= k; offset += 16) step(offset);
    if (offset < k) add_tail<W>(*args, offset, acc);
    for (int r = 0; r < kRows; ++r) store_sums(*args, r, acc[r]);
  }
};

// The same with scales that multiply sums.
template <class W, int kRows, int kCols>
struct ScaledTileKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const TileArgs<float, W>* args) {
    const float* const x = args->x;
    const int64_t x_stride = args->x_stride;
    const W* const w = args->weight;
    const int64_t k = args->k;
    Lanes totals[kRows][kCols];
    clear(totals);
    int64_t offset = 0;
    for (int32_t tile = 0; offset < k; ++tile) {
      const int64_t end = std::min<int64_t>(k, offset + args->scale_cols);
      Lanes acc[kRows][kCols];
      clear(acc);
      for (; offset + 16 <= end; offset += 16) {
        Lanes wv[kCols];
        for (int c = 0; c < kCols; ++c) wv[c] = load<Lanes>(w + c * k + offset);
        for (int r = 0; r < kRows; ++r) {
          const Lanes xv = load<Lanes>(x + r * x_stride + offset);
          for (int c = 0; c < kCols; ++c) acc[r][c] += xv * wv[c];
        }
      }
      if (offset < end) add_tail<W>(*args, offset, acc);
      offset = end;
      for (int c = 0; c < kCols; ++c) {
        const Lanes scale = broadcast<Lanes>(args->scales[c][tile]);
        for (int r = 0; r < kRows; ++r) totals[r][c] += scale * acc[r][c];
      }
    }
    for (int r = 0; r < kRows; ++r) store_sums(*args, r, totals[r]);
  }
};

}  // namespace paceline
