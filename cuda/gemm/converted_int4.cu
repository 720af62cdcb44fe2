// SPDX-License-Identifier: Apache-2.0

// Chooses the tile by which sm_90a computes a product of packed int4 weights. The kernels are in
// converted_kernel.cuh and register_kernel.cuh.

#include "gemm/converted_gemm.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "device/cuda_context.h"
#include "gemm/converted_launch.cuh"
#include "gemm/register_kernel.cuh"

namespace paceline::cuda {
namespace {

template <class Base, int32_t converters, int32_t ahead, int32_t blocks = 1>
using Int4 = ConvertedTile<Base, WeightFormat::kInt4, converters, ahead, blocks>;
// The narrowest tile of many.
using Narrow = Int4<WeightRows<1, 16, 2>, 4, 3, 3>;

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
         token_map(p, tile.args), converted_weights(p.weight, /*is_read_again=*/false), tile.args);
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

}  // namespace

// Tiles of up to 16 tokens add to a residual; wider ones are not among those of so few rows.
template <>
void launch_converted<WeightFormat::kInt4>(CudaContext& ctx, const GemmParams& p,
                                           const ProductEnd& end) {
  if (p.max_rows <= 16) {
    const TileChoice in_registers = register_tile(ctx, p);
    const TileChoice narrow = converted_tile<Narrow>(ctx, p);
    if (end.activation != nullptr) return launch_cheapest(ctx, p, end, {narrow, in_registers});
    launch_cheapest(ctx, p, end,
                    {converted_tile<Int4<ThinRows<16>, 12, 2>>(ctx, p),
                     converted_tile<Int4<ThinRows<32>, 12, 3>>(ctx, p),
                     converted_tile<Int4<ThinRows<48>, 12, 3>>(ctx, p), narrow, in_registers});
  } else if (p.max_rows <= 64) {
    launch_cheapest_converted<Int4<TokenRows<1, 32, 2>, 12, 3>, Int4<TokenRows<1, 48, 2>, 12, 3>,
                              Int4<TokenRows<1, 96, 2>, 12, 2>>(ctx, p, end);
  } else {
    launch_cheapest_converted<Int4<WeightRows<1, 128, 2>, 12, 3>, Int4<TokenRows<2, 96, 2>, 12, 2>>(
        ctx, p, end);
  }
}

template <>
bool takes_converted_activation<WeightFormat::kInt4>(const CudaContext& ctx, const GemmParams& p) {
  return num_waves<Narrow>(ctx, p) <= 3 ||
         register_tile(ctx, p).cost <= converted_cost<Narrow>(ctx, p);
}

}  // namespace paceline::cuda
