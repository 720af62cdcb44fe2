// SPDX-License-Identifier: Apache-2.0

#include "gemm/packed_launch.cuh"

namespace paceline::cuda {

template <>
void launch_expert_gemm<WeightFormat::kFp8>(CudaContext& ctx, const ExpertGemmParams& p,
                                            const ProductCall& call) {
  if (scale_args(p.weight).use == ScaleUse::kTileSums) {
    launch_packed_format<WeightFormat::kFp8, true>(ctx, p, call);
  } else {
    launch_packed_format<WeightFormat::kFp8>(ctx, p, call);
  }
}

}  // namespace paceline::cuda
