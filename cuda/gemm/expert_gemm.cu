// SPDX-License-Identifier: Apache-2.0

// Products by expert, and products of weights with scales.

#include "gemm/expert_launch.cuh"

namespace paceline {
namespace cuda {

template <>
void launch_expert_gemm<WeightFormat::kPlain>(CudaContext& ctx, const ExpertGemmParams& p,
                                              const int32_t* num_rows) {
  launch_expert_format<WeightFormat::kPlain>(ctx, p, num_rows);
}

void launch_any_format(CudaContext& ctx, const ExpertGemmParams& p, const int32_t* num_rows) {
  const WeightMatrix& w = p.weight.first;
  if (w.dtype == DType::kFloat32) {
    PACELINE_CHECK(p.y_dtype == DType::kFloat32, "float32 products have float32 outputs");
    return launch_float_gemm(ctx, p, num_rows);
  }
  PACELINE_CHECK(w.dtype == DType::kBFloat16, "products are of float32 or bfloat16");
  check_expert_gemm(p);
  switch (w.format) {
    case WeightFormat::kPlain:
      return launch_expert_gemm<WeightFormat::kPlain>(ctx, p, num_rows);
    case WeightFormat::kFp8:
      return launch_expert_gemm<WeightFormat::kFp8>(ctx, p, num_rows);
    case WeightFormat::kMxfp4:
      return launch_expert_gemm<WeightFormat::kMxfp4>(ctx, p, num_rows);
  }
}

}  // namespace cuda

void expert_gemm(CudaContext& ctx, const ExpertGemmParams& p) {
  if (p.max_rows <= 0) return;
  const WeightMatrix& w = p.weight.first;
  if (ctx.trace != nullptr) {
    ctx.trace->label_next(concat("expert_gemm ", p.weight.num_experts, "x", w.n, "x", w.k));
  }
  PACELINE_CHECK(p.x_dtype == w.dtype, "on a GPU x has the dtype of the weights");
  cuda::launch_any_format(ctx, p, nullptr);
}

}  // namespace paceline
