// SPDX-License-Identifier: Apache-2.0

#include "gemm/packed_launch.cuh"

namespace paceline::cuda {

template <>
void launch_expert_gemm<WeightFormat::kMxfp4>(CudaContext& ctx, const ExpertGemmParams& p,
                                              const ProductCall& call) {
  launch_packed_format<WeightFormat::kMxfp4>(ctx, p, call);
}

}  // namespace paceline::cuda
