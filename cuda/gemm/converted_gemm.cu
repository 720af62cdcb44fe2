// SPDX-License-Identifier: Apache-2.0

// Which products converted_kernel.cuh computes.

#include "gemm/converted_gemm.h"

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "device/cuda_context.h"
#include "gemm/packed_costs.h"

namespace paceline::cuda {
namespace {

// Whether the kernel can use the scales of fp8 weights: where they multiply sums over 128 columns,
// all rows of a row tile have the same.
bool takes_scales(const WeightMatrix& w) {
  if (w.scale_cols >= w.k) return true;
  return w.scale_cols == 128 && (w.has_exact_scales || w.scale_rows % kPackedRows == 0);
}

// Whether a product of fp8 weights is faster than by packed_launch.cuh.
bool takes_fp8(const CudaContext& ctx, const GemmParams& p) {
  const WeightMatrix& w = p.weight;
  if (p.max_rows <= 8) return false;
  if (p.max_rows <= 16) return w.packed_tile_rows() / ctx.num_sms < kFewRowTiles;
  const auto cost = [&](const TileTime& time) { return time.of(w.n, p.max_rows, ctx.num_sms); };
  if (p.max_rows <= 64) return cost(kConvertedFewTime) < cost(kWideFewTime);
  return cost(kConvertedTime) < std::min(cost(kMatrixTime), cost(kWideMatrixTime));
}

}  // namespace

bool takes_converted(const CudaContext& ctx, const GemmParams& p) {
  const WeightMatrix& w = p.weight;
  if (ctx.is_portable || !w.is_packed() || w.dtype != DType::kBFloat16 ||
      p.y_dtype != DType::kBFloat16 || p.num_groups != 1 || w.k % 8 != 0 || p.x_stride % 8 != 0) {
    return false;
  }
  switch (w.format) {
    case WeightFormat::kInt4:
      return w.order == nullptr;
    case WeightFormat::kNvfp4:
      return true;
    case WeightFormat::kFp8:
      return takes_scales(w) && takes_fp8(ctx, p);
    case WeightFormat::kPlain:
    case WeightFormat::kMxfp4:
      return false;
  }
  return false;
}

void launch_converted(CudaContext& ctx, const GemmParams& p, const ProductEnd& end) {
  switch (p.weight.format) {
    case WeightFormat::kInt4:
      return launch_converted<WeightFormat::kInt4>(ctx, p, end);
    case WeightFormat::kNvfp4:
      return launch_converted<WeightFormat::kNvfp4>(ctx, p, end);
    case WeightFormat::kFp8:
      return launch_converted<WeightFormat::kFp8>(ctx, p, end);
    case WeightFormat::kPlain:
    case WeightFormat::kMxfp4:
      break;
  }
  PACELINE_CHECK(false, "not a format of converted_kernel.cuh");
}

bool has_converted_ends(const CudaContext& ctx, const GemmParams& p) {
  return takes_converted(ctx, p) && p.weight.format != WeightFormat::kFp8;
}

bool takes_converted_activation(const CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows > 16 || p.weight.n / 2 % kPackedRows != 0) return false;
  return p.weight.format == WeightFormat::kInt4
             ? takes_converted_activation<WeightFormat::kInt4>(ctx, p)
             : takes_converted_activation<WeightFormat::kNvfp4>(ctx, p);
}

}  // namespace paceline::cuda
