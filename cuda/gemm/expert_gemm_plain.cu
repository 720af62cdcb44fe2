// SPDX-License-Identifier: Apache-2.0

// Products of a mixture's bfloat16 weights on sm_90a.

#include "gemm/expert_kernel.cuh"
#include "gemm/expert_launch.cuh"
#include "gemm/gemm_launch.cuh"
#include "gemm/tensor_map.h"

namespace paceline::cuda {
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
  static OncePerDevice allow;
  allow([&] { allow_shared_bytes(kernel, kMaxSharedBytes, "expert_gemm"); });
  static_assert(!Shape::kIsPersistent || Shape::kStagedBytes >= StagedTile<float, Shape>::kBytes);
  const WeightMatrix& w = p.weight.first;
  const GatedActivationParams* const activation = call.activation;
  const int32_t n = activation != nullptr ? activation->intermediate : w.n;
  const int32_t box_rows = activation != nullptr ? Shape::kWeights / 2 : Shape::kWeights;
  // Gated, a tile has half as many columns of half as many outputs.
  const ExpertRows rows = expert_rows(p, call, Shape::kWeights);
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

}  // namespace

template <>
void launch_expert_gemm<WeightFormat::kPlain>(CudaContext& ctx, const ExpertGemmParams& p,
                                              const ProductCall& call) {
  switch (plain_tile_width(ctx, p)) {
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

}  // namespace paceline::cuda
