// SPDX-License-Identifier: Apache-2.0

// Chooses the tile of a portable product.

#include "gemm/portable_gemm.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "gemm/expert_launch.cuh"
#include "gemm/portable_kernel.cuh"

namespace paceline::cuda {
namespace portable {
namespace {

// Weights by tokens. The memory bounds tiles of few tokens: their stages have 128 columns.
using P16x8 = TileShape<Rows::kWeights, 1, 1, 1, 1, 128, 8>;
using P64x8 = TileShape<Rows::kWeights, 4, 1, 1, 1, 128, 4>;
using P16x16 = TileShape<Rows::kTokens, 2, 1, 1, 1, 128, 8>;
using P64x16 = TileShape<Rows::kWeights, 4, 1, 1, 2, 128, 4>;
using P16x32 = TileShape<Rows::kTokens, 2, 1, 2, 1, 128, 4>;
using P32x32 = TileShape<Rows::kTokens, 4, 1, 2, 1, 128, 3>;
using P16x64 = TileShape<Rows::kWeights, 1, 4, 1, 2, 128, 4>;
using P32x64 = TileShape<Rows::kWeights, 2, 4, 1, 2, 128, 2>;
using P48x64 = TileShape<Rows::kWeights, 1, 4, 3, 2, 128, 1>;
using P64x64 = TileShape<Rows::kWeights, 2, 2, 2, 4, 64, 2>;
using P96x64 = TileShape<Rows::kWeights, 2, 2, 3, 4, 64, 2>;
using P128x64 = TileShape<Rows::kWeights, 2, 2, 4, 4, 64, 2>;
using P128x128 = TileShape<Rows::kWeights, 2, 2, 4, 8, 64, 2>;

// The blocks of a launch; most of a mixture's may have nothing to do.
template <class Shape>
int64_t num_blocks(const ExpertGemmParams& p) {
  return max_row_tiles(p.expert_begin != nullptr, p.weight.num_experts, p.max_rows,
                       Shape::kTokens) *
         ((p.weight.first.n + Shape::kWeights - 1) / Shape::kWeights);
}

// The blocks of one multiprocessor divide its shared memory.
template <class Shape>
int32_t num_stages(const CudaContext& ctx, int64_t blocks) {
  constexpr int32_t kReservedBytes = 1 << 10;  // which CUDA takes for each block
  const auto sharing = static_cast<int32_t>(
      std::clamp<int64_t>((blocks + ctx.num_sms - 1) / ctx.num_sms, 1, Shape::kBlocks));
  const int32_t ring_bytes =
      std::min(ctx.block_shared_bytes, ctx.sm_shared_bytes / sharing - kReservedBytes);
  return std::clamp(ring_bytes / Shape::kStageBytes, Shape::kMinStages, kMaxStages);
}

template <class Shape>
void launch_shape(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call,
                  const GatedActivationParams* halves) {
  constexpr auto kernel = &gemm_kernel<Shape>;
  static OncePerDevice allow;
  allow([&] {
    allow_shared_bytes(kernel, static_cast<size_t>(ctx.block_shared_bytes), "portable_gemm");
  });
  const WeightMatrix& w = p.weight.first;
  const int64_t blocks = num_blocks<Shape>(p);
  const int32_t stages = num_stages<Shape>(ctx, blocks);
  const int32_t shared_bytes = stages * Shape::kStageBytes;
  PACELINE_CHECK(shared_bytes <= ctx.block_shared_bytes, "a tile needs ", shared_bytes,
                 " bytes of shared memory; a block of this GPU has ", ctx.block_shared_bytes);
  const Args args = {
      .rows = expert_rows(p, call, Shape::kWeights),
      .weights = reinterpret_cast<const __nv_bfloat16*>(w.data),
      .expert_stride = p.weight.data_stride / static_cast<int64_t>(sizeof(__nv_bfloat16)),
      .x = static_cast<const __nv_bfloat16*>(p.x),
      .x_stride = p.x_stride,
      .x_rows = p.x_rows,
      .bias = p.bias,
      .y = halves != nullptr ? halves->y : p.y,
      .y_stride = halves != nullptr ? halves->intermediate : p.y_stride,
      .is_y_float = p.y_dtype == DType::kFloat32,
      .n = halves != nullptr ? halves->intermediate : w.n,
      .k = w.k,
      .num_stages = stages,
      .starts_early = ctx.has_early_starts,
      .follows_product = p.follows_product,
      .gated = halves != nullptr ? GatedRows{.up_row = halves->intermediate,
                                             .activation = halves->activation,
                                             .alpha = halves->alpha,
                                             .limit = halves->limit}
                                 : GatedRows{}};
  launch(ctx, "portable_gemm", kernel, dim3(static_cast<uint32_t>(blocks)), dim3(Shape::kThreads),
         static_cast<size_t>(shared_bytes), args);
}

using Launch = void (*)(CudaContext&, const ExpertGemmParams&, const ProductCall&,
                        const GatedActivationParams*);

// Of few expected rows: large tiles where each multiprocessor gets 128 rows of weights, as they
// read the tokens less often, and else small ones, so that all multiprocessors have work.
template <class Large, class Small>
Launch launch_of_few(const CudaContext& ctx, const ExpertGemmParams& p) {
  const int64_t hit = p.expert_begin == nullptr ? 1 : std::min(p.weight.num_experts, p.max_rows);
  return hit * p.weight.first.n >= int64_t{128} * ctx.num_sms ? &launch_shape<Large>
                                                              : &launch_shape<Small>;
}

// Keeps the tile that takes the busiest multiprocessor the least time.
class Cheapest {
 public:
  Cheapest(const CudaContext& ctx, const ExpertGemmParams& p) : ctx_(ctx), p_(p) {}

  // Microseconds over 4,096 columns on an H200: `alone` of a tile that has a multiprocessor to
  // itself, `together` of Shape::kBlocks that share it.
  template <class Shape>
  void consider(double alone, double together) {
    const int64_t blocks = num_blocks<Shape>(p_);
    const int64_t at_once = int64_t{Shape::kBlocks} * ctx_.num_sms;
    const int64_t rounds = (blocks + at_once - 1) / at_once;
    const double cost = blocks <= ctx_.num_sms ? alone : together * static_cast<double>(rounds);
    if (cost >= least_) return;
    least_ = cost;
    launch_ = &launch_shape<Shape>;
  }
  [[nodiscard]] Launch launch() const { return launch_; }

 private:
  const CudaContext& ctx_;
  const ExpertGemmParams& p_;
  double least_ = std::numeric_limits<double>::infinity();
  Launch launch_ = nullptr;
};

Launch launch_for(const CudaContext& ctx, const ExpertGemmParams& p) {
  const int32_t rows = rows_to_expect(p);
  if (rows <= 8) return launch_of_few<P64x8, P16x8>(ctx, p);
  if (rows <= 16) return launch_of_few<P64x16, P16x16>(ctx, p);
  // As expert_gemm_plain.cu: one and a half times the mean of an expert's rows.
  if (rows <= (p.expert_begin != nullptr ? 42 : 32)) return launch_of_few<P32x32, P16x32>(ctx, p);
  Cheapest cheapest(ctx, p);
  if (rows <= 64) {
    cheapest.consider<P16x64>(11, 36);
    cheapest.consider<P32x64>(15.5, 29);
    cheapest.consider<P48x64>(17.5, 18.5);
    cheapest.consider<P64x64>(18.5, 33);
    cheapest.consider<P96x64>(35, 50);
    cheapest.consider<P128x64>(42, 60);
  } else {
    cheapest.consider<P64x64>(18.5, 33);
    cheapest.consider<P128x128>(46, 92);
  }
  return cheapest.launch();
}

}  // namespace
}  // namespace portable

void launch_portable_gemm(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call,
                          const GatedActivationParams* halves) {
  PACELINE_CHECK(call.activation == nullptr && (halves == nullptr || p.expert_begin == nullptr));
  check_expert_gemm(p);
  portable::launch_for(ctx, p)(ctx, p, call, halves);
}

bool takes_portable_activation(const GemmParams& p) { return p.max_rows <= 64; }

}  // namespace paceline::cuda
