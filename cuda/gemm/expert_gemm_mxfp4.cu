// SPDX-License-Identifier: Apache-2.0

#include "gemm/expert_launch.cuh"

namespace paceline::cuda {

template <>
void launch_expert_gemm<WeightFormat::kMxfp4>(CudaContext& ctx, const ExpertGemmParams& p,
                                              const int32_t* num_rows) {
  constexpr WeightFormat kFormat = WeightFormat::kMxfp4;
  const int32_t rows = rows_to_expect(p);
  if (rows <= 16) return launch_expert_shape<ExpertShape<kFormat, 1, 16>>(ctx, p, num_rows);
  if (rows <= 32) return launch_expert_shape<ExpertShape<kFormat, 1, 32>>(ctx, p, num_rows);
  if (rows <= 64) return launch_expert_shape<ExpertShape<kFormat, 1, 64>>(ctx, p, num_rows);
  launch_expert_shape<ExpertShape<kFormat, 2, 128>>(ctx, p, num_rows);
}

}  // namespace paceline::cuda
