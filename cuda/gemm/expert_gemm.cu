// SPDX-License-Identifier: Apache-2.0

// Products by expert, and products of weights with scales.

#include "gemm/expert_kernel.cuh"
#include "gemm/expert_launch.cuh"
#include "gemm/gemm_launch.cuh"
#include "gemm/tensor_map.h"

namespace paceline {
namespace cuda {

namespace {

// Stages that a ring needs. The outputs may pass through the ring's memory, too.
template <class Shape>
inline constexpr int32_t kLeastStages =
    std::max(Shape::kMinStages,
             (StagedTile<float, Shape>::kBytes + Shape::kStageBytes - 1) / Shape::kStageBytes);

// Blocks that share a multiprocessor where a block computes several tiles.
constexpr int64_t kBlocksPerSm = 2;

template <class Shape>
void launch_expert_shape(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  auto* const kernel = &expert_gemm_kernel<Shape>;
  static const bool is_allowed = [&] {
    allow_shared_bytes(kernel, kMaxSharedBytes, "expert_gemm");
    return true;
  }();
  static_cast<void>(is_allowed);
  static_assert(!Shape::kIsPersistent || Shape::kStagedBytes >= StagedTile<float, Shape>::kBytes);
  const WeightMatrix& w = p.weight.first;
  const GatedActivationParams* const activation = call.activation;
  const int32_t n = activation != nullptr ? activation->intermediate : w.n;
  const int32_t box_rows = activation != nullptr ? Shape::kWeights / 2 : Shape::kWeights;
  const ExpertRows rows = {.expert_begin = p.expert_begin,
                           .num_rows = call.num_rows,
                           .num_experts = p.weight.num_experts,
                           .max_rows = p.max_rows,
                           .column_tiles = (n + box_rows - 1) / box_rows};
  const bool is_mixture = p.expert_begin != nullptr;
  const int64_t tiles =
      max_row_tiles(is_mixture, p.weight.num_experts, p.max_rows, Shape::kTokens) *
      rows.column_tiles;
  // A block that has a multiprocessor to itself keeps more bytes in flight.
  const int32_t ring_bytes = tiles <= ctx.num_sms ? 200 << 10 : Shape::kRingBytes;
  const int32_t num_stages = std::clamp(ring_bytes / Shape::kStageBytes, kLeastStages<Shape>,
                                        std::min(kMaxStages, kMaxRingBytes / Shape::kStageBytes));
  const ExpertGemmArgs args = {
      .rows = rows,
      .x = static_cast<const __nv_bfloat16*>(p.x),
      .x_stride = p.x_stride,
      .x_rows = p.x_rows,
      .bias = p.bias,
      .bias_stride = w.n,
      .y = activation != nullptr ? activation->y : p.y,
      .y_stride = activation != nullptr ? n : p.y_stride,
      .is_y_float = p.y_dtype == DType::kFloat32,
      .n = n,
      .k = w.k,
      .num_tiles = static_cast<int32_t>(tiles),
      .num_stages = num_stages,
      .gated = activation != nullptr ? GatedRows{.up_row = n,
                                                 .activation = activation->activation,
                                                 .alpha = activation->alpha,
                                                 .limit = activation->limit}
                                     : GatedRows{},
      .weight_policy = rows_to_expect(p) > Shape::kTokens ? kEvictNormal : kEvictFirst,
      .follows_product = p.follows_product,
      .shared_weights =
          p.shared_expert < 0 ? nullptr : w.data + p.shared_expert * p.weight.data_stride,
      .shared_bytes = w.n * w.row_bytes()};
  // One matrix has no stride of its own; the copy engine wants a multiple of 16.
  const int64_t stride = p.weight.num_experts > 1 ? p.weight.data_stride : w.n * w.row_bytes();
  const bool is_persistent = Shape::kIsPersistent && is_mixture;
  const int64_t blocks =
      is_persistent ? std::min<int64_t>(tiles, kBlocksPerSm * ctx.num_sms) : tiles;
  launch(ctx, "expert_gemm", kernel, dim3(static_cast<uint32_t>(blocks)), dim3(Shape::kThreads),
         static_cast<size_t>(num_stages) * Shape::kStageBytes + Shape::kStagedBytes + 1024,
         byte_map(w.data, p.weight.num_experts, stride, w.n, w.row_bytes(), box_rows,
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

// Whether the activation is the end of the product: where its tiles are narrow, and the ring fills
// for the next tile while one ends.
bool takes_activation(const CudaContext& ctx, const ExpertGemmParams& p) {
  return p.expert_begin != nullptr && tile_width(ctx, p) <= 32;
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
  // Gate and up are in neighbouring rows of the weights, or in halves of which a tile has a box
  // each. (The kernels of fp8 would need more registers.)
  const WeightMatrix& w = p.product.weight.first;
  const bool is_packed =
      w.format == WeightFormat::kMxfp4 && w.is_packed() && p.activation.is_interleaved;
  const bool is_halved = w.format == WeightFormat::kPlain && w.dtype == DType::kBFloat16 &&
                         !p.activation.is_interleaved && cuda::takes_activation(ctx, p.product);
  if ((is_packed || is_halved) && p.activation.dtype == DType::kBFloat16 &&
      cuda::ends_products(p.activation.activation)) {
    return launch_experts(ctx, p.product, {.activation = &p.activation});
  }
  expert_gemm(ctx, p.product);
  gated_activation(ctx, p.activation);
}

}  // namespace paceline
