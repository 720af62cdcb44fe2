// SPDX-License-Identifier: Apache-2.0

// Which tile computes a product: the kernel is in gemm_kernel.cuh.

#include <cuda_bf16.h>

#include <algorithm>
#include <limits>

#include "gemm/gemm_launch.cuh"
#include "gemm/gemm_planner.h"

namespace paceline {
namespace cuda {
namespace {

// With tiles enough for two or three on every multiprocessor, rings of a part of its memory; fewer
// tiles have to keep more bytes in flight each. Measured in docs/performance.md.
template <class Tile>
int32_t ring_bytes_of(const CudaContext& ctx, const GemmParams& p) {
  const bool is_narrow = num_tiles<Tile>(p.n, p.max_rows) <= ctx.num_sms;
  return (is_narrow ? 200 : Tile::kTokens <= 16 ? 73 : 100) << 10;
}

template <class Out, class Tile>
void launch_gemm(CudaContext& ctx, const GemmParams& p) {
  launch_tile<Out, Tile>(ctx, p, ring_bytes_of<Tile>(ctx, p));
}

template <int32_t groups, int32_t tokens, int32_t steps = 1>
using WeightRows = Tile<RowsAre::kWeights, groups, 1, tokens, steps>;
template <int32_t groups, int32_t blocks, int32_t weights>
using TokenRows = Tile<RowsAre::kTokens, groups, blocks, weights>;

// A tile costs its clocks a column of K, and about so many to start and to write its outputs.
constexpr double kTileOverhead = 4000;

template <class Tile>
double clocks_of(const CudaContext& ctx, const GemmParams& p) {
  const int64_t tiles = num_tiles<Tile>(p.n, p.max_rows);
  return static_cast<double>((tiles + ctx.num_sms - 1) / ctx.num_sms) *
         (clocks_per_depth<Tile>() * p.k + kTileOverhead);
}

// The cheapest of several tiles, the first of equals.
template <class Out, class... Tiles>
void launch_cheapest(CudaContext& ctx, const GemmParams& p) {
  using Launch = void (*)(CudaContext&, const GemmParams&);
  Launch best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](double clocks, Launch launch) {
    if (clocks >= least) return;
    least = clocks;
    best = launch;
  };
  (consider(clocks_of<Tiles>(ctx, p), &launch_gemm<Out, Tiles>), ...);
  best(ctx, p);
}

template <class Out>
void launch_for_rows(CudaContext& ctx, const GemmParams& p) {
  const int32_t rows = p.max_rows;
  if (rows <= 8) return launch_gemm<Out, WeightRows<1, 8, 2>>(ctx, p);
  if (rows <= 16) return launch_gemm<Out, WeightRows<1, 16, 2>>(ctx, p);
  if (rows <= 24) return launch_gemm<Out, WeightRows<1, 24, 2>>(ctx, p);
  if (rows <= 32) return launch_gemm<Out, WeightRows<1, 32, 2>>(ctx, p);
  if (rows <= 48) return launch_gemm<Out, WeightRows<1, 48, 2>>(ctx, p);
  if (rows <= 64) return launch_gemm<Out, WeightRows<1, 64, 2>>(ctx, p);
  if (rows <= 96) return launch_gemm<Out, WeightRows<1, 96>>(ctx, p);
  if (rows <= 128) return launch_gemm<Out, WeightRows<1, 128>>(ctx, p);
  launch_cheapest<Out, TokenRows<2, 2, 192>, WeightRows<3, 192>, WeightRows<3, 160>,
                  WeightRows<2, 256>, WeightRows<2, 128>, WeightRows<1, 128>, WeightRows<1, 96>,
                  WeightRows<1, 80>, TokenRows<1, 1, 192>, TokenRows<1, 1, 144>>(ctx, p);
}

// --- float32, for tests ----------------------------------------------------------------------

// 16 x 16 outputs a block; each thread walks K in ascending order with one accumulator.
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
                         .n = p.n,
                         .k = p.k,
                         .num_stages = 0,
                         .stage_bytes = 0};
  launch(ctx, "gemm_float", &gemm_float_kernel, dim3((p.n + 15) / 16, (p.max_rows + 15) / 16),
         dim3(16, 16), 0, args, static_cast<const float*>(p.x), p.x_stride,
         static_cast<const float*>(p.weight));
}

}  // namespace
}  // namespace cuda

void gemm(CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows <= 0) return;
  if (ctx.trace != nullptr) ctx.trace->label_next(concat("gemm ", p.n, "x", p.k));
  PACELINE_CHECK(p.x_dtype == p.weight_dtype, "on a GPU x has the dtype of the weights");
  if (p.weight_dtype == DType::kFloat32) {
    PACELINE_CHECK(p.y_dtype == DType::kFloat32, "float32 products have float32 outputs");
    return cuda::launch_float(ctx, p);
  }
  PACELINE_CHECK(p.weight_dtype == DType::kBFloat16, "gemm weights are float32 or bfloat16");
  if (p.k % 8 != 0 || p.x_stride % 8 != 0) {
    throw Unsupported(concat("a product over ", p.k, " columns with rows ", p.x_stride,
                             " apart; on a GPU both must be multiples of 8"));
  }
  if (p.max_rows >= GemmPlanner::kLibraryRows && ctx.gemm->run_library(ctx, p)) return;
  if (p.y_dtype == DType::kBFloat16) {
    cuda::launch_for_rows<__nv_bfloat16>(ctx, p);
  } else {
    cuda::launch_for_rows<float>(ctx, p);
  }
}

}  // namespace paceline
