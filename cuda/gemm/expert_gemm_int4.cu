// SPDX-License-Identifier: Apache-2.0

#include "gemm/packed_launch.cuh"

namespace paceline::cuda {

template <>
void launch_expert_gemm<WeightFormat::kInt4>(CudaContext& ctx, const ExpertGemmParams& p,
                                             const ProductCall& call) {
  launch_four_bits<WeightFormat::kInt4>(ctx, p, call);
}

}  // namespace paceline::cuda
