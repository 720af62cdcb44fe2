// SPDX-License-Identifier: Apache-2.0

// Chooses the tile that computes a product. The kernel is in gemm_kernel.cuh.

#include <cuda_bf16.h>

#include <limits>

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
void launch_gemm(CudaContext& ctx, const GemmParams& p) {
  const bool is_narrow = num_waves<Tile>(ctx, p) == 1;
  launch_tile<Out, Tile>(ctx, p, (is_narrow ? 200 : Tile::kTokens <= 16 ? 73 : 100) << 10);
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
void launch_cheapest(CudaContext& ctx, const GemmParams& p) {
  using Launch = void (*)(CudaContext&, const GemmParams&);
  Launch best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](double cost, Launch launch) {
    if (cost >= least) return;
    least = cost;
    best = launch;
  };
  (consider(Cost::template of<Tiles>(ctx, p), &launch_gemm<Out, Tiles>), ...);
  best(ctx, p);
}

// The candidate tiles and the choice come from measurements: docs/kernels.md.
template <class Out>
void launch_for_rows(CudaContext& ctx, const GemmParams& p) {
  const int32_t rows = p.max_rows;
  if (rows <= 32) {
    // Three blocks of the narrowest tile share an SM, so up to three per SM are one wave. Beyond
    // that, two blocks with deeper rings leave a shorter tail.
    const bool is_one_wave = num_waves<WeightRows<1, 16, 2>>(ctx, p) <= 3;
    if (rows <= 16 && is_one_wave) return launch_gemm<Out, WeightRows<1, 16, 2>>(ctx, p);
    return launch_gemm<Out, WeightRows<1, 32, 2>>(ctx, p);
  }
  if (rows <= 64) {
    using Narrow = WeightRows<1, 64, 2>;
    if (num_waves<Narrow>(ctx, p) == 1) return launch_gemm<Out, Narrow>(ctx, p);
    return launch_cheapest<Weights, Out, TokenRows<96>, TokenRows<128>, TokenRows<224>>(ctx, p);
  }
  launch_cheapest<Clocks, Out, WeightRows<1, 96>, WeightRows<2, 160>, WeightRows<3, 192>,
                  WeightRows<1, 160>, TokenRows<192>, WeightRows<3, 128>, WeightRows<1, 64, 2>,
                  TokenRows<128>>(ctx, p);
}

// --- float32, for tests ----------------------------------------------------------------------

// A block computes 16 x 16 outputs; each thread walks K in ascending order with one accumulator.
__global__ void gemm_float_kernel(const GemmArgs args, const float* x, int64_t x_stride,
                                  const float* weight) {
  constexpr int32_t kSide = 16;
  __shared__ float x_tile[kSide][kSide];
  __shared__ float w_tile[kSide][kSide + 1];
  let_successor_start();
  wait_for_predecessor();
  const int32_t num_rows = min(*args.num_rows, args.max_rows);
  const int32_t tx = static_cast<int32_t>(threadIdx.x);
  const int32_t ty = static_cast<int32_t>(threadIdx.y);
  const int32_t row = static_cast<int32_t>(blockIdx.y) * kSide + ty;
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) * kSide;
  float sum = 0;
  for (int32_t k = 0; k < args.k; k += kSide) {
    const bool is_inside = k + tx < args.k;
    x_tile[ty][tx] = row < num_rows && is_inside ? x[row * x_stride + k + tx] : 0.0f;
    w_tile[ty][tx] = first_column + ty < args.n && is_inside
                         ? weight[int64_t{first_column + ty} * args.k + k + tx]
                         : 0.0f;
    __syncthreads();
    for (int32_t i = 0; i < kSide; ++i) sum = __fmaf_rn(x_tile[ty][i], w_tile[tx][i], sum);
    __syncthreads();
  }
  const int32_t column = first_column + tx;
  if (row >= num_rows || column >= args.n) return;
  const float bias = args.bias != nullptr ? args.bias[column] : 0.0f;
  static_cast<float*>(args.y)[row * args.y_stride + column] = sum + bias;
}

void launch_float(CudaContext& ctx, const GemmParams& p) {
  const GemmArgs args = {.num_rows = p.num_rows,
                         .max_rows = p.max_rows,
                         .bias = p.bias,
                         .y = p.y,
                         .y_stride = p.y_stride,
                         .n = p.weight.n,
                         .k = p.weight.k,
                         .num_stages = 0,
                         .stage_bytes = 0,
                         .block_tokens = 0};
  launch(ctx, "gemm_float", &gemm_float_kernel,
         dim3((p.weight.n + 15) / 16, (p.max_rows + 15) / 16), dim3(16, 16), 0, args,
         static_cast<const float*>(p.x), p.x_stride, reinterpret_cast<const float*>(p.weight.data));
}

}  // namespace
}  // namespace cuda

void gemm(CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows <= 0) return;
  if (ctx.trace != nullptr) ctx.trace->label_next(concat("gemm ", p.weight.n, "x", p.weight.k));
  PACELINE_CHECK(p.x_dtype == p.weight.dtype, "on a GPU x has the dtype of the weights");
  if (p.weight.dtype == DType::kFloat32) {
    PACELINE_CHECK(p.y_dtype == DType::kFloat32, "float32 products have float32 outputs");
    return cuda::launch_float(ctx, p);
  }
  PACELINE_CHECK(p.weight.dtype == DType::kBFloat16, "gemm weights are float32 or bfloat16");
  if (p.weight.k % 8 != 0 || p.x_stride % 8 != 0) {
    throw Unsupported(concat("a product over ", p.weight.k, " columns with rows ", p.x_stride,
                             " apart; on a GPU both must be multiples of 8"));
  }
  if (ctx.gemm->run_library(ctx, p)) return;
  if (p.y_dtype == DType::kBFloat16) {
    cuda::launch_for_rows<__nv_bfloat16>(ctx, p);
  } else {
    cuda::launch_for_rows<float>(ctx, p);
  }
}

}  // namespace paceline
