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
// same code reads them as it reads a plain W, so that the bits are the same. With few rows of x,
// tiles that dequantise in registers save the detour where the processor allows it.

#include "ops/gemm_columns.h"

#include <algorithm>

#include "base/check.h"
#include "base/vector_math.h"
#include "ops/dequantize.h"
#include "ops/four_bit_dot_tile.h"
#include "ops/fp8_dot_tile.h"
#include "ops/gemm_dot_tile.h"
#include "ops/gemm_tile.h"
#include "ops/register_tile.h"

namespace paceline {
namespace {

constexpr int64_t kPrefetchBytes = 8 << 10;          // minimum; at least one tile is prefetched
constexpr int64_t kBlockBytes = kPlainScratchBytes;  // of x in a block; half of a common L2

// The scratch memory of a thread: converted rows of x, then dequantised rows of W.
constexpr int64_t kWeightScratchBytes = ThreadPool::kScratchBytes - kBlockBytes;
static_assert(kBlockBytes >= int64_t{kMaxScaledColumns} * sizeof(float));
static_assert(kWeightScratchBytes >= int64_t{kMaxScaledColumns} * sizeof(float));

template <class X>
struct BlockOfRows {
  const X* x;
  int64_t stride;
};

[[nodiscard]] const float* row_of(const GemmColumns& p, int32_t row) {
  return p.x + int64_t{p.x_rows == nullptr ? row : p.x_rows[row]} * p.x_stride;
}

// Copies a row of x in the order of the columns of W.
void gather_row(const float* x, const int32_t* order, int32_t k, float* to) {
  for (int32_t i = 0; i < k; ++i) to[i] = x[order[i]];
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
    // Rows that do not fit the scratch memory are read where they are, one by one. Those of a W
    // with an order have a copy, and one of them always fits.
    const bool is_in_place = p.x_rows == nullptr && p.weight.order == nullptr;
    return is_in_place ? std::max(fitting, kMaxRows) : std::max(fitting, 1);
  }
  [[nodiscard]] static BlockOfRows<X> rows(const GemmColumns& p, int32_t first, int32_t count,
                                           std::byte* scratch) {
    const int32_t k = p.weight.k;
    auto* const gathered = reinterpret_cast<float*>(scratch);
    if (p.weight.order != nullptr) {
      for (int32_t i = 0; i < count; ++i) {
        gather_row(row_of(p, first + i), p.weight.order, k, gathered + int64_t{i} * k);
      }
      return {gathered, k};
    }
    if (p.x_rows == nullptr || count == 1) return {row_of(p, first), p.x_stride};
    for (int32_t i = 0; i < count; ++i) {
      std::copy_n(row_of(p, first + i), k, gathered + int64_t{i} * k);
    }
    return {gathered, k};
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
    // Where rows of W will be: they are dequantised later.
    auto* const gathered = reinterpret_cast<float*>(scratch + kBlockBytes);
    for (int32_t i = 0; i < count; ++i) {
      const float* row = row_of(p, first + i);
      if (p.weight.order != nullptr) {
        gather_row(row, p.weight.order, p.weight.k, gathered);
        row = gathered;
      }
      pack_row(row, p.weight.k, padded_k, packed + int64_t{i} * padded_k);
    }
    return {packed, padded_k};
  }
  template <int kRows, int kCols>
  static void run(const TileArgs<X, W>& args) {
    args.scales == nullptr ? dot_tile<kRows, kCols>(args) : scaled_dot_tile<kRows, kCols>(args);
  }
};
#endif

// Calls run.operator()<rows>().
template <class Run>
void with_rows(int32_t rows, const Run& run) {
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

template <class Tiles, int kCols>
void run_tile(int32_t rows, const TileArgs<typename Tiles::X, typename Tiles::W>& args) {
  with_rows(rows, [&]<int kRows>() { Tiles::template run<kRows, kCols>(args); });
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

#if defined(__x86_64__)
// A matrix with scales and at most one tile of rows, with a dot product of bfloat16.
template <WeightFormat kWeightFormat>
struct RegisterDotTiles {
  using X = uint16_t;
  static constexpr WeightFormat kFormat = kWeightFormat;
  static constexpr int32_t kMaxRows = DotTiles::kMaxRows;
  static constexpr int32_t kMaxCols = DotTiles::kMaxCols;

  [[nodiscard]] static bool can_run(const GemmColumns& p) {
    return p.weight.format == kFormat && p.num_rows <= kMaxRows && DotTiles::can_run(p.weight);
  }
  [[nodiscard]] static int32_t block_rows(const GemmColumns& /*p*/) { return kMaxRows; }
  [[nodiscard]] static BlockOfRows<X> rows(const GemmColumns& p, int32_t first, int32_t count,
                                           std::byte* scratch) {
    return DotTiles::rows(p, first, count, scratch);
  }
};

template <WeightFormat kWeightFormat, class Source>
struct FourBitDotTiles : RegisterDotTiles<kWeightFormat> {
  template <int kCols>
  static void run(int32_t rows, const FourBitDotArgs& args) {
    with_rows(rows, [&]<int kRows>() { four_bit_dot_tile<Source, kRows, kCols>(args); });
  }
};
using Int4DotTiles = FourBitDotTiles<WeightFormat::kInt4, Int4DotSource>;
using Mxfp4DotTiles = FourBitDotTiles<WeightFormat::kMxfp4, Mxfp4DotSource>;

struct Nvfp4DotTiles : RegisterDotTiles<WeightFormat::kNvfp4> {
  template <int kCols>
  static void run(int32_t rows, const FourBitDotArgs& args) {
    with_rows(rows, [&]<int kRows>() { nvfp4_dot_tile<kRows, kCols>(args); });
  }
};

template <bool kIsExact>
struct Fp8DotTiles : RegisterDotTiles<WeightFormat::kFp8> {
  [[nodiscard]] static bool can_run(const GemmColumns& p) {
    const WeightMatrix& weight = p.weight;
    return RegisterDotTiles::can_run(p) && has_byte_dot_product() &&
           has_exact_values(weight) == kIsExact && weight.k % kFp8BlockColumns == 0 &&
           (weight.scale_cols % kFp8BlockColumns == 0 || weight.scale_cols >= weight.k);
  }
  template <int kCols>
  static void run(int32_t rows, const Fp8DotArgs& args) {
    with_rows(rows, [&]<int kRows>() { fp8_dot_tile<kIsExact, kRows, kCols>(args); });
  }
};

// A matrix of bfloat16 or four bits, with AVX2. One row has too few sums to wait for, so that it
// takes two columns; more rows with two columns would not fit the registers.
template <WeightFormat kWeightFormat, class Source>
struct RegisterTiles {
  using X = float;
  static constexpr WeightFormat kFormat = kWeightFormat;
  static constexpr int32_t kMaxRows = 6;
  static constexpr int32_t kMaxCols = 2;

  [[nodiscard]] static int32_t block_rows(const GemmColumns& p) {
    return fitting_rows(int64_t{p.weight.k} * int64_t{sizeof(X)}, kMaxRows);
  }
  [[nodiscard]] static bool can_run(const GemmColumns& p) {
    const WeightMatrix& weight = p.weight;
    return best_isa() == Isa::kAvx2 && weight.format == kFormat && weight.k % 32 == 0 &&
           weight.dtype == DType::kBFloat16 && is_faster(p) && block_rows(p) > 0;
  }
  // Than WideningTiles: bringing x into order takes the time of one column, and every tile of rows
  // computes the values of int4 anew, which pays where many columns share them.
  [[nodiscard]] static bool is_faster(const GemmColumns& p) {
    constexpr int32_t kMinSharedColumns = 64;
    const bool has_few_rows = p.num_rows <= TileShape<Isa::kAvx2>::kRows;
    if (kFormat == WeightFormat::kPlain) return !has_few_rows;
    return kFormat == WeightFormat::kMxfp4 || has_few_rows ||
           p.weight.scale_cols >= kMinSharedColumns;
  }
  [[nodiscard]] static BlockOfRows<X> rows(const GemmColumns& p, int32_t first, int32_t count,
                                           std::byte* scratch) {
    const int32_t k = p.weight.k;
    auto* const ordered = reinterpret_cast<float*>(scratch);
    for (int32_t i = 0; i < count; ++i) {
      order_for_lanes<Source::kParts>(row_of(p, first + i), p.weight.order, k,
                                      ordered + int64_t{i} * k);
    }
    return {ordered, k};
  }
  template <int kCols>
  static void run(int32_t rows, RegisterArgs<X> args) {
    if (rows == 1) return register_tile<Source, 1, kCols>(args);
    for (int c = 0; c < kCols; ++c) {
      with_rows(rows, [&]<int kRows>() { register_tile<Source, kRows, 1>(args); });
      args.step_column();
    }
  }
};
using Bf16RegisterTiles = RegisterTiles<WeightFormat::kPlain, Bf16Source>;
using Int4RegisterTiles = RegisterTiles<WeightFormat::kInt4, Int4Source>;
using Mxfp4RegisterTiles = RegisterTiles<WeightFormat::kMxfp4, Mxfp4Source>;

void prefetch_bytes(const void* from, int64_t count) {
  const char* const bytes = static_cast<const char*>(from);
  for (int64_t i = 0; i < count; i += kPrefetchLine) __builtin_prefetch(bytes + i, 0, 2);
}

template <class Tiles>
void run_register_columns(const GemmColumns& p, int32_t begin, int32_t end, std::byte* scratch) {
  constexpr bool kIsInt4 = Tiles::kFormat == WeightFormat::kInt4;
  constexpr bool kIsMxfp4 = Tiles::kFormat == WeightFormat::kMxfp4;
  constexpr bool kIsFp8 = Tiles::kFormat == WeightFormat::kFp8;
  constexpr bool kIsNvfp4 = Tiles::kFormat == WeightFormat::kNvfp4;
  constexpr int64_t kScaleBytes = kIsNvfp4 ? sizeof(float) : kIsInt4 ? sizeof(uint16_t) : 1;
  constexpr int32_t kMaxRows = Tiles::kMaxRows;
  constexpr int32_t kMaxCols = Tiles::kMaxCols;
  const WeightMatrix& weight = p.weight;
  auto* const scales = reinterpret_cast<float*>(scratch + kBlockBytes);
  const int64_t row_bytes = weight.row_bytes();
  const auto num_groups = std::max(static_cast<int32_t>(weight.num_scale_cols()), 1);
  auto* const no_zeros = reinterpret_cast<uint8_t*>(scales + int64_t{kMaxCols} * num_groups);
  const auto ahead =
      static_cast<int32_t>((kPrefetchBytes + row_bytes * kMaxCols - 1) / (row_bytes * kMaxCols)) *
      kMaxCols;
  const int32_t block_rows = Tiles::block_rows(p);
  for (int32_t block = 0; block < p.num_rows; block += block_rows) {
    const int32_t block_end = std::min(p.num_rows, block + block_rows);
    const BlockOfRows<typename Tiles::X> x = Tiles::rows(p, block, block_end - block, scratch);
    if (kIsInt4 && weight.zeros == nullptr) {  // where Tiles::rows may have gathered inputs
      std::fill_n(no_zeros, kMaxCols * num_groups, uint8_t{kInt4Zero});
    }
    const int32_t num_tiles = (block_end - block + kMaxRows - 1) / kMaxRows;
    for (int32_t column = begin; column < end;) {
      const bool is_wide = column + kMaxCols <= end;
      const int32_t num_columns = is_wide ? kMaxCols : 1;
      const int64_t first = int64_t{column} * num_groups;
      const bool has_next = column + ahead + kMaxCols <= end;
      if (has_next && weight.scales != nullptr && !kIsFp8) {  // whose rows share scales
        const int64_t next = first + int64_t{ahead} * num_groups;
        prefetch_bytes(weight.scales + next * kScaleBytes, kMaxCols * num_groups * kScaleBytes);
        if (weight.zeros != nullptr) prefetch_bytes(weight.zeros + next, kMaxCols * num_groups);
      }
      if constexpr (kIsInt4) int4_scales(weight, first, num_columns * num_groups, scales);
      const float* fp8[kMaxCols] = {};
      for (int c = 0; kIsFp8 && c < num_columns; ++c) fp8[c] = fp8_scales(weight, column + c);
      const std::byte* const elements = weight.data + column * row_bytes;
      int32_t row = block;
      for (int32_t tile = 0; tile < num_tiles; ++tile) {
        const int32_t rows = (block_end - row) / (num_tiles - tile);
        const bool prefetches = has_next && tile == 0;
        const RegisterArgs<typename Tiles::X> args = {
            {.x = x.x + (row - block) * x.stride,
             .x_stride = x.stride,
             .weight = nullptr,
             .k = weight.k,
             .bias = p.bias == nullptr ? nullptr : p.bias + column,
             .y = p.y + row * p.y_stride + column,
             .y_stride = p.y_stride,
             .prefetch = reinterpret_cast<const char*>(prefetches ? elements + ahead * row_bytes
                                                                  : elements),
             .scales = kIsFp8 ? fp8 : nullptr,
             .scale_cols = kIsFp8 ? weight.scale_cols : weight.k / num_groups},
            reinterpret_cast<const uint8_t*>(elements),
            row_bytes,
            num_groups,
            kIsNvfp4 ? reinterpret_cast<const float*>(weight.scales) + first : scales,
            weight.zeros == nullptr ? no_zeros : weight.zeros + first,
            kIsMxfp4 ? reinterpret_cast<const uint8_t*>(weight.scales) + first : nullptr};
        is_wide ? Tiles::template run<kMaxCols>(rows, args) : Tiles::template run<1>(rows, args);
        row += rows;
      }
      column += num_columns;
    }
  }
}
#endif

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
  const auto ran = [&]<class Tiles>(Tiles /*tiles*/) {
    if (!Tiles::can_run(p)) return false;
    run_register_columns<Tiles>(p, begin, end, scratch);
    return true;
  };
  if (ran(Int4DotTiles()) || ran(Mxfp4DotTiles()) || ran(Nvfp4DotTiles()) ||
      ran(Fp8DotTiles<true>()) || ran(Fp8DotTiles<false>()) || ran(Bf16RegisterTiles()) ||
      ran(Int4RegisterTiles()) || ran(Mxfp4RegisterTiles())) {
    return;
  }
  if (DotTiles::can_run(weight)) return run_columns<DotTiles>(p, begin, end, scratch);
#endif
  const RunColumns run =
      weight.dtype == DType::kFloat32 ? choose_isa<float>() : choose_isa<uint16_t>();
  run(p, begin, end, scratch);
}

}  // namespace paceline
