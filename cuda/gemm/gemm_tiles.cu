// SPDX-License-Identifier: Apache-2.0

// Chooses the tile by which sm_90a computes a product. The kernel is in gemm_kernel.cuh.

#include "gemm/gemm_tiles.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "gemm/gemm_launch.cuh"

namespace paceline::cuda {
namespace {

template <int32_t groups, int32_t tokens, int32_t steps = 1>
using WeightRows = Tile<RowsAre::kWeights, groups, tokens, steps>;
template <int32_t weights>
using TokenRows = Tile<RowsAre::kTokens, 1, weights>;
// 16 weights by 16 tokens.
using ThinRows = Tile<RowsAre::kWeights, 1, 16, 4, 16, 16>;

// The number of tiles that the busiest SM computes.
template <class Tile>
int64_t num_waves(const CudaContext& ctx, const GemmParams& p) {
  return (num_tiles<Tile>(p.weight.n, p.max_rows) + ctx.num_sms - 1) / ctx.num_sms;
}

// With enough tiles for two or three per SM, each ring takes a part of its shared memory; fewer
// tiles must keep more bytes in flight each. docs/performance.md has the measurements.
template <class Out, class Tile>
void launch_gemm(CudaContext& ctx, const GemmParams& p, const GatedActivationParams* activation) {
  const bool is_narrow = num_waves<Tile>(ctx, p) == 1;
  launch_tile<Out, Tile>(ctx, p,
                         (is_narrow             ? 200
                          : Tile::kTokens <= 16 ? 73
                                                : 100)
                             << 10,
                         activation);
}

// The cost when arithmetic bounds: clocks of the busiest SM for a column of K.
struct Clocks {
  template <class Tile>
  static double of(const CudaContext& ctx, const GemmParams& p) {
    return static_cast<double>(num_waves<Tile>(ctx, p)) * clocks_per_depth<Tile>();
  }
};

// The cost when memory bounds: weights that the busiest SM reads for a column of K.
struct Weights {
  template <class Tile>
  static double of(const CudaContext& ctx, const GemmParams& p) {
    return static_cast<double>(num_waves<Tile>(ctx, p) * Tile::kWeights);
  }
};

// Launches the cheapest of several tiles, the first of equals.
template <class Cost, class Out, class... Tiles>
void launch_cheapest(CudaContext& ctx, const GemmParams& p,
                     const GatedActivationParams* activation) {
  using Launch = void (*)(CudaContext&, const GemmParams&, const GatedActivationParams*);
  Launch best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](double cost, Launch launch) {
    if (cost >= least) return;
    least = cost;
    best = launch;
  };
  (consider(Cost::template of<Tiles>(ctx, p), &launch_gemm<Out, Tiles>), ...);
  best(ctx, p, activation);
}

// The candidate tiles and the choice come from measurements: docs/kernels.md.
template <class Out>
void launch_for_rows(CudaContext& ctx, const GemmParams& p,
                     const GatedActivationParams* activation) {
  const int32_t rows = p.max_rows;
  // Where tiles of 64 weights leave three quarters of the multiprocessors without work, only a
  // quarter of them brings weights to shared memory before the predecessor has ended.
  if (rows <= 16 && activation == nullptr && num_waves<ThinRows>(ctx, p) == 1) {
    return launch_gemm<Out, ThinRows>(ctx, p, activation);
  }
  if (rows <= 32) {
    // Three blocks of the narrowest tile share an SM, so up to three per SM are one wave. Beyond
    // that, two blocks with deeper rings leave a shorter tail.
    const bool is_one_wave = num_waves<WeightRows<1, 16, 2>>(ctx, p) <= 3;
    if (rows <= 16 && is_one_wave)
      return launch_gemm<Out, WeightRows<1, 16, 2>>(ctx, p, activation);
    return launch_gemm<Out, WeightRows<1, 32, 2>>(ctx, p, activation);
  }
  if (rows <= 64) {
    using Narrow = WeightRows<1, 64, 2>;
    if (num_waves<Narrow>(ctx, p) == 1) return launch_gemm<Out, Narrow>(ctx, p, activation);
    return launch_cheapest<Weights, Out, TokenRows<96>, TokenRows<128>, TokenRows<224>>(ctx, p,
                                                                                        activation);
  }
  launch_cheapest<Clocks, Out, WeightRows<1, 96>, WeightRows<2, 160>, WeightRows<3, 192>,
                  WeightRows<1, 160>, TokenRows<192>, WeightRows<3, 128>, WeightRows<1, 64, 2>,
                  TokenRows<128>>(ctx, p, activation);
}

}  // namespace

void launch_tiles(CudaContext& ctx, const GemmParams& p, const GatedActivationParams* activation) {
  if (p.y_dtype == DType::kBFloat16) {
    launch_for_rows<__nv_bfloat16>(ctx, p, activation);
  } else {
    launch_for_rows<float>(ctx, p, nullptr);
  }
}

// The end of a wide tile takes its few threads longer than a kernel on the whole machine, and so
// does that of tiles which come in several waves: docs/performance-history.md.
bool takes_activation(const CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows <= 16) return num_waves<WeightRows<1, 16, 2>>(ctx, p) <= 3;
  if (p.max_rows <= 32 || p.max_rows > 64) return false;
  return num_waves<WeightRows<1, 64, 2>>(ctx, p) > 1 &&
         Weights::of<TokenRows<96>>(ctx, p) <=
             std::min(Weights::of<TokenRows<128>>(ctx, p), Weights::of<TokenRows<224>>(ctx, p));
}

}  // namespace paceline::cuda
