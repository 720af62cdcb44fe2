// SPDX-License-Identifier: Apache-2.0

#include "gemm/expert_launch.cuh"

namespace paceline::cuda {
namespace {

template <bool kHasTileSums>
void launch_fp8(CudaContext& ctx, const ExpertGemmParams& p, const int32_t* num_rows) {
  constexpr WeightFormat kFormat = WeightFormat::kFp8;
  const int32_t rows = rows_to_expect(p);
  if (rows <= 16) {
    return launch_expert_shape<ExpertShape<kFormat, 1, 16>, kHasTileSums>(ctx, p, num_rows);
  }
  if (rows <= 64) {
    return launch_expert_shape<ExpertShape<kFormat, 1, 64>, kHasTileSums>(ctx, p, num_rows);
  }
  // Sums of tiles take accumulators of their own.
  constexpr int32_t kWidest = kHasTileSums ? 64 : 128;
  launch_expert_shape<ExpertShape<kFormat, 2, kWidest>, kHasTileSums>(ctx, p, num_rows);
}

}  // namespace

template <>
void launch_expert_gemm<WeightFormat::kFp8>(CudaContext& ctx, const ExpertGemmParams& p,
                                            const int32_t* num_rows) {
  if (scale_args(p.weight).use == ScaleUse::kTileSums) return launch_fp8<true>(ctx, p, num_rows);
  launch_fp8<false>(ctx, p, num_rows);
}

}  // namespace paceline::cuda
