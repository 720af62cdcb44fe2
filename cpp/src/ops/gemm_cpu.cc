// SPDX-License-Identifier: Apache-2.0
//
// y = x W^T on the CPU. Both operands are contiguous along K, so an output is a dot product:
// sixteen partial sums, where lane l takes k = l, l + 16, l + 32, ... in ascending order (zeros pad
// the last vector), and then sum_lanes' fixed tree. Every tile size below computes exactly that;
// only the number of outputs computed together differs. Hence a row's bits depend on that row
// alone. On machines with a fused multiply-add, every step is one: the compiler contracts x * w +
// acc, and the test Gemm.EveryTileFollowsTheLaneOrder checks it for each tile shape, bit for bit.
//
// With few rows the product is bound by reading W. A tile takes kCols rows of W (contiguous memory)
// against up to kRows rows of x. While it computes, it prefetches rows of W some KiB ahead into L2
// as one linear stream: the hardware prefetcher restarts at each of the kCols short streams and at
// each page, and alone leaves a third of the bandwidth unused.
//
// K is not blocked: x is cut into blocks of rows that fit L2 together with two tiles of W.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/ops.h"

namespace paceline {
namespace {

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

constexpr int64_t kPrefetchLine = 64;
constexpr int64_t kPrefetchBytes = 8 << 10;  // minimum; at least one tile is prefetched

struct TileArgs {
  const float* x;
  int64_t x_stride;
  const void* weight;  // the tile's first row of W
  int32_t k;
  const float* bias;  // at the tile's first column, or null
  float* y;
  int64_t y_stride;
  const char* prefetch;  // null: no prefetch
};

template <class Weight, int kRows, int kCols>
struct TileKernel {
  [[gnu::always_inline]] static void run(const TileArgs* args) {
    const float* const x = args->x;
    const int64_t x_stride = args->x_stride;
    const Weight* const w = static_cast<const Weight*>(args->weight);
    const int64_t k = args->k;
    V16 acc[kRows][kCols] = {};
    auto step = [&](int64_t offset) __attribute__((always_inline)) {
      V16 wv[kCols];
      for (int c = 0; c < kCols; ++c) wv[c] = load(w + c * k + offset);
      for (int r = 0; r < kRows; ++r) {
        const V16 xv = load(x + r * x_stride + offset);
        for (int c = 0; c < kCols; ++c) acc[r][c] += xv * wv[c];
      }
    };
    int64_t offset = 0;
    const char* prefetch = args->prefetch;
    if (prefetch != nullptr) {
      // Prefetches as many bytes as the tile itself reads.
      constexpr int kLines = 32 * sizeof(Weight) * kCols / kPrefetchLine;
      for (; offset + 32 <= k; offset += 32) {
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(prefetch + i * kPrefetchLine, 0, 2);
        prefetch += kLines * kPrefetchLine;
        step(offset);
        step(offset + 16);
      }
    }
    for (; offset + 16 <= k; offset += 16) step(offset);
    if (offset < k) {
      const int32_t tail = static_cast<int32_t>(k - offset);
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kCols; ++c) {
          V16 xv = load_first(x + r * x_stride + offset, tail);
          V16 wv = load_first(w + c * k + offset, tail);
          // GCC contracts only within a basic block. In this straight-line code, unlike in the loop
          // above, it moved the multiplication of some tiles to another block; the asm statements
          // keep it here.
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
  constexpr int64_t kBlockBytes = 512 << 10;  // bytes of x; half of a common L2
  const int64_t fitting_rows = kBlockBytes / (int64_t{p.weight.k} * 4) / kMaxRows * kMaxRows;
  const int32_t block_rows = static_cast<int32_t>(
      std::clamp<int64_t>(fitting_rows, kMaxRows, std::max(num_rows, kMaxRows)));
  const Weight* const weight = reinterpret_cast<const Weight*>(p.weight.data);
  // Number of columns between the tile and its prefetch: enough to hide the latency of memory.
  const int64_t column_bytes = int64_t{p.weight.k} * static_cast<int64_t>(sizeof(Weight));
  const int32_t ahead = static_cast<int32_t>((kPrefetchBytes + column_bytes * kMaxCols - 1) /
                                             (column_bytes * kMaxCols)) *
                        kMaxCols;
  for (int32_t block = 0; block < num_rows; block += block_rows) {
    const int32_t block_end = std::min(num_rows, block + block_rows);
    // Tiles of even size: 8 rows are 4 + 4, not 6 + 2.
    const int32_t num_tiles = (block_end - block + kMaxRows - 1) / kMaxRows;
    for (int32_t column = begin; column < end;) {
      const bool is_wide = column + kMaxCols <= end;
      const int32_t num_columns = is_wide ? kMaxCols : 1;
      int32_t row = block;
      for (int32_t tile = 0; tile < num_tiles; ++tile) {
        const int32_t rows = (block_end - row) / (num_tiles - tile);
        TileArgs args = {.x = static_cast<const float*>(p.x) + row * p.x_stride,
                         .x_stride = p.x_stride,
                         .weight = weight + int64_t{column} * p.weight.k,
                         .k = p.weight.k,
                         .bias = p.bias == nullptr ? nullptr : p.bias + column,
                         .y = static_cast<float*>(p.y) + row * p.y_stride + column,
                         .y_stride = p.y_stride,
                         .prefetch = nullptr};
        if (tile == 0 && column + ahead + kMaxCols <= end) {
          args.prefetch =
              reinterpret_cast<const char*>(weight + (int64_t{column} + ahead) * p.weight.k);
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

#if defined(__x86_64__)
// Machines with a bfloat16 dot product multiply bfloat16 weights with x rounded to bfloat16, as
// GPUs do: an instruction computes thirty-two products instead of sixteen, and the weights need not
// be widened. This lets a verify window of a few rows keep up with memory. The order of a sum is
// again the same for all tiles: lane l adds the pair k = 2l, 2l + 1 of each run of 32, and runs are
// added in ascending order.
#define PACELINE_DOT_TARGET \
  gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")

// Elements of x per thread.
constexpr int64_t kPackedElements = ThreadPool::kScratchBytes / sizeof(uint16_t);

// True only if a whole tile of rows fits the packed block at this depth.
[[nodiscard]] bool uses_dot(const GemmParams& p) {
  static const bool has_dot = [] {
    __builtin_cpu_init();
    return best_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16") != 0;
  }();
  return has_dot && p.weight.dtype == DType::kBFloat16 &&
         (int64_t{p.weight.k} + 31) * TileShape<Isa::kAvx512>::kRows <= kPackedElements;
}

// Converts rows of x to bfloat16, padded with zeros behind K up to a multiple of 32.
[[PACELINE_DOT_TARGET, gnu::noinline]] void pack_rows(const float* x, int64_t x_stride,
                                                      int32_t num_rows, int32_t k, int32_t padded_k,
                                                      uint16_t* packed) {
  for (int32_t r = 0; r < num_rows; ++r, x += x_stride, packed += padded_k) {
    for (int32_t offset = 0; offset < padded_k; offset += 16) {
      const int32_t left = std::clamp(k - offset, 0, 16);
      const auto mask = static_cast<__mmask16>((1u << left) - 1);
      const __m512 values = _mm512_maskz_loadu_ps(mask, x + offset);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + offset),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
    }
  }
}

struct DotTileArgs {
  const uint16_t* x;  // packed, rows padded_k apart
  int32_t padded_k;
  const uint16_t* weight;  // the tile's first row of W
  int32_t k;
  const float* bias;  // at the tile's first column, or null
  float* y;
  int64_t y_stride;
  const char* prefetch;  // null: no prefetch
};

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
    const auto xv = reinterpret_cast<__m512bh>(
        _mm512_loadu_si512(args.x + int64_t{r} * args.padded_k + offset));
    for (int c = 0; c < kCols; ++c) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], xv, wv[c]);
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
  for (int r = 0; r < kRows; ++r) {
    float* const y = args.y + r * args.y_stride;
    for (int c = 0; c < kCols; ++c) {
      // A copy: a reference to an accumulator would keep all of them in memory.
      const V16 lanes = reinterpret_cast<V16>(acc[r][c]);
      const float sum = sum_lanes(lanes);
      y[c] = args.bias == nullptr ? sum : sum + args.bias[c];
    }
  }
}

template <int kCols>
void run_dot_tile(int32_t rows, const DotTileArgs& args) {
  switch (rows) {
    case 1:
      return dot_tile<1, kCols>(args);
    case 2:
      return dot_tile<2, kCols>(args);
    case 3:
      return dot_tile<3, kCols>(args);
    case 4:
      return dot_tile<4, kCols>(args);
    case 5:
      return dot_tile<5, kCols>(args);
    case 6:
      return dot_tile<6, kCols>(args);
  }
}

// Columns [begin, end) of all rows, like run_columns. `packed` [kPackedElements] is this thread's.
void run_columns_dot(const GemmParams& p, int32_t num_rows, int32_t begin, int32_t end,
                     uint16_t* packed) {
  constexpr int32_t kMaxRows = TileShape<Isa::kAvx512>::kRows;
  constexpr int32_t kMaxCols = TileShape<Isa::kAvx512>::kCols;
  const int32_t padded_k = (p.weight.k + 31) / 32 * 32;
  const auto block_rows = static_cast<int32_t>(kPackedElements / padded_k / kMaxRows * kMaxRows);
  const auto* const weight = reinterpret_cast<const uint16_t*>(p.weight.data);
  const int64_t tile_bytes = int64_t{p.weight.k} * 2 * kMaxCols;
  const auto ahead =
      static_cast<int32_t>((kPrefetchBytes + tile_bytes - 1) / tile_bytes) * kMaxCols;
  for (int32_t block = 0; block < num_rows; block += block_rows) {
    const int32_t block_end = std::min(num_rows, block + block_rows);
    pack_rows(static_cast<const float*>(p.x) + block * p.x_stride, p.x_stride, block_end - block,
              p.weight.k, padded_k, packed);
    const int32_t num_tiles = (block_end - block + kMaxRows - 1) / kMaxRows;
    for (int32_t column = begin; column < end;) {
      const bool is_wide = column + kMaxCols <= end;
      int32_t row = block;
      for (int32_t tile = 0; tile < num_tiles; ++tile) {
        const int32_t rows = (block_end - row) / (num_tiles - tile);
        DotTileArgs args = {.x = packed + int64_t{row - block} * padded_k,
                            .padded_k = padded_k,
                            .weight = weight + int64_t{column} * p.weight.k,
                            .k = p.weight.k,
                            .bias = p.bias == nullptr ? nullptr : p.bias + column,
                            .y = static_cast<float*>(p.y) + row * p.y_stride + column,
                            .y_stride = p.y_stride,
                            .prefetch = nullptr};
        if (tile == 0 && column + ahead + kMaxCols <= end) {
          args.prefetch =
              reinterpret_cast<const char*>(weight + (int64_t{column} + ahead) * p.weight.k);
        }
        is_wide ? run_dot_tile<kMaxCols>(rows, args) : run_dot_tile<1>(rows, args);
        row += rows;
      }
      column += is_wide ? kMaxCols : 1;
    }
  }
}
#endif

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
  PACELINE_CHECK(p.weight.dtype == DType::kFloat32 || p.weight.dtype == DType::kBFloat16,
                 "gemm weights are float32 or bfloat16");
  PACELINE_CHECK(p.x_dtype == DType::kFloat32 && p.y_dtype == DType::kFloat32,
                 "the CPU computes in float32");
  const RunColumns run_plain =
      p.weight.dtype == DType::kFloat32 ? choose_isa<float>() : choose_isa<uint16_t>();
#if defined(__x86_64__)
  const bool is_dot = uses_dot(p);
  // A context without a pool is one of tests and tools.
  std::vector<std::byte> own(is_dot && ctx.threads == nullptr ? ThreadPool::kScratchBytes : 0);
#endif
  const auto run = [&](int64_t begin, int64_t end) {
    const auto first = static_cast<int32_t>(begin);
    const auto last = static_cast<int32_t>(end);
#if defined(__x86_64__)
    if (is_dot) {
      std::byte* const scratch = ctx.threads == nullptr ? own.data() : ctx.threads->scratch();
      run_columns_dot(p, num_rows, first, last, reinterpret_cast<uint16_t*>(scratch));
      return;
    }
#endif
    run_plain(p, num_rows, first, last);
  };
  // Fewer multiplications cost less than a fork and join.
  constexpr int64_t kMinParallelWork = 100 << 10;
  if (ctx.num_threads == 1 || int64_t{num_rows} * p.weight.n * p.weight.k < kMinParallelWork) {
    run(0, p.weight.n);
    return;
  }
  // Pieces are whole multiples of 16 columns, so that no two threads write the same cache line of
  // y. Each thread has a few pieces, so that an interrupted thread does not delay the others.
  constexpr int64_t kGrain = 16;
  // Splitting a shorter stream costs more than it evens out.
  constexpr int64_t kMinSplitBytes = 4 << 20;
  const int64_t num_grains = (p.weight.n + kGrain - 1) / kGrain;
  const int64_t thread_bytes =
      int64_t{p.weight.n} * p.weight.k * dtype_bytes(p.weight.dtype) / ctx.num_threads;
  const int32_t pieces_per_thread = thread_bytes >= kMinSplitBytes ? 4 : 1;
  ctx.for_ranges(num_grains, pieces_per_thread, [&](int64_t begin, int64_t end) {
    run(begin * kGrain, std::min<int64_t>(end * kGrain, p.weight.n));
  });
}

}  // namespace paceline
