// SPDX-License-Identifier: Apache-2.0

// Chooses who computes a product: the library, the kernels of sm_90a, those of every GPU, or those
// of weights with scales and of float32.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <paceline/error.h>

#include "base/check.h"
#include "common/kernel_trace.h"
#include "device/cuda_context.h"
#include "elementwise/gate_up.cuh"
#include "gemm/converted_gemm.h"
#include "gemm/expert_launch.h"
#include "gemm/gemm_planner.h"
#include "gemm/gemm_tiles.h"
#include "gemm/normed_gemm.h"
#include "gemm/portable_gemm.h"
#include "ops/ops.h"

namespace paceline {
namespace cuda {
namespace {

// Whether one launch computes all groups: the tiles of packed weights, of up to 128 rows, know the
// columns of x that they read.
bool takes_groups(const GemmParams& p) {
  return p.weight.is_packed() && p.weight.dtype == DType::kBFloat16 &&
         p.weight.n / p.num_groups % 128 == 0;
}

// The product of one group.
GemmParams group_of(const GemmParams& all, int32_t group) {
  GemmParams p = all;
  WeightMatrix& w = p.weight;
  w.n = all.weight.n / all.num_groups;
  const int64_t first = int64_t{group} * w.n;
  if ((w.is_packed() && w.n % kPackedRows != 0) ||
      (w.format == WeightFormat::kFp8 && w.n % w.scale_rows != 0)) {
    throw Unsupported(concat("groups of ", w.n,
                             " rows of weights with scales; on a GPU they must be a multiple of ",
                             std::max(kPackedRows, w.scale_rows)));
  }
  const int64_t tiles = first / kPackedRows * w.packed_tile_cols();
  w.data += w.is_packed() ? tiles * packed_tile_bytes(w.format) : first * w.row_bytes();
  if (w.format == WeightFormat::kFp8) {
    w.scales += first / w.scale_rows * w.num_scale_cols() * static_cast<int64_t>(sizeof(float));
  } else if (w.format == WeightFormat::kInt4) {
    const int64_t groups = w.num_scale_cols();
    w.scales += w.is_packed() ? first / kPackedRows * groups * kPackedInt4ScaleBytes
                              : first * groups * dtype_bytes(w.scale_dtype);
    if (w.zeros != nullptr) {
      w.zeros += w.is_packed() ? first / kPackedRows * ((groups + 1) / 2) * kPackedScaleBytes
                               : first * groups;
    }
  } else if (w.format == WeightFormat::kMxfp4) {
    w.scales += w.is_packed() ? tiles * kPackedScaleBytes : first * w.num_scale_cols();
  } else if (w.format == WeightFormat::kNvfp4) {
    w.scales += w.is_packed() ? tiles * kPackedNvfp4ScaleBytes
                              : first * w.num_scale_cols() * static_cast<int64_t>(sizeof(float));
  }
  p.x = static_cast<const std::byte*>(all.x) + int64_t{group} * w.k * dtype_bytes(all.x_dtype);
  if (all.bias != nullptr) p.bias = all.bias + first;
  p.y = static_cast<std::byte*>(all.y) + first * dtype_bytes(all.y_dtype);
  p.num_groups = 1;
  return p;
}

// The same product as a mixture of one expert.
ExpertGemmParams one_expert(const GemmParams& p) {
  return {.expert_begin = nullptr,
          .max_rows = p.max_rows,
          .x = p.x,
          .x_stride = p.x_stride,
          .x_rows = nullptr,
          .num_x_rows = p.max_rows,
          .weight = {.first = p.weight, .num_experts = 1},
          .bias = p.bias,
          .y = p.y,
          .y_stride = p.y_stride,
          .x_dtype = p.x_dtype,
          .y_dtype = p.y_dtype,
          .num_groups = p.num_groups};
}

// Launches our own kernel for bfloat16, or for weights that it converts to it.
void launch_own(CudaContext& ctx, const GemmParams& p, const ProductEnd& end = {}) {
  if (takes_converted(ctx, p)) return launch_converted(ctx, p, end);
  if (ctx.is_portable) {
    return launch_portable_gemm(ctx, one_expert(p),
                                {.num_rows = p.num_rows, .delays_successor = p.delays_successor},
                                end.activation);
  }
  launch_tiles(ctx, p, end);
}

// Whether the product is of plain bfloat16 weights, and no library computes it.
bool is_own(const CudaContext& ctx, const GemmParams& p) {
  return p.weight.dtype == DType::kBFloat16 && p.weight.format == WeightFormat::kPlain &&
         p.num_groups == 1 && !(ctx.gemm != nullptr && ctx.gemm->has_plan(p));
}

// Whether launch_own computes the product, and not a library, by a kernel that knows ProductEnd.
bool has_own_ends(const CudaContext& ctx, const GemmParams& p) {
  return is_own(ctx, p) || has_converted_ends(ctx, p);
}

// Whether the activation may be the end of our own kernel.
bool may_join(const CudaContext& ctx, const ActivatedGemmParams& p) {
  const GemmParams& product = p.product;
  return has_own_ends(ctx, product) && product.y_dtype == DType::kBFloat16 &&
         product.bias == nullptr && p.activation.intermediate % 8 == 0 &&
         ends_products(p.activation.activation);
}

bool ends_in_activation(const CudaContext& ctx, const GemmParams& p) {
  if (takes_converted(ctx, p)) return takes_converted_activation(ctx, p);
  return ctx.is_portable ? takes_portable_activation(p) : takes_activation(ctx, p);
}

void label(CudaContext& ctx, const GemmParams& p) {
  if (ctx.trace != nullptr) ctx.trace->label_next(concat("gemm ", p.weight.n, "x", p.weight.k));
  PACELINE_CHECK(p.x_dtype == p.weight.dtype, "on a GPU x has the dtype of the weights");
}

// Throws Unsupported for rows that the copy engine cannot read.
void check_strides(const GemmParams& p) {
  if (p.weight.k % 8 == 0 && p.x_stride % 8 == 0) return;
  throw Unsupported(concat("a product over ", p.weight.k, " columns with rows ", p.x_stride,
                           " apart; on a GPU both must be multiples of 8"));
}

}  // namespace
}  // namespace cuda

void gemm(CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows <= 0) return;
  if (p.num_groups > 1 && !cuda::takes_groups(p)) {
    for (int32_t group = 0; group < p.num_groups; ++group) gemm(ctx, cuda::group_of(p, group));
    return;
  }
  cuda::label(ctx, p);
  if (cuda::takes_converted(ctx, p)) return cuda::launch_converted(ctx, p);
  if (p.weight.dtype == DType::kFloat32 || p.weight.format != WeightFormat::kPlain) {
    return cuda::launch_any_format(
        ctx, cuda::one_expert(p), {.num_rows = p.num_rows, .delays_successor = p.delays_successor});
  }
  PACELINE_CHECK(p.weight.dtype == DType::kBFloat16, "products are of float32 or bfloat16");
  cuda::check_strides(p);
  if (ctx.gemm != nullptr && ctx.gemm->run_library(ctx, p)) return;
  cuda::launch_own(ctx, p);
}

void activated_gemm(CudaContext& ctx, const ActivatedGemmParams& p) {
  check_activation(p);
  const GemmParams& product = p.product;
  if (!cuda::may_join(ctx, p) || !cuda::ends_in_activation(ctx, product)) {
    gemm(ctx, product);
    return gated_activation(ctx, p.activation);
  }
  if (product.max_rows <= 0) return;
  cuda::label(ctx, product);
  cuda::check_strides(product);
  cuda::launch_own(ctx, product, {.activation = &p.activation});
}

void normed_gemm(CudaContext& ctx, const NormedGemmParams& p) {
  check_norm(p);
  const GemmParams& product = p.product;
  const ActivatedGemmParams activated = {.product = product, .activation = p.activation};
  if (p.has_activation) check_activation(activated);
  const bool is_joined = cuda::is_own(ctx, product) &&
                         (!p.has_activation || cuda::may_join(ctx, activated)) &&
                         cuda::takes_norm(ctx, p);
  if (is_joined) {
    cuda::label(ctx, product);
    return cuda::launch_normed_gemm(ctx, p);
  }
  rms_norm(ctx, p.norm);
  if (p.has_activation) {
    activated_gemm(ctx, activated);
  } else {
    gemm(ctx, product);
  }
}

bool adds_in_product(const CudaContext& ctx, const GemmParams& p) {
  return !ctx.is_portable && cuda::has_own_ends(ctx, p) && cuda::takes_residual(p);
}

void added_gemm(CudaContext& ctx, const AddedGemmParams& p) {
  const GemmParams& product = p.product;
  if (!adds_in_product(ctx, product)) {
    gemm(ctx, product);
    return rms_norm(ctx, addition_of(p));
  }
  if (product.max_rows <= 0) return;
  cuda::label(ctx, product);
  cuda::check_strides(product);
  cuda::launch_own(ctx, product, {.residual = p.residual});
}

}  // namespace paceline
