// SPDX-License-Identifier: Apache-2.0
#pragma once

// Chooses and launches the kernels of packed weights. docs/kernels.md has the measurements.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

#include "gemm/expert_launch.cuh"
#include "gemm/matrix_kernel.cuh"
#include "gemm/packed_costs.h"
#include "gemm/packed_warps.cuh"
#include "gemm/split_kernel.cuh"
#include "gemm/tensor_map.h"
#include "gemm/wgmma.cuh"
#include "gemm/wide_kernel.cuh"

namespace paceline::cuda {

template <class Shape>
void launch_split(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  constexpr auto kernel = &split_gemm_kernel<Shape>;
  allow_packed_bytes<kernel>(Shape::kSharedBytes);
  launch_packed(ctx, p, call, kernel, Shape::kRows, Shape::kTokens, Shape::kThreads,
                Shape::kSharedBytes);
}

// Up to Shape::kBlocks blocks share a multiprocessor.
template <class Shape, bool kHasTileSums>
void launch_wide(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  constexpr auto kernel = &wide_gemm_kernel<Shape, kHasTileSums>;
  allow_packed_bytes<kernel>(kMaxWideBytes);
  // A block that has a multiprocessor to itself keeps more bytes in flight.
  const bool is_alone = num_packed_blocks(p, Shape::kWeights, Shape::kTokens) <= ctx.num_sms;
  constexpr int32_t kBarrierBytes = 2 << 10;  // and what CUDA takes of each block's share
  const int32_t num_stages = Shape::stages_in(
      std::min(kMaxWideBytes, (227 << 10) / (is_alone ? 1 : Shape::kBlocks) - kBarrierBytes));
  launch(ctx, "expert_gemm", kernel,
         dim3(static_cast<uint32_t>(num_packed_blocks(p, Shape::kWeights, Shape::kTokens))),
         dim3(Shape::kThreads), static_cast<size_t>(Shape::shared_bytes(num_stages)),
         wide_weight_map<Shape>(p.weight),
         packed_args(p, call, Shape::kWeights, Shape::kTokens, num_stages));
}

template <class Shape, bool kHasTileSums>
void launch_matrix(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  constexpr auto kernel = &matrix_gemm_kernel<Shape, kHasTileSums>;
  allow_packed_bytes<kernel>(kMaxWideBytes);
  const int32_t num_stages = Shape::stages_in(kMaxWideBytes);
  // The blocks share the tokens evenly.
  const int32_t token_tiles = (p.max_rows + Shape::kTokens - 1) / Shape::kTokens;
  const int32_t block_tokens = ((p.max_rows + token_tiles - 1) / token_tiles + 7) / 8 * 8;
  launch(ctx, "expert_gemm", kernel,
         dim3(static_cast<uint32_t>(num_packed_blocks(p, Shape::kWeights, block_tokens))),
         dim3(Shape::kThreads), static_cast<size_t>(Shape::shared_bytes(num_stages)),
         tensor_map(p.x, p.max_rows, p.weight.first.k, p.x_stride, block_tokens),
         wide_weight_map<Shape>(p.weight),
         packed_args(p, call, Shape::kWeights, Shape::kTokens, num_stages), block_tokens);
}

// At most 16 rows, or in a mixture twice the mean of an expert's rows.
template <WeightFormat format, bool kHasTileSums>
void launch_few_rows(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const int64_t row_tiles = row_tiles_per_sm(ctx, p);
  const bool is_narrow = rows_to_expect(p) <= 8;
  // Few warps on a multiprocessor are bound by the latency of their own instructions.
  if (p.expert_begin == nullptr && row_tiles < kFewRowTiles) {
    if constexpr (kHasTileSums) {
      return is_narrow ? launch_parts<PartsShape<1>>(ctx, p, call)
                       : launch_parts<PartsShape<2>>(ctx, p, call);
    } else if (p.weight.first.packed_tile_rows() <= 2 * ctx.num_sms) {
      return is_narrow ? launch_split<SplitShape<format, 1, 1>>(ctx, p, call)
                       : launch_split<SplitShape<format, 1, 2>>(ctx, p, call);
    } else {
      return is_narrow ? launch_split<SplitShape<format, 2, 1>>(ctx, p, call)
                       : launch_split<SplitShape<format, 2, 2>>(ctx, p, call);
    }
  }
  launch_warps<format, kHasTileSums>(ctx, p, call);
}

// Launches a product of int4 or nvfp4.
template <WeightFormat format>
void launch_four_bits(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const int32_t rows = rows_to_expect(p);
  // Only the warps of int4_kernel.cuh gather tokens.
  if (p.weight.first.order != nullptr || rows <= 16) {
    return launch_warps<format, false>(ctx, p, call);
  }
  // `rows` is twice the mean of an expert's rows; a tile has room for one and a half times that
  // mean.
  const auto has_room = [rows](int32_t tokens) { return 3 * rows <= 4 * tokens; };
  if (has_room(32)) return launch_wide<WideShape<format, 1, 32, 3>, false>(ctx, p, call);
  if (has_room(64)) return launch_wide<WideShape<format, 2, 64>, false>(ctx, p, call);
  launch_wide<WideShape<format, 2, 128>, false>(ctx, p, call);
}

// Launches a product of mxfp4 or fp8.
template <WeightFormat format, bool kHasTileSums = false>
void launch_packed_format(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const int32_t rows = rows_to_expect(p);
  if (rows <= 16) return launch_few_rows<format, kHasTileSums>(ctx, p, call);
  if constexpr (format == WeightFormat::kMxfp4) {
    // A tile has room for one and a half times the mean, which a random routing seldom exceeds.
    if (rows <= 44) return launch_wide<WideShape<format, 2, 32, 2>, false>(ctx, p, call);
    if (rows <= 72) return launch_wide<WideShape<format, 2, 48, 2, 2>, false>(ctx, p, call);
    launch_wide<WideShape<format, 2, 128>, false>(ctx, p, call);
  } else {
    // The tile that leaves the busiest multiprocessor the least to do. A tile takes `us` over 4,096
    // columns.
    const auto cost = [&](int32_t weights, int32_t tokens, double us) {
      const int64_t blocks = num_packed_blocks(p, weights, tokens);
      return us * static_cast<double>((blocks + ctx.num_sms - 1) / ctx.num_sms);
    };
    // matrix_kernel.cuh wants rows of x that are neighbours, and the same columns for all weights.
    const bool is_matrix = p.expert_begin == nullptr && p.x_rows == nullptr && p.num_groups == 1;
    const double costs[] = {
        cost(64, 32, 14.0), cost(64, 64, 17.5), cost(128, 64, kWideFewTime.us),
        is_matrix ? cost(64, 128, kMatrixTime.us) : std::numeric_limits<double>::infinity(),
        cost(128, 128, is_matrix ? kWideMatrixTime.us : 41.0)};
    switch (std::min_element(std::begin(costs), std::end(costs)) - std::begin(costs)) {
      case 0:
        return launch_wide<WideShape<format, 1, 32, 3, 2>, kHasTileSums>(ctx, p, call);
      case 1:
        return launch_wide<WideShape<format, 1, 64, 2>, kHasTileSums>(ctx, p, call);
      case 2:
        return launch_wide<WideShape<format, 2, 64>, kHasTileSums>(ctx, p, call);
      case 3:
        return launch_matrix<MatrixShape<1>, kHasTileSums>(ctx, p, call);
      default:
        break;
    }
    if (is_matrix) return launch_matrix<MatrixShape<2>, kHasTileSums>(ctx, p, call);
    launch_wide<WideShape<format, 2, 128, 1, 2, kHasTileSums>, kHasTileSums>(ctx, p, call);
  }
}

}  // namespace paceline::cuda
