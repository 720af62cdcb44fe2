// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches a product with a given tile, and estimates the cost of a tile.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "common/launch.cuh"
#include "gemm/gemm_kernel.cuh"
#include "gemm/tensor_map.h"
#include "ops/ops.h"

namespace paceline::cuda {

inline constexpr int32_t kMaxSharedBytes = 226 << 10;  // of 227 KB; barriers take their share
inline constexpr int32_t kMaxRingBytes = kMaxSharedBytes - 1024;

template <class Tile>
int64_t num_tiles(int32_t n, int32_t rows) {
  return int64_t{(n + Tile::kWeights - 1) / Tile::kWeights} *
         ((rows + Tile::kTokens - 1) / Tile::kTokens);
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

// With an activation, y is that of the product (ActivatedGemmParams). With a residual, y is added
// to it (AddedGemmParams).
template <class Out, class Tile>
void launch_tile(CudaContext& ctx, const GemmParams& p, int32_t ring_bytes,
                 const ProductEnd& end = {}) {
  const GatedActivationParams* const activation = end.activation;
  auto* const kernel = &gemm_kernel<Out, Tile>;
  static const bool is_allowed = [&] {
    allow_shared_bytes(kernel, kMaxSharedBytes, "gemm");
    return true;
  }();
  static_cast<void>(is_allowed);
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
  const GemmArgs args = {
      .num_rows = p.num_rows,
      .max_rows = p.max_rows,
      .bias = p.bias,
      .y = is_gated ? activation->y : p.y,
      .y_stride = is_gated ? n : p.y_stride,
      .n = n,
      .k = p.weight.k,
      .num_stages = num_stages,
      .stage_bytes = Tile::kSteps * (Tile::kWeightBytes + block_tokens * Tile::kRowBytes),
      .block_tokens = block_tokens,
      .gated = is_gated ? GatedRows{.up_row = n,
                                    .activation = activation->activation,
                                    .alpha = activation->alpha,
                                    .limit = activation->limit}
                        : GatedRows{},
      .residual = end.residual};
  const int32_t tile_columns = is_gated ? Tile::kWeights / 2 : Tile::kWeights;
  const dim3 grid((p.max_rows + block_tokens - 1) / block_tokens,
                  (n + tile_columns - 1) / tile_columns);
  launch(ctx, "gemm", kernel, grid, dim3(Tile::kThreads), shared_bytes,
         tensor_map(p.weight.data, p.weight.n, p.weight.k, p.weight.k, tile_columns),
         tensor_map(p.x, p.max_rows, p.weight.k, p.x_stride, block_tokens), args);
}

}  // namespace paceline::cuda
