// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the launches of products by expert share.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <paceline/error.h>

#include "base/check.h"
#include "common/convert.cuh"
#include "device/cuda_context.h"
#include "gemm/expert_launch.h"
#include "gemm/expert_tiles.cuh"
#include "gemm/packed_args.h"
#include "gemm/scale_args.h"

namespace paceline::cuda {

inline ExpertRows expert_rows(const ExpertGemmParams& p, const ProductCall& call,
                              int32_t tile_weights) {
  return {.expert_begin = p.expert_begin,
          .num_rows = call.num_rows,
          .num_experts = p.weight.num_experts,
          .max_rows = p.max_rows,
          .column_tiles = (p.weight.first.n + tile_weights - 1) / tile_weights,
          .delays_successor = call.delays_successor};
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
  } else if (w.format == WeightFormat::kInt4 || w.format == WeightFormat::kNvfp4) {
    args.columns = static_cast<int32_t>(w.num_scale_cols());
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

inline Int4Args int4_args(const WeightMatrix& w) {
  if (w.format != WeightFormat::kInt4) return {};
  const auto group_blocks = static_cast<uint32_t>(w.scale_cols / kInt4Columns);
  return {.zeros = reinterpret_cast<const std::byte*>(w.zeros),
          .zeros_stride = w.zeros_bytes(),
          .order = w.order,
          .num_groups = static_cast<int32_t>(w.num_scale_cols()),
          .group_columns = w.scale_cols,
          .reciprocal = (1u << 31) / group_blocks + 1,
          .is_float16 = w.scale_dtype == DType::kFloat16};
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
  if (w.format == WeightFormat::kPlain) return;
  PACELINE_CHECK(w.is_packed(), "weights with scales must be packed");
  if (w.format != WeightFormat::kFp8) return;
  PACELINE_CHECK(w.scale_rows > 0 && std::has_single_bit(static_cast<uint32_t>(w.scale_rows)),
                 "scale_rows is ", w.scale_rows, "; it must be a power of two");
  if (w.scale_cols < w.k && w.scale_cols != 128) {
    throw Unsupported(concat("fp8 weights with a scale for ", w.scale_cols, " of ", w.k,
                             " columns; on a GPU a scale is for 128 columns or for a row"));
  }
}

// The rows of one matrix, or twice the mean of an expert's rows.
inline int32_t rows_to_expect(const ExpertGemmParams& p) {
  if (p.expert_begin == nullptr) return p.max_rows;
  return (2 * p.max_rows + p.weight.num_experts - 1) / p.weight.num_experts;
}

// The width of a tile of plain weights on sm_90a: 16, 32, 64 or 128 rows.
// - In a mixture, room for twice the mean of an expert's rows, which a random routing seldom
//   exceeds; up to 32 rows, of which two tiles share a multiprocessor, for one and a half times.
// - Of one matrix, room for all rows; but narrower where that leaves most multiprocessors without a
//   tile. Then two blocks read the same weights, the second one from L2.
inline int32_t plain_tile_width(const CudaContext& ctx, const ExpertGemmParams& p) {
  const int32_t rows = rows_to_expect(p);
  const bool is_mixture = p.expert_begin != nullptr;
  int32_t width = rows <= 16 ? 16 : rows <= (is_mixture ? 42 : 32) ? 32 : rows <= 64 ? 64 : 128;
  if (is_mixture) return width;
  const auto num_blocks = [&] {
    return int64_t{(p.weight.first.n + 63) / 64} * ((rows + width - 1) / width);
  };
  while (width > 32 && 4 * num_blocks() < 3 * ctx.num_sms) width /= 2;
  return width;
}

// Whether the activation is the end of a product of plain weights: on sm_90a, where its tiles are
// narrow, and the ring fills for the next tile while one ends.
inline bool takes_activation(const CudaContext& ctx, const ExpertGemmParams& p) {
  return !ctx.is_portable && p.expert_begin != nullptr && plain_tile_width(ctx, p) <= 32;
}

}  // namespace paceline::cuda
