// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches a product with a tile of converted_kernel.cuh, and estimates the cost of a tile.

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "device/cuda_context.h"
#include "gemm/converted_kernel.cuh"
#include "gemm/expert_launch.cuh"
#include "gemm/gemm_launch.cuh"

namespace paceline::cuda {

// What bounds a tile, in clocks for each column of K: its products and shared memory, the
// conversion of its weights, and the chain of its sums. The first two add up for the tiles of a
// multiprocessor. Chains of tiles that share it run side by side.
template <class Tile>
double converted_cost(const CudaContext& ctx, const GemmParams& p) {
  constexpr double kInstructions = 150.0 / kPackedColumns;  // of a warp, for 16 weights
  // Per clock: of a warp alone, and of a multiprocessor.
  constexpr double kRate = std::min(0.35 * Tile::kConverters * Tile::kBlocks, 3.2);
  constexpr double kConversion = Tile::kWeights / kPackedRows * kInstructions / kRate;
  constexpr double kBound = std::max(clocks_per_depth<Tile>(), kConversion);
  constexpr double kChain = (16 + Tile::kColumns / 4) / 16.0;
  const int64_t waves = num_waves<Tile>(ctx, p);
  const int64_t rounds = (waves + Tile::kBlocks - 1) / Tile::kBlocks;
  return std::max(static_cast<double>(waves) * kBound, static_cast<double>(rounds) * kChain);
}

// The weights as the kernels get them. Blocks with other tokens read them again.
inline PackedArgs converted_weights(const WeightMatrix& w, bool is_read_again) {
  PackedArgs args = {};
  args.scales = scale_args({.first = w, .num_experts = 1});
  args.int4 = int4_args(w);
  args.data = w.data;
  args.n = w.n;
  args.k = w.k;
  args.weight_policy = is_read_again ? kEvictNormal : kEvictFirst;
  return args;
}

template <class Tile>
void launch_converted_tile(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  constexpr int32_t kRingBytes = (Tile::kBlocks == 1 ? 200 : Tile::kBlocks == 2 ? 100 : 73) << 10;
  constexpr auto kernel = &converted_gemm_kernel<Tile>;
  allow_ring<kernel>();
  const TileLaunch tile = tile_launch<__nv_bfloat16, Tile>(p, kRingBytes, end);
  PACELINE_CHECK(tile.args.num_stages >= Tile::kStageStep);
  launch(ctx, "gemm", kernel, tile.grid, dim3(Tile::kThreads), tile.shared_bytes,
         token_map(p, tile.args), converted_weights(p.weight, tile.grid.x > 1), tile.args);
}

template <class Tile>
TileChoice converted_tile(const CudaContext& ctx, const GemmParams& p) {
  return {converted_cost<Tile>(ctx, p), &launch_converted_tile<Tile>};
}

// Launches the cheapest of several tiles.
template <class... Tiles>
void launch_cheapest_converted(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  launch_cheapest(ctx, p, end, {converted_tile<Tiles>(ctx, p)...});
}

}  // namespace paceline::cuda
