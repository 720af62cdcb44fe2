// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches expert_kernel.cuh; each format is compiled in a file of its own.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <paceline/error.h>

#include "base/check.h"
#include "common/convert.cuh"
#include "gemm/expert_kernel.cuh"
#include "gemm/expert_launch.h"
#include "gemm/gemm_launch.cuh"
#include "gemm/tensor_map.h"

namespace paceline::cuda {

inline ExpertRows expert_rows(const ExpertGemmParams& p, const int32_t* num_rows,
                              int32_t tile_weights) {
  return {.expert_begin = p.expert_begin,
          .num_rows = num_rows,
          .num_experts = p.weight.num_experts,
          .max_rows = p.max_rows,
          .column_tiles = (p.weight.first.n + tile_weights - 1) / tile_weights};
}

inline ScaleArgs scale_args(const ExpertMatrices& matrices) {
  const WeightMatrix& w = matrices.first;
  ScaleArgs args = {.scales = w.scales,
                    .expert_stride = matrices.scales_stride,
                    .columns = 0,
                    .row_shift = 0,
                    .use = ScaleUse::kNone};
  if (w.format == WeightFormat::kMxfp4) {
    args.columns = w.k / kMxfp4Columns;
    args.use = ScaleUse::kValues;
  } else if (w.format == WeightFormat::kFp8) {
    const int32_t scale_cols = std::min(w.scale_cols, w.k);
    args.columns = (w.k + scale_cols - 1) / scale_cols;
    args.row_shift = std::countr_zero(static_cast<uint32_t>(w.scale_rows));
    args.use = w.has_exact_scales  ? ScaleUse::kValues
               : args.columns == 1 ? ScaleUse::kRowSums
                                   : ScaleUse::kTileSums;
  }
  return args;
}

// Throws Unsupported for a product that the tensor core kernels cannot compute.
inline void check_expert_gemm(const ExpertGemmParams& p) {
  const WeightMatrix& w = p.weight.first;
  if (w.row_bytes() % 16 != 0 || p.x_stride % 8 != 0) {
    throw Unsupported(concat("a product with weights of ", w.row_bytes(), " bytes a row and rows ",
                             p.x_stride, " apart; on a GPU these must be multiples of 16 and 8"));
  }
  PACELINE_CHECK(
      is_vector_aligned(w.data) && is_vector_aligned(p.x) && p.weight.data_stride % 16 == 0,
      "weights and x must be 16 B aligned");
  if (w.format != WeightFormat::kFp8) return;
  PACELINE_CHECK(w.scale_rows > 0 && std::has_single_bit(static_cast<uint32_t>(w.scale_rows)),
                 "scale_rows is ", w.scale_rows, "; it must be a power of two");
  if (w.scale_cols < w.k && w.scale_cols != 128) {
    throw Unsupported(concat("fp8 weights with a scale for ", w.scale_cols, " of ", w.k,
                             " columns; on a GPU a scale is for 128 columns or for a row"));
  }
}

template <class Shape, bool kHasTileSums = false>
void launch_expert_shape(CudaContext& ctx, const ExpertGemmParams& p, const int32_t* num_rows) {
  auto* const kernel = &expert_gemm_kernel<Shape, kHasTileSums>;
  static const bool is_allowed = [&] {
    allow_shared_bytes(kernel, kMaxSharedBytes, "expert_gemm");
    return true;
  }();
  static_cast<void>(is_allowed);
  const WeightMatrix& w = p.weight.first;
  const bool is_mixture = p.expert_begin != nullptr;
  ExpertGemmArgs args = {.rows = expert_rows(p, num_rows, Shape::kWeights),
                         .scales = scale_args(p.weight),
                         .x = static_cast<const __nv_bfloat16*>(p.x),
                         .x_stride = p.x_stride,
                         .x_rows = p.x_rows,
                         .bias = p.bias,
                         .y = p.y,
                         .y_stride = p.y_stride,
                         .is_y_float = p.y_dtype == DType::kFloat32,
                         .n = w.n,
                         .k = w.k,
                         .num_stages = 0};
  int32_t scale_bytes = 0;
  if constexpr (!Shape::kIsPlain) {
    scale_bytes = WeightScales<Shape::kFormat>::bytes(Shape::kWeights, args.scales);
  }
  constexpr int32_t kStagedBytes = StagedTile<float, Shape>::kBytes;
  constexpr int32_t kLeastStages =
      std::max(Shape::kMinStages, (kStagedBytes + Shape::kStageBytes - 1) / Shape::kStageBytes);
  const int32_t fit = (kMaxRingBytes - scale_bytes) / Shape::kStageBytes;
  if (fit < kLeastStages) {
    throw Unsupported(concat("a product over ", w.k, " columns: the scales of ", Shape::kWeights,
                             " rows, ", scale_bytes, " bytes, do not fit shared memory"));
  }
  args.num_stages =
      std::clamp(Shape::kRingBytes / Shape::kStageBytes, kLeastStages, std::min(kMaxStages, fit));
  const auto shared_bytes =
      static_cast<size_t>(args.num_stages) * Shape::kStageBytes + scale_bytes + 1024;
  const int64_t blocks =
      max_row_tiles(is_mixture, p.weight.num_experts, p.max_rows, Shape::kTokens) *
      args.rows.column_tiles;
  // One matrix has no stride of its own; the copy engine wants a multiple of 16.
  const int64_t stride = p.weight.num_experts > 1 ? p.weight.data_stride : w.n * w.row_bytes();
  launch(ctx, "expert_gemm", kernel, dim3(static_cast<uint32_t>(blocks)), dim3(Shape::kThreads),
         shared_bytes,
         byte_map(w.data, p.weight.num_experts, stride, w.n, w.row_bytes(), Shape::kWeights,
                  Shape::kBoxBytes),
         args);
}

// The number of rows that a tile should have room for: twice the mean of an expert's rows, which a
// random routing seldom exceeds.
inline int32_t rows_to_expect(const ExpertGemmParams& p) {
  if (p.expert_begin == nullptr) return p.max_rows;
  return (2 * p.max_rows + p.weight.num_experts - 1) / p.weight.num_experts;
}

}  // namespace paceline::cuda
