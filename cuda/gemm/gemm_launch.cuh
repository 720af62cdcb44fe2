// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches a product with a given tile, and estimates the cost of a tile.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "base/check.h"
#include "common/launch.cuh"
#include "gemm/gemm_kernel.cuh"
#include "gemm/stage_boxes.h"
#include "gemm/tensor_map.h"
#include "ops/ops.h"

namespace paceline::cuda {

inline constexpr int32_t kMaxSharedBytes = 226 << 10;  // of 227 KB; barriers take their share
inline constexpr int32_t kMaxRingBytes = kMaxSharedBytes - 1024;

// 64 * groups rows of weights by some tokens, and the other way round.
template <int32_t groups, int32_t tokens, int32_t steps = 1>
using WeightRows = Tile<RowsAre::kWeights, groups, tokens, steps>;
template <int32_t groups, int32_t weights, int32_t steps = 1>
using TokenRows = Tile<RowsAre::kTokens, groups, weights, steps>;
// Fewer weights than a warpgroup multiplies.
template <int32_t weights, int32_t tokens = 16>
using ThinRows = Tile<RowsAre::kWeights, 1, tokens, tokens <= 16 ? 4 : 2, 16, weights>;

template <class Tile>
int64_t num_tiles(int32_t n, int32_t rows) {
  return int64_t{(n + Tile::kWeights - 1) / Tile::kWeights} *
         ((rows + Tile::kTokens - 1) / Tile::kTokens);
}

// The number of tiles that the busiest SM computes.
template <class Tile>
int64_t num_waves(const CudaContext& ctx, const GemmParams& p) {
  return (num_tiles<Tile>(p.weight.n, p.max_rows) + ctx.num_sms - 1) / ctx.num_sms;
}

// Clocks that an SM spends on a tile for each column of K: the tensor cores multiply 2,048 pairs
// per clock; shared memory moves 128 bytes per clock. It moves both operands once on their way in,
// and for every 64 rows it moves these rows and all columns to the tensor cores.
template <class Tile>
constexpr double clocks_per_depth() {
  const double products = Tile::kRows * Tile::kColumns / 2048.0;
  const double values =
      Tile::kRows + Tile::kColumns + Tile::kGroups * (Tile::kGroupRows + Tile::kColumns);
  return std::max(products, values * 2 / 128.0);
}

// The number of stages of a ring of about `ring_bytes`.
template <class Tile>
int32_t num_stages_of(int32_t ring_bytes) {
  constexpr int32_t kFit = kMaxRingBytes / Tile::kStageBytes;
  return std::clamp(ring_bytes / Tile::kStageBytes, std::min(Tile::kTokens <= 32 ? 3 : 4, kFit),
                    std::min(kMaxStages, kFit));
}

// What a tile's kernel is launched with.
struct TileLaunch {
  GemmArgs args;
  dim3 grid;
  size_t shared_bytes;
  int32_t tile_columns;  // outputs of a tile along n
};

// With an activation, y is that of the product (ActivatedGemmParams). With a residual, y is added
// to it (AddedGemmParams).
template <class Out, class Tile>
TileLaunch tile_launch(const GemmParams& p, int32_t ring_bytes, const ProductEnd& end) {
  const GatedActivationParams* const activation = end.activation;
  constexpr int32_t kStagedBytes = StagedTile<Out, Tile>::kBytes;
  static_assert(kStagedBytes <= kMaxRingBytes);
  const int32_t num_stages = std::max(num_stages_of<Tile>(ring_bytes),
                                      (kStagedBytes + Tile::kStageBytes - 1) / Tile::kStageBytes);
  const auto shared_bytes =
      static_cast<size_t>(num_stages) * Tile::kStageBytes + Tile::kBehindBytes + 1024;
  PACELINE_CHECK(shared_bytes <= kMaxSharedBytes);
  // The tiles share the tokens evenly. Rows of a tile without a token keep stale values in shared
  // memory, which affect only outputs that are not written. Copying out-of-range rows, which arrive
  // as zeros, took longer than copying real ones.
  const bool is_gated = activation != nullptr;
  const int32_t n = is_gated ? activation->intermediate : p.weight.n;
  const int32_t token_tiles = (p.max_rows + Tile::kTokens - 1) / Tile::kTokens;
  const int32_t block_tokens = ((p.max_rows + token_tiles - 1) / token_tiles + 7) / 8 * 8;
  const int32_t tile_columns = is_gated ? Tile::kWeights / 2 : Tile::kWeights;
  const int32_t weight_bytes = Tile::kWeightsArrive ? Tile::kWeightBytes : 0;
  const GemmArgs args = {
      .num_rows = p.num_rows,
      .max_rows = p.max_rows,
      .bias = p.bias,
      .y = is_gated ? activation->y : p.y,
      .y_stride = is_gated ? n : p.y_stride,
      .n = n,
      .k = p.weight.k,
      .num_stages = num_stages,
      .stage_bytes = Tile::kSteps * (weight_bytes + block_tokens * Tile::kRowBytes),
      .block_tokens = block_tokens,
      .copy_steps = copied_steps(p.weight.k, Tile::kSteps),
      .token_step = static_cast<uint32_t>(block_tokens * Tile::kRowBytes / kDescriptorUnit),
      .gated = is_gated ? GatedRows{.up_row = n,
                                    .activation = activation->activation,
                                    .alpha = activation->alpha,
                                    .limit = activation->limit}
                        : GatedRows{},
      .residual = end.residual,
      .delays_successor = p.delays_successor};
  const dim3 grid((p.max_rows + block_tokens - 1) / block_tokens,
                  (n + tile_columns - 1) / tile_columns);
  return {args, grid, shared_bytes, tile_columns};
}

// The map of the weights of tiles of `tile_columns` outputs along n.
inline CUtensorMap weight_map(const WeightMatrix& w, const GemmArgs& args, int32_t tile_columns) {
  if (args.gated.up_row != 0) {
    return stage_map(w.data, pair_boxes(args.gated.up_row, w.k, tile_columns, args.copy_steps));
  }
  return stage_map(w.data, row_boxes(w.n, w.k, w.k, tile_columns, args.copy_steps));
}

inline CUtensorMap token_map(const GemmParams& p, const GemmArgs& args) {
  return stage_map(
      p.x, row_boxes(p.max_rows, p.weight.k, p.x_stride, args.block_tokens, args.copy_steps));
}

// A tile that may compute a product.
struct TileChoice {
  double cost;
  void (*launch)(CudaContext&, const GemmParams&, const ProductEnd&);
};

// Launches the cheapest of several tiles, the first of equals.
inline void launch_cheapest(CudaContext& ctx, const GemmParams& p, const ProductEnd& end,
                            std::initializer_list<TileChoice> choices) {
  const auto cost = [](const TileChoice& choice) { return choice.cost; };
  std::ranges::min_element(choices, {}, cost)->launch(ctx, p, end);
}

template <auto kernel>
void allow_ring() {
  static OncePerDevice allow;
  allow([] { allow_shared_bytes(kernel, kMaxSharedBytes, "gemm"); });
}

template <class Out, class Tile>
void launch_tile(CudaContext& ctx, const GemmParams& p, int32_t ring_bytes,
                 const ProductEnd& end = {}) {
  constexpr auto kernel = &gemm_kernel<Out, Tile>;
  allow_ring<kernel>();
  const TileLaunch tile = tile_launch<Out, Tile>(p, ring_bytes, end);
  launch(ctx, "gemm", kernel, tile.grid, dim3(Tile::kThreads), tile.shared_bytes,
         weight_map(p.weight, tile.args, tile.tile_columns), token_map(p, tile.args), tile.args);
}

}  // namespace paceline::cuda
