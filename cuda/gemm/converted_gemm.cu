// SPDX-License-Identifier: Apache-2.0

// Chooses the tile by which sm_90a computes a product of packed int4 weights. The kernels are in
// converted_kernel.cuh and register_kernel.cuh.

#include "gemm/converted_gemm.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "device/cuda_context.h"
#include "gemm/converted_kernel.cuh"
#include "gemm/expert_launch.cuh"
#include "gemm/gemm_launch.cuh"
#include "gemm/register_kernel.cuh"

namespace paceline::cuda {
namespace {

// A tile, the warps that convert its weights, the row tiles and units ahead of each, the blocks of
// a multiprocessor.
template <class Base, int32_t converters, int32_t ahead, int32_t blocks = 1>
using Converted = ConvertedTile<Base, converters, 1, ahead, blocks>;

using Thin16 = Converted<ThinRows<16>, 12, 2>;
using Thin32 = Converted<ThinRows<32>, 12, 3>;
using Thin48 = Converted<ThinRows<48>, 12, 3>;
// The narrowest tile of many.
using Narrow = Converted<WeightRows<1, 16, 2>, 4, 3, 3>;

// What bounds a tile, in clocks for each column of K: its products and shared memory, the
// conversion of its weights, and the chain of its sums. The first two add up for the tiles of a
// multiprocessor. Chains of tiles that share it run side by side.
template <class Tile>
double cost_of(const CudaContext& ctx, const GemmParams& p) {
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
PackedArgs weight_args(const WeightMatrix& w, bool is_read_again) {
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
         token_map(p, tile.args), weight_args(p.weight, tile.grid.x > 1), tile.args);
}

// Blocks of 256 columns of the tokens.
template <class Tile>
int32_t num_token_blocks(const GemmParams& p) {
  constexpr int32_t kColumns = Tile::kSteps * Tile::kDepth;
  return (p.weight.k + kColumns - 1) / kColumns;
}

// Eight row tiles a block take two thirds of the time of twelve; two tiles of tokens take a seventh
// more than one.
template <class Tile>
double register_cost(const CudaContext& ctx, const GemmParams& p) {
  const int32_t num_blocks = num_token_blocks<Tile>(p);
  if (num_blocks > kMaxTokenBlocks || Tile::shared_bytes(num_blocks) > kMaxSharedBytes) {
    return std::numeric_limits<double>::infinity();
  }
  constexpr double kClocks =
      (Tile::kRowTiles == 8 ? 4.5 : 6.5) * (Tile::kTokenTiles == 1 ? 1 : 1.14);
  return kClocks * static_cast<double>(num_waves<Tile>(ctx, p));
}

template <class Tile>
void launch_register_tile(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  constexpr auto kernel = &register_gemm_kernel<Tile>;
  allow_ring<kernel>();
  const TileLaunch tile = tile_launch<__nv_bfloat16, Tile>(p, /*ring_bytes=*/0, end);
  // The kernel knows where each step of the tokens lies.
  PACELINE_CHECK(tile.args.block_tokens == Tile::kTokens);
  launch(ctx, "gemm", kernel, tile.grid, dim3(Tile::kThreads),
         static_cast<size_t>(Tile::shared_bytes(num_token_blocks<Tile>(p))),
         token_map(p, tile.args), weight_args(p.weight, /*is_read_again=*/false), tile.args);
}

template <class... Tiles>
TileChoice cheapest_register_tile(const CudaContext& ctx, const GemmParams& p) {
  const auto cost = [](const TileChoice& choice) { return choice.cost; };
  return std::ranges::min(
      {TileChoice{register_cost<Tiles>(ctx, p), &launch_register_tile<Tiles>}...}, {}, cost);
}

// The cheapest tile of at most 16 tokens whose weights are converted in registers. Twelve row tiles
// by 16 tokens need more registers than there are.
TileChoice register_tile(const CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows > 8) return cheapest_register_tile<RegisterTile<8, 2>>(ctx, p);
  return cheapest_register_tile<RegisterTile<8, 1>, RegisterTile<12, 1>>(ctx, p);
}

template <class Tile>
TileChoice converted_tile(const CudaContext& ctx, const GemmParams& p) {
  return {cost_of<Tile>(ctx, p), &launch_converted_tile<Tile>};
}

template <class... Tiles>
void launch_cheapest_of(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  launch_cheapest(ctx, p, end, {converted_tile<Tiles>(ctx, p)...});
}

}  // namespace

bool takes_converted(const CudaContext& ctx, const GemmParams& p) {
  const WeightMatrix& w = p.weight;
  return !ctx.is_portable && w.format == WeightFormat::kInt4 && w.is_packed() &&
         w.dtype == DType::kBFloat16 && p.y_dtype == DType::kBFloat16 && w.order == nullptr &&
         p.num_groups == 1 && w.k % 8 == 0 && p.x_stride % 8 == 0;
}

// Tiles of up to 16 tokens add to a residual; wider ones are not among those of so few rows.
void launch_converted(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  if (p.max_rows <= 16) {
    const TileChoice in_registers = register_tile(ctx, p);
    const TileChoice narrow = converted_tile<Narrow>(ctx, p);
    if (end.activation != nullptr) return launch_cheapest(ctx, p, end, {narrow, in_registers});
    launch_cheapest(ctx, p, end,
                    {converted_tile<Thin16>(ctx, p), converted_tile<Thin32>(ctx, p),
                     converted_tile<Thin48>(ctx, p), narrow, in_registers});
  } else if (p.max_rows <= 64) {
    launch_cheapest_of<Converted<TokenRows<1, 32, 2>, 12, 3>, Converted<TokenRows<1, 48, 2>, 12, 3>,
                       Converted<TokenRows<1, 96, 2>, 12, 2>>(ctx, p, end);
  } else {
    launch_cheapest_of<Converted<WeightRows<1, 128, 2>, 12, 3>,
                       Converted<TokenRows<2, 96, 2>, 12, 2>>(ctx, p, end);
  }
}

bool takes_converted_activation(const CudaContext& ctx, const GemmParams& p) {
  return p.max_rows <= 16 && p.weight.n / 2 % kPackedRows == 0 &&
         (num_waves<Narrow>(ctx, p) <= 3 || register_tile(ctx, p).cost <= cost_of<Narrow>(ctx, p));
}

}  // namespace paceline::cuda
