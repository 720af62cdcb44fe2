// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "gemm/expert_tiles.cuh"
#include "gemm/scale_args.h"

namespace paceline::cuda {

// A product of packed weights, of one matrix or by expert, as its kernels get it.
struct PackedArgs {
  ExpertRows rows;
  ScaleArgs scales;
  const std::byte* data;
  int64_t data_stride;  // bytes from expert to expert
  const __nv_bfloat16* x;
  int64_t x_stride;
  const int32_t* x_rows;  // or null
  const float* bias;      // [num_experts, n], or null
  void* y;
  int64_t y_stride;
  bool is_y_float;  // else bfloat16
  int32_t n;
  int32_t k;
  int32_t num_stages;      // of the ring of wide_kernel.cuh
  uint64_t weight_policy;  // of L2
};

}  // namespace paceline::cuda
