// SPDX-License-Identifier: Apache-2.0
//
// y = x W^T on the CPU. Both operands have K contiguous, so an output is a dot product: sixteen
// partial sums, lane l taking k = l, l + 16, l + 32, ... in ascending order (a ragged end is padded
// with zeros), then sum_lanes' fixed tree. Every tile size below computes exactly that, hence a
// row's bits depend on that row alone; only the number of outputs in flight differs. Where the
// machine has it every step is a fused multiply-add; the compiler contracts x * w + acc, and
// Gemm.EveryTileFollowsTheLaneOrder holds each tile shape to that, bit for bit.
//
// Skinny shapes are bound by reading W. A tile takes kCols rows of W (contiguous memory) against up
// to kRows rows of x, and while it computes it prefetches rows of W some KiB ahead into L2 as one
// linear stream: the hardware prefetcher restarts at each of the kCols short streams and at each
// page, which alone leaves a third of the bandwidth unused.
//
// No K blocking: x is cut into blocks of rows that stay in L2 together with two tiles of W.

#include <algorithm>

#include "base/check.h"
#include "device/cpu_context.h"
#include "ops/ops.h"
#include "ops/vector_math.h"

namespace paceline {
namespace {

// Tile per instruction set: kRows * kCols accumulators of sixteen floats, kCols of W and one of x
// must fit the registers (32 of 16 floats, 16 of 8, 16 of 4).
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

constexpr int64_t kPrefetchLine = 64;
constexpr int64_t kPrefetchBytes = 8 << 10;  // at least; a tile's worth where that is more

struct TileArgs {
  const float* x;
  int64_t x_stride;
  const void* weight;  // first of the tile's rows
  int32_t k;
  const float* bias;   // of the tile's first column, or null
  float* y;
  int64_t y_stride;
  const char* prefetch;    // null: none
};

template <class Weight, int kRows, int kCols>
struct TileKernel {
  [[gnu::always_inline]] static void run(const TileArgs* args) {
    const float* const x = args->x;
    const int64_t x_stride = args->x_stride;
    const Weight* const w = static_cast<const Weight*>(args->weight);
    const int64_t k = args->k;
    V16 acc[kRows][kCols] = {};
    auto step = [&](int64_t at) __attribute__((always_inline)) {
      V16 wv[kCols];
      for (int c = 0; c < kCols; ++c) wv[c] = load(w + c * k + at);
      for (int r = 0; r < kRows; ++r) {
        const V16 xv = load(x + r * x_stride + at);
        for (int c = 0; c < kCols; ++c) acc[r][c] += xv * wv[c];
      }
    };
    int64_t at = 0;
    const char* prefetch = args->prefetch;
    if (prefetch != nullptr) {
      // As many bytes as the tile itself reads.
      constexpr int kLines = 32 * sizeof(Weight) * kCols / kPrefetchLine;
      for (; at + 32 <= k; at += 32) {
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(prefetch + i * kPrefetchLine, 0, 2);
        prefetch += kLines * kPrefetchLine;
        step(at);
        step(at + 16);
      }
    }
    for (; at + 16 <= k; at += 16) step(at);
    if (at < k) {
      const int32_t tail = static_cast<int32_t>(k - at);
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kCols; ++c) {
          V16 xv = load_first(x + r * x_stride + at, tail);
          V16 wv = load_first(w + c * k + at, tail);
          // GCC contracts only within a basic block, and in straight-line code, unlike in the loop
          // above, it moved the multiplication of some tiles to another: pinned on both sides.
          asm volatile("" : "+m"(xv), "+m"(wv));
          V16 sum = acc[r][c] + xv * wv;
          asm volatile("" : "+m"(sum));
          acc[r][c] = sum;
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float* const y = args->y + r * args->y_stride;
      if constexpr (kCols == 4) {
        const Sums4 sums = sum_lanes(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
        for (int c = 0; c < 4; ++c) {
          y[c] = args->bias == nullptr ? sums.sum[c] : sums.sum[c] + args->bias[c];
        }
      } else {
        for (int c = 0; c < kCols; ++c) {
          const float sum = sum_lanes(acc[r][c]);
          y[c] = args->bias == nullptr ? sum : sum + args->bias[c];
        }
      }
    }
  }
};

template <class Weight, Isa kIsa, int kCols>
void run_tile(int32_t rows, const TileArgs& args) {
  auto run = [&]<int kRows>() {
    if constexpr (kRows <= TileShape<kIsa>::kRows) {
      Compiled<TileKernel<Weight, kRows, kCols>, kIsa>::run(&args);
    }
  };
  switch (rows) {
    case 1:
      return run.template operator()<1>();
    case 2:
      return run.template operator()<2>();
    case 3:
      return run.template operator()<3>();
    case 4:
      return run.template operator()<4>();
    case 5:
      return run.template operator()<5>();
    case 6:
      return run.template operator()<6>();
  }
}

// Columns [begin, end) of all rows.
template <class Weight, Isa kIsa>
void run_columns(const GemmParams& p, int32_t num_rows, int32_t begin, int32_t end) {
  constexpr int32_t kMaxRows = TileShape<kIsa>::kRows;
  constexpr int32_t kMaxCols = TileShape<kIsa>::kCols;
  constexpr int64_t kBlockBytes = 512 << 10;  // of x; half of a common L2
  const int64_t fitting_rows = kBlockBytes / (int64_t{p.k} * 4) / kMaxRows * kMaxRows;
  const int32_t block_rows = static_cast<int32_t>(
      std::clamp<int64_t>(fitting_rows, kMaxRows, std::max(num_rows, kMaxRows)));
  const Weight* const weight = static_cast<const Weight*>(p.weight);
  // Columns that the prefetch runs ahead: far enough to hide the latency of memory.
  const int64_t column_bytes = int64_t{p.k} * static_cast<int64_t>(sizeof(Weight));
  const int32_t ahead = static_cast<int32_t>((kPrefetchBytes + column_bytes * kMaxCols - 1) /
                                             (column_bytes * kMaxCols)) *
                        kMaxCols;
  for (int32_t block = 0; block < num_rows; block += block_rows) {
    const int32_t block_end = std::min(num_rows, block + block_rows);
    // Even tiles: 8 rows are 4 + 4, not 6 + 2.
    const int32_t num_tiles = (block_end - block + kMaxRows - 1) / kMaxRows;
    for (int32_t column = begin; column < end;) {
      const bool is_wide = column + kMaxCols <= end;
      const int32_t num_columns = is_wide ? kMaxCols : 1;
      int32_t row = block;
      for (int32_t tile = 0; tile < num_tiles; ++tile) {
        const int32_t rows = (block_end - row) / (num_tiles - tile);
        TileArgs args = {.x = p.x + row * p.x_stride,
                         .x_stride = p.x_stride,
                         .weight = weight + int64_t{column} * p.k,
                         .k = p.k,
                         .bias = p.bias == nullptr ? nullptr : p.bias + column,
                         .y = p.y + row * p.y_stride + column,
                         .y_stride = p.y_stride,
                         .prefetch = nullptr};
        if (tile == 0 && column + ahead + kMaxCols <= end) {
          args.prefetch = reinterpret_cast<const char*>(weight + (int64_t{column} + ahead) * p.k);
        }
        if (is_wide) {
          run_tile<Weight, kIsa, kMaxCols>(rows, args);
        } else {
          run_tile<Weight, kIsa, 1>(rows, args);
        }
        row += rows;
      }
      column += num_columns;
    }
  }
}

using RunColumns = void (*)(const GemmParams&, int32_t, int32_t, int32_t);

template <class Weight>
RunColumns choose_isa() {
  switch (best_isa()) {
    case Isa::kAvx512:
      return &run_columns<Weight, Isa::kAvx512>;
    case Isa::kAvx2:
      return &run_columns<Weight, Isa::kAvx2>;
    case Isa::kBaseline:
      break;
  }
  return &run_columns<Weight, Isa::kBaseline>;
}

}  // namespace

void gemm(CpuContext& ctx, const GemmParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  if (num_rows <= 0) return;
  PACELINE_CHECK(p.weight_dtype == DType::kFloat32 || p.weight_dtype == DType::kBFloat16,
                 "gemm weights are float32 or bfloat16");
  const RunColumns run =
      p.weight_dtype == DType::kFloat32 ? choose_isa<float>() : choose_isa<uint16_t>();
  constexpr int64_t kMinParallelWork = 100 << 10;  // multiplications that outweigh a fork and join
  if (ctx.num_threads == 1 || int64_t{num_rows} * p.n * p.k < kMinParallelWork) {
    run(p, num_rows, 0, p.n);
    return;
  }
  // Whole multiples of 16 columns, so that no two threads write one cache line of y. A few pieces
  // for each thread, so that one that was interrupted does not hold up the rest.
  constexpr int64_t kGrain = 16;
  constexpr int64_t kMinSplitBytes = 4 << 20;  // breaking a shorter stream costs more than it evens out
  const int64_t num_grains = (p.n + kGrain - 1) / kGrain;
  const int64_t thread_bytes =
      int64_t{p.n} * p.k * dtype_bytes(p.weight_dtype) / ctx.num_threads;
  const int32_t pieces_per_thread = thread_bytes >= kMinSplitBytes ? 4 : 1;
  ctx.for_ranges(num_grains, pieces_per_thread, [&](int64_t begin, int64_t end) {
    run(p, num_rows, static_cast<int32_t>(begin * kGrain),
        static_cast<int32_t>(std::min<int64_t>(end * kGrain, p.n)));
  });
}

}  // namespace paceline
