// SPDX-License-Identifier: Apache-2.0

// Products by expert, and products of weights with scales.

#include "gemm/expert_kernel.cuh"
#include "gemm/expert_launch.cuh"
#include "gemm/gemm_launch.cuh"
#include "gemm/tensor_map.h"

namespace paceline {
namespace cuda {

namespace {

// Stages that a ring needs. The outputs pass through the ring's memory, too.
template <class Shape>
inline constexpr int32_t kLeastStages =
    std::max(Shape::kMinStages,
             (StagedTile<float, Shape>::kBytes + Shape::kStageBytes - 1) / Shape::kStageBytes);

template <class Shape>
void launch_expert_shape(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  auto* const kernel = &expert_gemm_kernel<Shape>;
  static const bool is_allowed = [&] {
    allow_shared_bytes(kernel, kMaxSharedBytes, "expert_gemm");
    return true;
  }();
  static_cast<void>(is_allowed);
  const WeightMatrix& w = p.weight.first;
  const ExpertRows rows = expert_rows(p, call, Shape::kWeights);
  const int64_t blocks =
      max_row_tiles(p.expert_begin != nullptr, p.weight.num_experts, p.max_rows, Shape::kTokens) *
      rows.column_tiles;
  // A block that has a multiprocessor to itself keeps more bytes in flight.
  const int32_t ring_bytes = blocks <= ctx.num_sms ? 200 << 10 : Shape::kRingBytes;
  const int32_t num_stages = std::clamp(ring_bytes / Shape::kStageBytes, kLeastStages<Shape>,
                                        std::min(kMaxStages, kMaxRingBytes / Shape::kStageBytes));
  const ExpertGemmArgs args = {
      .rows = rows,
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
      .weight_policy = rows_to_expect(p) > Shape::kTokens ? kEvictNormal : kEvictFirst,
      .follows_product = p.follows_product,
      .shared_weights =
          p.shared_expert < 0 ? nullptr : w.data + p.shared_expert * p.weight.data_stride,
      .shared_bytes = w.n * w.row_bytes()};
  // One matrix has no stride of its own; the copy engine wants a multiple of 16.
  const int64_t stride = p.weight.num_experts > 1 ? p.weight.data_stride : w.n * w.row_bytes();
  launch(ctx, "expert_gemm", kernel, dim3(static_cast<uint32_t>(blocks)), dim3(Shape::kThreads),
         static_cast<size_t>(num_stages) * Shape::kStageBytes + 1024,
         byte_map(w.data, p.weight.num_experts, stride, w.n, w.row_bytes(), Shape::kWeights,
                  Shape::kBoxBytes),
         args);
}

// The width of a tile: 16, 32, 64 or 128 rows.
// - In a mixture, room for twice the mean of an expert's rows, which a random routing seldom
//   exceeds; up to 32 rows, of which two tiles share a multiprocessor, for one and a half times.
// - Of one matrix, room for all rows; but narrower where that leaves most multiprocessors without a
//   tile. Then two blocks read the same weights, the second one from L2.
int32_t tile_width(const CudaContext& ctx, const ExpertGemmParams& p) {
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

}  // namespace

template <>
void launch_expert_gemm<WeightFormat::kPlain>(CudaContext& ctx, const ExpertGemmParams& p,
                                              const ProductCall& call) {
  switch (tile_width(ctx, p)) {
    case 16:
      return launch_expert_shape<ExpertShape<1, 16>>(ctx, p, call);
    case 32:
      return launch_expert_shape<ExpertShape<1, 32>>(ctx, p, call);
    case 64:
      return launch_expert_shape<ExpertShape<1, 64>>(ctx, p, call);
    default:
      return launch_expert_shape<ExpertShape<1, 128>>(ctx, p, call);
  }
}

void launch_any_format(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const WeightMatrix& w = p.weight.first;
  if (w.dtype == DType::kFloat32) {
    PACELINE_CHECK(p.y_dtype == DType::kFloat32, "float32 products have float32 outputs");
    return launch_float_gemm(ctx, p, call);
  }
  PACELINE_CHECK(w.dtype == DType::kBFloat16, "products are of float32 or bfloat16");
  check_expert_gemm(p);
  switch (w.format) {
    case WeightFormat::kPlain:
      return launch_expert_gemm<WeightFormat::kPlain>(ctx, p, call);
    case WeightFormat::kFp8:
      return launch_expert_gemm<WeightFormat::kFp8>(ctx, p, call);
    case WeightFormat::kMxfp4:
      return launch_expert_gemm<WeightFormat::kMxfp4>(ctx, p, call);
    case WeightFormat::kInt4:
      PACELINE_CHECK(false, "no GPU has a product in int4");
  }
}

}  // namespace cuda

namespace {

void launch_experts(CudaContext& ctx, const ExpertGemmParams& p, const cuda::ProductCall& call) {
  if (p.max_rows <= 0) return;
  const WeightMatrix& w = p.weight.first;
  if (ctx.trace != nullptr) {
    ctx.trace->label_next(concat("expert_gemm ", p.weight.num_experts, "x", w.n, "x", w.k));
  }
  PACELINE_CHECK(p.x_dtype == w.dtype, "on a GPU x has the dtype of the weights");
  cuda::launch_any_format(ctx, p, call);
}

}  // namespace

void expert_gemm(CudaContext& ctx, const ExpertGemmParams& p) { launch_experts(ctx, p, {}); }

void activated_experts(CudaContext& ctx, const ActivatedExpertsParams& p) {
  check_activation(p);
  // Models of other formats have gate and up in halves, which are in tiles far apart. (The kernels
  // of fp8 would need more registers.)
  const WeightMatrix& w = p.product.weight.first;
  if (w.format == WeightFormat::kMxfp4 && w.is_packed() && p.activation.is_interleaved &&
      p.activation.dtype == DType::kBFloat16 && cuda::ends_products(p.activation.activation)) {
    return launch_experts(ctx, p.product, {.activation = &p.activation});
  }
  expert_gemm(ctx, p.product);
  gated_activation(ctx, p.activation);
}

}  // namespace paceline
