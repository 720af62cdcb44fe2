// SPDX-License-Identifier: Apache-2.0

// Chooses the tile by which sm_90a computes a product. The kernel is in gemm_kernel.cuh.

#include "gemm/gemm_tiles.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gemm/gemm_launch.cuh"

namespace paceline::cuda {
namespace {

// With enough tiles for two or three per SM, each ring takes a part of its shared memory; fewer
// tiles must keep more bytes in flight each. docs/performance.md has the measurements.
template <class Out, class Tile>
void launch_gemm(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  const bool is_narrow = num_waves<Tile>(ctx, p) == 1;
  launch_tile<Out, Tile>(ctx, p, (is_narrow ? 200 : Tile::kTokens <= 16 ? 73 : 100) << 10, end);
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

template <class Cost, class Out, class... Tiles>
void launch_cheapest_of(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  launch_cheapest(ctx, p, end, {{Cost::template of<Tiles>(ctx, p), &launch_gemm<Out, Tiles>}...});
}

// Launches the thinnest tile of which each multiprocessor has at most one, so that all of them
// bring weights to shared memory before the predecessor has ended. False: there is none.
template <class Out, int32_t tokens, int32_t weights>
bool launch_thin(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  using Thin = ThinRows<weights, tokens>;
  if (num_waves<Thin>(ctx, p) == 1) {
    launch_gemm<Out, Thin>(ctx, p, end);
    return true;
  }
  if constexpr (weights + 8 < Thin::kGroupRows) {
    return launch_thin<Out, tokens, weights + 8>(ctx, p, end);
  }
  return false;
}

// The candidate tiles and the choice come from measurements: docs/kernels.md.
template <class Out>
void launch_for_rows(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  const int32_t rows = p.max_rows;
  // With more rows these are products of few weights, such as routers, whose wide tiles would leave
  // most multiprocessors idle. With fewer columns wide tiles are faster even so.
  const bool is_deep = p.weight.k >= 2048;
  const bool may_be_thin = (rows <= 16 || is_deep) && end.activation == nullptr;
  if (may_be_thin && launch_thin<Out, 16, 16>(ctx, p, end)) return;
  if (rows <= 32) {
    // Three blocks of the narrowest tile share an SM, so up to three per SM are one wave. Beyond
    // that, two blocks with deeper rings leave a shorter tail.
    const bool is_one_wave = num_waves<WeightRows<1, 16, 2>>(ctx, p) <= 3;
    if (rows <= 16 && is_one_wave) return launch_gemm<Out, WeightRows<1, 16, 2>>(ctx, p, end);
    if (rows > 16 && is_deep && launch_thin<Out, 32, 32>(ctx, p, end)) return;
    return launch_gemm<Out, WeightRows<1, 32, 2>>(ctx, p, end);
  }
  if (rows <= 64) {
    using Narrow = WeightRows<1, 64, 2>;
    if (num_waves<Narrow>(ctx, p) == 1) {
      if (launch_thin<Out, 64, 32>(ctx, p, end)) return;
      return launch_gemm<Out, Narrow>(ctx, p, end);
    }
    return launch_cheapest_of<Weights, Out, TokenRows<1, 96>, TokenRows<1, 128>, TokenRows<1, 224>>(
        ctx, p, end);
  }
  if (rows <= 96 && is_deep && launch_thin<Out, 96, 32>(ctx, p, end)) return;
  launch_cheapest_of<Clocks, Out, WeightRows<1, 96>, WeightRows<2, 160>, WeightRows<3, 192>,
                     WeightRows<1, 160>, TokenRows<1, 192>, WeightRows<3, 128>,
                     WeightRows<1, 64, 2>, TokenRows<1, 128>>(ctx, p, end);
}

}  // namespace

void launch_tiles(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  if (p.y_dtype == DType::kBFloat16) {
    launch_for_rows<__nv_bfloat16>(ctx, p, end);
  } else {
    launch_for_rows<float>(ctx, p, {});
  }
}

bool takes_residual(const GemmParams& p) {
  return p.max_rows <= kMaxAddedTokens && p.y_dtype == DType::kBFloat16 && p.weight.n % 8 == 0 &&
         p.y_stride == p.weight.n;
}

// The end of a wide tile takes its few threads longer than a kernel on the whole machine, and so
// does that of tiles which come in several waves: docs/performance-history.md.
bool takes_activation(const CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows <= 16) return num_waves<WeightRows<1, 16, 2>>(ctx, p) <= 3;
  if (p.max_rows <= 32 || p.max_rows > 64) return false;
  return num_waves<WeightRows<1, 64, 2>>(ctx, p) > 1 &&
         Weights::of<TokenRows<1, 96>>(ctx, p) <= std::min(Weights::of<TokenRows<1, 128>>(ctx, p),
                                                           Weights::of<TokenRows<1, 224>>(ctx, p));
}

}  // namespace paceline::cuda
