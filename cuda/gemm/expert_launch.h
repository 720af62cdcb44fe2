// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of weights of any format, of one matrix or of a mixture's. A product of one matrix is a
// mixture of one expert: p.expert_begin is null, and the rows are [0, *num_rows).

#include <cstdint>

#include "ops/moe.h"

namespace paceline {

struct CudaContext;

namespace cuda {

// What a product needs beside its ExpertGemmParams.
struct ProductCall {
  const int32_t* num_rows = nullptr;  // [1] of one matrix
  // Of experts of kMxfp4 whose rows are gate and up by turns, or of bfloat16 with gate and up in
  // halves: y gets the activation of the product. Null: the product.
  const GatedActivationParams* activation = nullptr;
  bool delays_successor = false;  // as in GemmParams
};

// Launches the kernel for the format and dtype of the weights.
void launch_any_format(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call);

// bfloat16, on tensor cores; every format is compiled in a file of its own.
template <WeightFormat format>
void launch_expert_gemm(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call);
template <>
void launch_expert_gemm<WeightFormat::kPlain>(CudaContext&, const ExpertGemmParams&,
                                              const ProductCall&);
template <>
void launch_expert_gemm<WeightFormat::kFp8>(CudaContext&, const ExpertGemmParams&,
                                            const ProductCall&);
template <>
void launch_expert_gemm<WeightFormat::kMxfp4>(CudaContext&, const ExpertGemmParams&,
                                              const ProductCall&);
template <>
void launch_expert_gemm<WeightFormat::kNvfp4>(CudaContext&, const ExpertGemmParams&,
                                              const ProductCall&);
template <>
void launch_expert_gemm<WeightFormat::kInt4>(CudaContext&, const ExpertGemmParams&,
                                             const ProductCall&);

// float32: a plain kernel, for tests.
void launch_float_gemm(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call);

}  // namespace cuda
}  // namespace paceline
