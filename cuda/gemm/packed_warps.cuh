// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches the kernels of packed weights whose warps read their own weights; they multiply by
// mma.sync and run on every GPU since sm_80. docs/kernels.md has the measurements.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gemm/expert_launch.cuh"
#include "gemm/int4_kernel.cuh"
#include "gemm/mxfp4_kernel.cuh"
#include "gemm/narrow_kernel.cuh"
#include "gemm/parts_kernel.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda {

// Blocks of a kernel whose tiles have `weights` by `tokens` outputs.
inline int64_t num_packed_blocks(const ExpertGemmParams& p, int32_t weights, int32_t tokens) {
  return max_row_tiles(p.expert_begin != nullptr, p.weight.num_experts, p.max_rows, tokens) *
         ((p.weight.first.n + weights - 1) / weights);
}

inline GatedEnd gated_end(const ProductCall& call) {
  if (call.activation == nullptr) return {};
  return {.is_gated = true,
          .activation = call.activation->activation,
          .alpha = call.activation->alpha,
          .limit = call.activation->limit};
}

// The arguments of a kernel whose tiles have `weights` by `tokens` outputs.
inline PackedArgs packed_args(const ExpertGemmParams& p, const ProductCall& call, int32_t weights,
                              int32_t tokens, int32_t num_stages = 0) {
  const WeightMatrix& w = p.weight.first;
  return {.rows = expert_rows(p, call, weights),
          .scales = scale_args(p.weight),
          .int4 = int4_args(w),
          .data = w.data,
          .data_stride = p.weight.data_stride,
          .x = static_cast<const __nv_bfloat16*>(p.x),
          .x_stride = p.x_stride,
          .x_rows = p.x_rows,
          .bias = p.bias,
          .y = call.activation != nullptr ? call.activation->y : p.y,
          .y_stride = call.activation != nullptr ? call.activation->intermediate : p.y_stride,
          .is_y_float = p.y_dtype == DType::kFloat32,
          .n = w.n,
          .k = w.k,
          .group_rows = p.num_groups > 1 ? w.n / p.num_groups : 0,
          .num_stages = num_stages,
          .follows_product = p.follows_product,
          .weight_policy = rows_to_expect(p) > tokens ? kEvictNormal : kEvictFirst,
          .end = gated_end(call)};
}

// Launches `kernel`, whose tiles have `weights` by `tokens` outputs.
inline void launch_packed(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call,
                          void (*kernel)(PackedArgs), int32_t weights, int32_t tokens,
                          int32_t threads, int32_t shared_bytes) {
  launch(ctx, "expert_gemm", kernel,
         dim3(static_cast<uint32_t>(num_packed_blocks(p, weights, tokens))), dim3(threads),
         static_cast<size_t>(shared_bytes), packed_args(p, call, weights, tokens));
}

// Allows `kernel` the shared memory that it needs, once for each kernel of a type.
template <auto kernel>
void allow_packed_bytes(int32_t bytes) {
  static OncePerDevice allow;
  allow([&] { allow_shared_bytes(kernel, static_cast<size_t>(bytes), "expert_gemm"); });
}

template <class Shape, bool kHasTileSums>
void launch_narrow(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  constexpr auto kernel = &narrow_gemm_kernel<Shape, kHasTileSums>;
  allow_packed_bytes<kernel>(Shape::kSharedBytes);
  launch_packed(ctx, p, call, kernel, Shape::kRows, Shape::kTokens, Shape::kThreads,
                Shape::kSharedBytes);
}

template <class Shape>
void launch_mxfp4(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  constexpr auto kernel = &mxfp4_gemm_kernel<Shape>;
  allow_packed_bytes<kernel>(Shape::kSharedBytes);
  launch_packed(ctx, p, call, kernel, Shape::kRows, Shape::kTokens, Shape::kThreads,
                Shape::kSharedBytes);
}

// Tiles of int4 weights.
template <int32_t row_tiles, int32_t token_tiles, int32_t warps, int32_t blocks>
void launch_int4(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const WeightMatrix& w = p.weight.first;
  const auto launch_shape = [&]<bool is_float16, bool is_general>() {
    using Shape = Int4Shape<row_tiles, token_tiles, warps, blocks, is_float16, is_general>;
    constexpr auto kernel = &int4_gemm_kernel<Shape>;
    allow_packed_bytes<kernel>(Shape::kSharedBytes);
    launch_packed(ctx, p, call, kernel, Shape::kRows, Shape::kTokens, Shape::kThreads,
                  Shape::kSharedBytes);
  };
  const bool is_general = w.order != nullptr || w.scale_cols % kPackedColumns != 0;
  if (w.scale_dtype == DType::kFloat16) {
    return is_general ? launch_shape.template operator()<true, true>()
                      : launch_shape.template operator()<true, false>();
  }
  is_general ? launch_shape.template operator()<false, true>()
             : launch_shape.template operator()<false, false>();
}

template <class Shape>
void launch_parts(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  constexpr auto kernel = &parts_gemm_kernel<Shape>;
  allow_packed_bytes<kernel>(Shape::kSharedBytes);
  launch_packed(ctx, p, call, kernel, Shape::kRows, Shape::kTokens, Shape::kThreads,
                Shape::kSharedBytes);
}

// Row tiles of 16 weights that a pass is expected to compute, for each multiprocessor.
inline int64_t row_tiles_per_sm(const CudaContext& ctx, const ExpertGemmParams& p) {
  const int32_t hit = p.expert_begin == nullptr ? 1 : std::min(p.weight.num_experts, p.max_rows);
  return p.weight.first.packed_tile_rows() * hit / ctx.num_sms;
}

// Every warp computes rows of weights alone. Tiles have up to 16 tokens.
template <WeightFormat format, bool kHasTileSums>
void launch_warps(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const int64_t row_tiles = row_tiles_per_sm(ctx, p);
  const bool is_narrow = rows_to_expect(p) <= 8;
  // A matrix has as many warps with four rows as with one; rows of a mixture have several experts.
  [[maybe_unused]] const bool has_many_warps =
      row_tiles >= 64 || (p.expert_begin != nullptr && rows_to_expect(p) >= 4);
  if constexpr (format == WeightFormat::kMxfp4) {
    if (!is_narrow) return launch_mxfp4<Mxfp4Shape<2, 2, 4, 4>>(ctx, p, call);
    if (row_tiles >= 64 || rows_to_expect(p) >= 4) {
      return launch_mxfp4<Mxfp4Shape<2, 1, 4, 5>>(ctx, p, call);
    }
    // Where few warps share a multiprocessor, more of them with 16 rows each are faster; and where
    // they leave some of it free, in blocks of two, beside which the next product may start.
    if (row_tiles >= 32) return launch_mxfp4<Mxfp4Shape<1, 1, 4, 6>>(ctx, p, call);
    launch_mxfp4<Mxfp4Shape<1, 1, 2, 8>>(ctx, p, call);
  } else if constexpr (format == WeightFormat::kNvfp4) {
    // As many blocks as share the memory of a multiprocessor.
    if (!is_narrow) return launch_mxfp4<Mxfp4Shape<2, 2, 4, 3, format>>(ctx, p, call);
    if (has_many_warps) return launch_mxfp4<Mxfp4Shape<2, 1, 4, 5, format>>(ctx, p, call);
    launch_mxfp4<Mxfp4Shape<1, 1, 2, 7, format>>(ctx, p, call);
  } else if constexpr (format == WeightFormat::kInt4) {
    if (!is_narrow) return launch_int4<2, 2, 4, 4>(ctx, p, call);
    if (has_many_warps) return launch_int4<2, 1, 4, 5>(ctx, p, call);
    launch_int4<1, 1, 2, 8>(ctx, p, call);
  } else {
    if (!is_narrow) return launch_narrow<NarrowShape<format, 2, 4>, kHasTileSums>(ctx, p, call);
    if (row_tiles < 16) {
      return launch_narrow<NarrowShape<format, 1, 2>, kHasTileSums>(ctx, p, call);
    }
    launch_narrow<NarrowShape<format, 1, 4>, kHasTileSums>(ctx, p, call);
  }
}

}  // namespace paceline::cuda
