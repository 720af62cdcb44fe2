// SPDX-License-Identifier: Apache-2.0
//
// The loops over the tiles of a product (gemm_tile.h).
//
// With few rows a product is bound by reading W. A tile takes kCols rows of W (contiguous memory)
// against up to kRows rows of x. While it computes, it prefetches rows of W some KiB ahead into L2
// as one linear stream: the hardware prefetcher restarts at each of the kCols short streams and at
// each page, and alone leaves a third of the bandwidth unused.
//
// K is not blocked: x is cut into blocks of rows that fit L2 together with two tiles of W.
//
// Rows of a W with scales are first dequantised into scratch memory, tile by tile. From there the
// same code reads them as it reads a plain W, so that the bits are the same.

#include "ops/gemm_columns.h"

#include <algorithm>

#include "base/check.h"
#include "base/vector_math.h"
#include "ops/dequantize.h"
#include "ops/gemm_dot_tile.h"
#include "ops/gemm_tile.h"

namespace paceline {
namespace {

constexpr int64_t kPrefetchBytes = 8 << 10;          // minimum; at least one tile is prefetched
constexpr int64_t kBlockBytes = kPlainScratchBytes;  // of x in a block; half of a common L2

// The scratch memory of a thread: converted rows of x, then dequantised rows of W.
constexpr int64_t kWeightScratchBytes = ThreadPool::kScratchBytes - kBlockBytes;
static_assert(kWeightScratchBytes >= int64_t{kMaxScaledColumns} * sizeof(float));

template <class X>
struct BlockOfRows {
  const X* x;
  int64_t stride;
};

[[nodiscard]] const float* row_of(const GemmColumns& p, int32_t row) {
  return p.x + int64_t{p.x_rows == nullptr ? row : p.x_rows[row]} * p.x_stride;
}

// Rows of a block: whole tiles of kMaxRows that fit kBlockBytes, or 0 where not even one does.
[[nodiscard]] int32_t fitting_rows(int64_t row_bytes, int32_t kMaxRows) {
  return static_cast<int32_t>(kBlockBytes / row_bytes / kMaxRows * kMaxRows);
}

template <class Weight, Isa kTileIsa>
struct WideningTiles {
  using X = float;
  using W = Weight;
  static constexpr Isa kIsa = kTileIsa;
  static constexpr int32_t kMaxRows = TileShape<kIsa>::kRows;
  static constexpr int32_t kMaxCols = TileShape<kIsa>::kCols;

  [[nodiscard]] static int32_t block_rows(const GemmColumns& p) {
    const int32_t fitting = fitting_rows(int64_t{p.weight.k} * 4, kMaxRows);
    // Rows that do not fit the scratch memory are read where they are, one by one.
    return p.x_rows == nullptr ? std::max(fitting, kMaxRows) : std::max(fitting, 1);
  }
  [[nodiscard]] static BlockOfRows<X> rows(const GemmColumns& p, int32_t first, int32_t count,
                                           std::byte* scratch) {
    if (p.x_rows == nullptr || count == 1) return {row_of(p, first), p.x_stride};
    auto* const gathered = reinterpret_cast<float*>(scratch);
    for (int32_t i = 0; i < count; ++i) {
      std::copy_n(row_of(p, first + i), p.weight.k, gathered + int64_t{i} * p.weight.k);
    }
    return {gathered, p.weight.k};
  }
  template <int kRows, int kCols>
  static void run(const TileArgs<X, W>& args) {
    if constexpr (kRows <= kMaxRows) {
      if (args.scales == nullptr) return Compiled<TileKernel<W, kRows, kCols>, kIsa>::run(&args);
      Compiled<ScaledTileKernel<W, kRows, kCols>, kIsa>::run(&args);
    }
  }
};

#if defined(__x86_64__)
struct DotTiles {
  using X = uint16_t;
  using W = uint16_t;
  static constexpr Isa kIsa = Isa::kAvx512;
  static constexpr int32_t kMaxRows = TileShape<kIsa>::kRows;
  static constexpr int32_t kMaxCols = TileShape<kIsa>::kCols;

  [[nodiscard]] static int32_t padded(int32_t k) { return (k + 31) / 32 * 32; }
  [[nodiscard]] static int32_t block_rows(const GemmColumns& p) {
    return fitting_rows(int64_t{padded(p.weight.k)} * 2, kMaxRows);
  }
  // True only if a whole tile of rows fits a block at this depth.
  [[nodiscard]] static bool can_run(const WeightMatrix& weight) {
    return has_dot_product() && weight.dtype == DType::kBFloat16 &&
           (int64_t{weight.k} + 31) * kMaxRows * 2 <= kBlockBytes;
  }
  [[nodiscard]] static BlockOfRows<X> rows(const GemmColumns& p, int32_t first, int32_t count,
                                           std::byte* scratch) {
    auto* const packed = reinterpret_cast<uint16_t*>(scratch);
    const int32_t padded_k = padded(p.weight.k);
    for (int32_t i = 0; i < count; ++i) {
      pack_row(row_of(p, first + i), p.weight.k, padded_k, packed + int64_t{i} * padded_k);
    }
    return {packed, padded_k};
  }
  template <int kRows, int kCols>
  static void run(const TileArgs<X, W>& args) {
    args.scales == nullptr ? dot_tile<kRows, kCols>(args) : scaled_dot_tile<kRows, kCols>(args);
  }
};
#endif

template <class Tiles, int kCols>
void run_tile(int32_t rows, const TileArgs<typename Tiles::X, typename Tiles::W>& args) {
  switch (rows) {
    case 1:
      return Tiles::template run<1, kCols>(args);
    case 2:
      return Tiles::template run<2, kCols>(args);
    case 3:
      return Tiles::template run<3, kCols>(args);
    case 4:
      return Tiles::template run<4, kCols>(args);
    case 5:
      return Tiles::template run<5, kCols>(args);
    case 6:
      return Tiles::template run<6, kCols>(args);
  }
}

template <class Tiles>
void run_columns(const GemmColumns& p, int32_t begin, int32_t end, std::byte* scratch) {
  using W = typename Tiles::W;
  constexpr int32_t kMaxRows = Tiles::kMaxRows;
  constexpr int32_t kMaxCols = Tiles::kMaxCols;
  const WeightMatrix& weight = p.weight;
  const bool is_plain = weight.format == WeightFormat::kPlain;
  const bool has_values = has_exact_values(weight);
  auto* const dequantized = reinterpret_cast<W*>(scratch + kBlockBytes);
  const bool fits_wide =
      is_plain || int64_t{weight.k} * kMaxCols * int64_t{sizeof(W)} <= kWeightScratchBytes;
  // Number of columns between the tile and its prefetch: enough to hide the latency of memory.
  const int64_t row_bytes = weight.row_bytes();
  const auto ahead =
      static_cast<int32_t>((kPrefetchBytes + row_bytes * kMaxCols - 1) / (row_bytes * kMaxCols)) *
      kMaxCols;
  const int32_t block_rows = Tiles::block_rows(p);
  for (int32_t block = 0; block < p.num_rows; block += block_rows) {
    const int32_t block_end = std::min(p.num_rows, block + block_rows);
    const auto x = Tiles::rows(p, block, block_end - block, scratch);
    // Tiles of even size: 8 rows are 4 + 4, not 6 + 2.
    const int32_t num_tiles = (block_end - block + kMaxRows - 1) / kMaxRows;
    for (int32_t column = begin; column < end;) {
      const bool is_wide = fits_wide && column + kMaxCols <= end;
      const int32_t num_columns = is_wide ? kMaxCols : 1;
      const std::byte* const data = weight.data + column * row_bytes;
      const std::byte* prefetch =
          column + ahead + kMaxCols <= end ? data + ahead * row_bytes : nullptr;
      const W* tile_weight = reinterpret_cast<const W*>(data);
      if (!is_plain) {
        dequantize_rows(weight, column, num_columns, dequantized, prefetch);
        tile_weight = dequantized;
        prefetch = nullptr;
      }
      const float* scales[kMaxCols];
      for (int32_t c = 0; c < num_columns && !has_values; ++c)
        scales[c] = fp8_scales(weight, column + c);
      int32_t row = block;
      for (int32_t tile = 0; tile < num_tiles; ++tile) {
        const int32_t rows = (block_end - row) / (num_tiles - tile);
        const TileArgs<typename Tiles::X, W> args = {
            .x = x.x + (row - block) * x.stride,
            .x_stride = x.stride,
            .weight = tile_weight,
            .k = weight.k,
            .bias = p.bias == nullptr ? nullptr : p.bias + column,
            .y = p.y + row * p.y_stride + column,
            .y_stride = p.y_stride,
            .prefetch = tile == 0 ? reinterpret_cast<const char*>(prefetch) : nullptr,
            .scales = has_values ? nullptr : scales,
            .scale_cols = weight.scale_cols};
        is_wide ? run_tile<Tiles, kMaxCols>(rows, args) : run_tile<Tiles, 1>(rows, args);
        row += rows;
      }
      column += num_columns;
    }
  }
}

using RunColumns = void (*)(const GemmColumns&, int32_t, int32_t, std::byte*);

template <class Weight>
[[nodiscard]] RunColumns choose_isa() {
  switch (best_isa()) {
    case Isa::kAvx512:
      return &run_columns<WideningTiles<Weight, Isa::kAvx512>>;
    case Isa::kAvx2:
      return &run_columns<WideningTiles<Weight, Isa::kAvx2>>;
    case Isa::kBaseline:
      break;
  }
  return &run_columns<WideningTiles<Weight, Isa::kBaseline>>;
}

}  // namespace

GemmScratch::GemmScratch(const CpuContext& ctx) : threads_(ctx.threads) {
  if (threads_ == nullptr) {
    own_ = std::make_unique_for_overwrite<std::byte[]>(ThreadPool::kScratchBytes);
  }
}

void gemm_columns(const GemmColumns& p, int32_t begin, int32_t end, std::byte* scratch) {
  const WeightMatrix& weight = p.weight;
  PACELINE_CHECK(weight.dtype == DType::kFloat32 || weight.dtype == DType::kBFloat16,
                 "products multiply values of float32 or bfloat16");
  PACELINE_CHECK(weight.format == WeightFormat::kPlain || weight.k <= kMaxScaledColumns,
                 "k = ", weight.k);
#if defined(__x86_64__)
  if (DotTiles::can_run(weight)) return run_columns<DotTiles>(p, begin, end, scratch);
#endif
  const RunColumns run =
      weight.dtype == DType::kFloat32 ? choose_isa<float>() : choose_isa<uint16_t>();
  run(p, begin, end, scratch);
}

}  // namespace paceline
