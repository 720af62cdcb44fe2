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

// Bytes that the scales of a tile take in shared memory.
template <class Shape>
int32_t shared_scale_bytes(const ExpertGemmParams& p) {
  if constexpr (Shape::kIsPlain) {
    return 0;
  } else {
    return WeightScales<Shape::kFormat>::bytes(Shape::kWeights, scale_args(p.weight));
  }
}

// Stages that a ring needs. The outputs pass through the ring's memory, too.
template <class Shape>
inline constexpr int32_t kLeastStages =
    std::max(Shape::kMinStages,
             (StagedTile<float, Shape>::kBytes + Shape::kStageBytes - 1) / Shape::kStageBytes);

// Stages for which there is room.
template <class Shape>
int32_t most_stages(const ExpertGemmParams& p) {
  return std::min(kMaxStages, (kMaxRingBytes - shared_scale_bytes<Shape>(p)) / Shape::kStageBytes);
}

// The rows of one matrix, or twice the mean of an expert's rows.
inline int32_t rows_to_expect(const ExpertGemmParams& p) {
  if (p.expert_begin == nullptr) return p.max_rows;
  return (2 * p.max_rows + p.weight.num_experts - 1) / p.weight.num_experts;
}

template <class Shape, bool kHasTileSums>
void launch_expert_shape(CudaContext& ctx, const ExpertGemmParams& p, const int32_t* num_rows) {
  auto* const kernel = &expert_gemm_kernel<Shape, kHasTileSums>;
  static const bool is_allowed = [&] {
    allow_shared_bytes(kernel, kMaxSharedBytes, "expert_gemm");
    return true;
  }();
  static_cast<void>(is_allowed);
  const WeightMatrix& w = p.weight.first;
  const ExpertRows rows = expert_rows(p, num_rows, Shape::kWeights);
  const int64_t blocks =
      max_row_tiles(p.expert_begin != nullptr, p.weight.num_experts, p.max_rows, Shape::kTokens) *
      rows.column_tiles;
  const int32_t most = most_stages<Shape>(p);
  if (most < kLeastStages<Shape>) {
    throw Unsupported(concat("a product over ", w.k, " columns: the scales of ", Shape::kWeights,
                             " rows take ", shared_scale_bytes<Shape>(p),
                             " bytes, which do not fit shared memory"));
  }
  // A block that has a multiprocessor to itself keeps more bytes in flight.
  const int32_t ring_bytes = blocks <= ctx.num_sms ? 200 << 10 : Shape::kRingBytes;
  const int32_t num_stages = std::clamp(ring_bytes / Shape::kStageBytes, kLeastStages<Shape>, most);
  const ExpertGemmArgs args = {
      .rows = rows,
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
      .num_stages = num_stages,
      .weight_policy = rows_to_expect(p) > Shape::kTokens ? kEvictNormal : kEvictFirst};
  // One matrix has no stride of its own; the copy engine wants a multiple of 16.
  const int64_t stride = p.weight.num_experts > 1 ? p.weight.data_stride : w.n * w.row_bytes();
  launch(ctx, "expert_gemm", kernel, dim3(static_cast<uint32_t>(blocks)), dim3(Shape::kThreads),
         static_cast<size_t>(num_stages) * Shape::kStageBytes + shared_scale_bytes<Shape>(p) + 1024,
         byte_map(w.data, p.weight.num_experts, stride, w.n, w.row_bytes(), Shape::kWeights,
                  Shape::kBoxBytes),
         args);
}

// The width of a tile: 16, 32, 64 or 128 rows.
// - In a mixture, room for twice the mean of an expert's rows, which a random routing seldom
//   exceeds.
// - Of one matrix, room for all rows; but narrower where that leaves most multiprocessors without a
//   tile. Then two blocks read the same weights, the second one from L2.
inline int32_t tile_width(const CudaContext& ctx, const ExpertGemmParams& p) {
  const int32_t rows = rows_to_expect(p);
  int32_t width = rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
  if (p.expert_begin != nullptr) return width;
  const auto num_blocks = [&] {
    const int32_t weights = width == 128 ? 128 : 64;
    return int64_t{(p.weight.first.n + weights - 1) / weights} * ((rows + width - 1) / width);
  };
  while (width > 32 && 4 * num_blocks() < 3 * ctx.num_sms) width /= 2;
  return width;
}

// Launches the tile of tile_width() weights in `format`.
template <WeightFormat format, bool kHasTileSums = false>
void launch_expert_format(CudaContext& ctx, const ExpertGemmParams& p, const int32_t* num_rows) {
  // Stages of 128 rows of plain weights would be too few.
  constexpr int32_t kWidestGroups = format == WeightFormat::kPlain ? 1 : 2;
  switch (tile_width(ctx, p)) {
    case 16:
      return launch_expert_shape<ExpertShape<format, 1, 16>, kHasTileSums>(ctx, p, num_rows);
    case 32:
      return launch_expert_shape<ExpertShape<format, 1, 32>, kHasTileSums>(ctx, p, num_rows);
    case 128: {
      using Widest = ExpertShape<format, kWidestGroups, 128>;
      if (most_stages<Widest>(p) >= kLeastStages<Widest>) {
        return launch_expert_shape<Widest, kHasTileSums>(ctx, p, num_rows);
      }
      break;
    }
    default:
      break;
  }
  launch_expert_shape<ExpertShape<format, 1, 64>, kHasTileSums>(ctx, p, num_rows);
}

}  // namespace paceline::cuda
