// SPDX-License-Identifier: Apache-2.0

// Chooses the tiles of normed products. The kernel is in normed_kernel.cuh.

#include "gemm/normed_gemm.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gemm/gemm_launch.cuh"
#include "gemm/normed_kernel.cuh"

namespace paceline::cuda {
namespace {

// Sums of squares and barriers take the rest.
constexpr int32_t kMaxNormedBytes = kMaxSharedBytes - 1024;

// The row in shared memory, and what the last product reads behind it.
int64_t row_bytes(int32_t k) { return int64_t{kNormedTileRows} * k * 2 + 1024; }

template <int32_t weights, int32_t vectors>
void launch_shape(CudaContext& ctx, const NormedGemmParams& p) {
  using Shape = NormedShape<weights, vectors>;
  auto* const kernel = &normed_gemm_kernel<Shape>;
  static OncePerDevice allow;
  allow([&] { allow_shared_bytes(kernel, kMaxNormedBytes, "normed_gemm"); });
  const GemmParams& product = p.product;
  const bool is_gated = p.has_activation;
  const int32_t n = is_gated ? p.activation.intermediate : product.weight.n;
  const int32_t k = product.weight.k;
  const int32_t tile_columns = is_gated ? weights / 2 : weights;
  const int32_t num_tiles = (n + tile_columns - 1) / tile_columns;
  const int32_t waves = (num_tiles + ctx.num_sms - 1) / ctx.num_sms;
  constexpr int32_t kStagedBytes = StagedTile<__nv_bfloat16, typename Shape::Base>::kBytes;
  const auto other_bytes = static_cast<int32_t>(row_bytes(k)) + kStagedBytes;
  const int32_t num_stages =
      std::min(kMaxStages, (kMaxNormedBytes - 1024 - other_bytes) / Shape::kStageBytes);
  const NormedGemmArgs args = {
      .gemm = {.num_rows = product.num_rows,
               .max_rows = product.max_rows,
               .bias = product.bias,
               .y = is_gated ? p.activation.y : product.y,
               .y_stride = is_gated ? n : product.y_stride,
               .n = n,
               .k = k,
               .num_stages = num_stages,
               .stage_bytes = Shape::kStageBytes,
               .block_tokens = kNormedTileRows,
               .copy_steps = copied_steps(k, Shape::kSteps),
               .gated = is_gated ? GatedRows{.up_row = n,
                                             .activation = p.activation.activation,
                                             .alpha = p.activation.alpha,
                                             .limit = p.activation.limit}
                                 : GatedRows{},
               .delays_successor = product.delays_successor},
      .norm = {.x = static_cast<const float*>(p.norm.x),
               .weight = p.norm.weight,
               .weight_offset = p.norm.weight_offset,
               .eps = p.norm.eps,
               .virtual_warps = static_cast<int32_t>(register_rows(k).threads / 32)},
      .num_tiles = num_tiles};
  // Every block has as many tiles, or one less.
  launch(ctx, "normed_gemm", kernel, dim3(static_cast<uint32_t>((num_tiles + waves - 1) / waves)),
         dim3(Shape::kThreads),
         static_cast<size_t>(num_stages * Shape::kStageBytes + other_bytes + 1024),
         weight_map(product.weight, args.gemm, tile_columns), args);
}

template <int32_t vectors>
void launch_vectors(CudaContext& ctx, const NormedGemmParams& p) {
  if (p.has_activation) return launch_shape<64, vectors>(ctx, p);
  // The weights that the busiest multiprocessor reads; of equals, the tile with fewer waves.
  const auto cost = [&](int32_t weights) {
    const int32_t tiles = (p.product.weight.n + weights - 1) / weights;
    return (tiles + ctx.num_sms - 1) / ctx.num_sms * weights;
  };
  const int32_t least = std::min({cost(64), cost(48), cost(40), cost(32)});
  if (cost(64) == least) return launch_shape<64, vectors>(ctx, p);
  if (cost(48) == least) return launch_shape<48, vectors>(ctx, p);
  if (cost(40) == least) return launch_shape<40, vectors>(ctx, p);
  launch_shape<32, vectors>(ctx, p);
}

}  // namespace

bool takes_norm(const CudaContext& ctx, const NormedGemmParams& p) {
  const RmsNormParams& norm = p.norm;
  const int32_t k = p.product.weight.k;
  const bool is_norm_alone = norm.residual == nullptr && norm.weight != nullptr &&
                             norm.x_dtype == DType::kFloat32 && norm.y_dtype == DType::kBFloat16 &&
                             fits_registers(norm);
  return is_norm_alone && norm.hidden == k && norm.y == p.product.x && k % (2 * 64) == 0 &&
         p.product.max_rows == 1 && p.product.y_dtype == DType::kBFloat16 &&
         row_bytes(k) <= kMaxRingBytes / 2 && !ctx.is_portable;
}

void launch_normed_gemm(CudaContext& ctx, const NormedGemmParams& p) {
  if (register_rows(p.product.weight.k).vectors == 1) return launch_vectors<1>(ctx, p);
  launch_vectors<2>(ctx, p);
}

}  // namespace paceline::cuda
