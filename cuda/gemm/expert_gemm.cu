// SPDX-License-Identifier: Apache-2.0

// Products by expert, and products of weights with scales.

#include "common/kernel_trace.h"
#include "device/cuda_context.h"
#include "elementwise/gate_up.cuh"
#include "gemm/expert_launch.cuh"
#include "gemm/portable_gemm.h"

namespace paceline {
namespace cuda {

void launch_any_format(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const WeightMatrix& w = p.weight.first;
  if (w.dtype == DType::kFloat32) {
    PACELINE_CHECK(p.y_dtype == DType::kFloat32, "float32 products have float32 outputs");
    return launch_float_gemm(ctx, p, call);
  }
  PACELINE_CHECK(w.dtype == DType::kBFloat16, "products are of float32 or bfloat16");
  check_expert_gemm(p);
  if (ctx.is_portable) {
    if (w.format == WeightFormat::kPlain) return launch_portable_gemm(ctx, p, call);
    return launch_portable_packed(ctx, p, call);
  }
  switch (w.format) {
    case WeightFormat::kPlain:
      return launch_expert_gemm<WeightFormat::kPlain>(ctx, p, call);
    case WeightFormat::kFp8:
      return launch_expert_gemm<WeightFormat::kFp8>(ctx, p, call);
    case WeightFormat::kMxfp4:
      return launch_expert_gemm<WeightFormat::kMxfp4>(ctx, p, call);
    case WeightFormat::kInt4:
      return launch_expert_gemm<WeightFormat::kInt4>(ctx, p, call);
    case WeightFormat::kNvfp4:
      return launch_expert_gemm<WeightFormat::kNvfp4>(ctx, p, call);
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
