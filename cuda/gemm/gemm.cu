// SPDX-License-Identifier: Apache-2.0

// Chooses the tile that computes a product. The kernel is in gemm_kernel.cuh.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <paceline/error.h>

#include "gemm/expert_launch.h"
#include "gemm/gemm_launch.cuh"
#include "gemm/gemm_planner.h"

namespace paceline {
namespace cuda {
namespace {

template <int32_t groups, int32_t tokens, int32_t steps = 1>
using WeightRows = Tile<RowsAre::kWeights, groups, tokens, steps>;
template <int32_t weights>
using TokenRows = Tile<RowsAre::kTokens, 1, weights>;

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
                     const GatedActivationParams* activation = nullptr) {
  const int32_t rows = p.max_rows;
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

// Whether one launch computes all groups: the tiles of packed weights, of up to 128 rows, know the
// columns of x that they read.
bool takes_groups(const GemmParams& p) {
  return p.weight.is_packed() && p.weight.dtype == DType::kBFloat16 &&
         p.weight.n / p.num_groups % 128 == 0;
}

// The product of one group.
GemmParams group_of(const GemmParams& all, int32_t group) {
  GemmParams p = all;
  WeightMatrix& w = p.weight;
  w.n = all.weight.n / all.num_groups;
  const int64_t first = int64_t{group} * w.n;
  if ((w.is_packed() && w.n % kPackedRows != 0) ||
      (w.format == WeightFormat::kFp8 && w.n % w.scale_rows != 0)) {
    throw Unsupported(concat("groups of ", w.n,
                             " rows of weights with scales; on a GPU they must be a multiple of ",
                             std::max(kPackedRows, w.scale_rows)));
  }
  const int64_t tiles = first / kPackedRows * w.packed_tile_cols();
  w.data += w.is_packed() ? tiles * packed_tile_bytes(w.format) : first * w.row_bytes();
  if (w.format == WeightFormat::kFp8) {
    w.scales += first / w.scale_rows * w.num_scale_cols() * static_cast<int64_t>(sizeof(float));
  } else if (w.format == WeightFormat::kMxfp4) {
    w.scales += w.is_packed() ? tiles * kPackedScaleBytes : first * w.num_scale_cols();
  }
  p.x = static_cast<const std::byte*>(all.x) + int64_t{group} * w.k * dtype_bytes(all.x_dtype);
  if (all.bias != nullptr) p.bias = all.bias + first;
  p.y = static_cast<std::byte*>(all.y) + first * dtype_bytes(all.y_dtype);
  p.num_groups = 1;
  return p;
}

// Whether the activation is faster as the end of the product. The end of a wide tile takes its few
// threads longer than a kernel on the whole machine, and so does that of tiles which come in
// several waves: docs/performance-history.md.
bool takes_activation(const CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows <= 16) return num_waves<WeightRows<1, 16, 2>>(ctx, p) <= 3;
  if (p.max_rows <= 32 || p.max_rows > 64) return false;
  return num_waves<WeightRows<1, 64, 2>>(ctx, p) > 1 &&
         Weights::of<TokenRows<96>>(ctx, p) <=
             std::min(Weights::of<TokenRows<128>>(ctx, p), Weights::of<TokenRows<224>>(ctx, p));
}

void label(CudaContext& ctx, const GemmParams& p) {
  if (ctx.trace != nullptr) ctx.trace->label_next(concat("gemm ", p.weight.n, "x", p.weight.k));
  PACELINE_CHECK(p.x_dtype == p.weight.dtype, "on a GPU x has the dtype of the weights");
}

// Throws Unsupported for rows that the copy engine cannot read.
void check_strides(const GemmParams& p) {
  if (p.weight.k % 8 == 0 && p.x_stride % 8 == 0) return;
  throw Unsupported(concat("a product over ", p.weight.k, " columns with rows ", p.x_stride,
                           " apart; on a GPU both must be multiples of 8"));
}

}  // namespace
}  // namespace cuda

void gemm(CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows <= 0) return;
  if (p.num_groups > 1 && !cuda::takes_groups(p)) {
    for (int32_t group = 0; group < p.num_groups; ++group) gemm(ctx, cuda::group_of(p, group));
    return;
  }
  cuda::label(ctx, p);
  if (p.weight.dtype == DType::kFloat32 || p.weight.format != WeightFormat::kPlain) {
    return cuda::launch_any_format(ctx,
                                   {.expert_begin = nullptr,
                                    .max_rows = p.max_rows,
                                    .x = p.x,
                                    .x_stride = p.x_stride,
                                    .x_rows = nullptr,
                                    .num_x_rows = p.max_rows,
                                    .weight = {.first = p.weight, .num_experts = 1},
                                    .bias = p.bias,
                                    .y = p.y,
                                    .y_stride = p.y_stride,
                                    .x_dtype = p.x_dtype,
                                    .y_dtype = p.y_dtype,
                                    .num_groups = p.num_groups},
                                   {.num_rows = p.num_rows});
  }
  PACELINE_CHECK(p.weight.dtype == DType::kBFloat16, "products are of float32 or bfloat16");
  cuda::check_strides(p);
  if (ctx.gemm->run_library(ctx, p)) return;
  if (p.y_dtype == DType::kBFloat16) {
    cuda::launch_for_rows<__nv_bfloat16>(ctx, p);
  } else {
    cuda::launch_for_rows<float>(ctx, p);
  }
}

void activated_gemm(CudaContext& ctx, const ActivatedGemmParams& p) {
  check_activation(p);
  const GemmParams& product = p.product;
  const WeightMatrix& w = product.weight;
  // The activation is the end of our own kernel for bfloat16.
  const bool is_joined = w.dtype == DType::kBFloat16 && w.format == WeightFormat::kPlain &&
                         product.y_dtype == DType::kBFloat16 && product.bias == nullptr &&
                         p.activation.intermediate % 8 == 0 &&
                         cuda::ends_products(p.activation.activation) &&
                         !ctx.gemm->has_plan(product) && cuda::takes_activation(ctx, product);
  if (!is_joined) {
    gemm(ctx, product);
    return gated_activation(ctx, p.activation);
  }
  if (product.max_rows <= 0) return;
  cuda::label(ctx, product);
  cuda::check_strides(product);
  cuda::launch_for_rows<__nv_bfloat16>(ctx, product, &p.activation);
}

}  // namespace paceline
