// SPDX-License-Identifier: Apache-2.0

// The weighted sum of a row's expert rows, alone or with the norm that reads it.

#include <cstdint>

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "moe/sum_places.cuh"
#include "norm/register_rows.cuh"
#include "ops/moe.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 128;

// A block computes a piece of one row.
template <class T, bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    combine_experts_kernel(const __grid_constant__ CombineExpertsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t num_rows = *p.num_rows;
  const int32_t first = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x) * kPerVector;
  const int32_t count = p.hidden - first;
  float sum[kPerVector];
  if (!sum_places<T, kIsVector>(p, row, num_rows, first, count, sum)) return;
  const int64_t stride = p.stride > 0 ? p.stride : p.hidden;
  store_first<kIsVector>(sum, count, static_cast<T*>(p.y) + row * stride + first);
}

// A block computes a row and keeps it in registers. The arithmetic is that of combine_experts and
// then of rms_norm with a residual.
template <class X, class Y, int kVectors>
__global__ void __launch_bounds__(kMaxRegisterThreads)
    combine_and_norm_kernel(const __grid_constant__ CombineAndNormParams params) {
  __shared__ __align__(16) float partials[kMaxRegisterThreads / 32];
  const RmsNormParams& p = params.norm;
  let_successor_start();
  // Constants load while the previous kernel still runs.
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  int32_t at[kVectors];
  bool is_inside[kVectors];
  float scale[kVectors][kPerVector] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    at[v] = (thread + v * static_cast<int32_t>(blockDim.x)) * kPerVector;
    is_inside[v] = at[v] < p.hidden;
    if (is_inside[v] && p.weight != nullptr) load_vector(p.weight + at[v], scale[v]);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) scale[v][i] += p.weight_offset;
  }
  if (thread < kMaxRegisterThreads / 32) partials[thread] = 0.0f;
  __syncthreads();

  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t num_rows = *p.num_rows;
  float* const row_residual = p.residual + int64_t{row} * p.hidden;
  float x[kVectors][kPerVector] = {};
  float residual[kVectors][kPerVector] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (is_inside[v]) load_vector(row_residual + at[v], residual[v]);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!is_inside[v]) continue;
    if (!sum_places<X, true>(params.combine, row, num_rows, at[v], kPerVector, x[v])) break;
  }
  if (row >= num_rows) return;
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      X stored;  // the sum, as combine_experts stores it
      narrow(x[v][i], &stored);
      x[v][i] = widen(stored) + residual[v][i];
      squares = fmaf(x[v][i], x[v][i], squares);
    }
    if (is_inside[v]) store_vector(x[v], row_residual + at[v]);
  }
  if (p.y == nullptr) return;
  Y* const row_y = static_cast<Y*>(p.y) + row * p.y_stride;
  const float factor =
      norm_factor(block_sum(squares, partials), 1.0f / static_cast<float>(p.hidden), p.eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) x[v][i] *= factor * scale[v][i];
    if (is_inside[v]) store_vector(x[v], row_y + at[v]);
  }
}

// Whether one kernel does both.
bool is_one_kernel(const CombineAndNormParams& p) {
  const bool is_plain_norm = p.norm.x_weight == nullptr && p.norm.residual_scale == nullptr &&
                             (p.norm.weight != nullptr || p.norm.y == nullptr);
  return is_plain_norm && fits_registers(p.norm) && is_vector_aligned(p.combine.x) &&
         is_vector_aligned(p.combine.base);
}

}  // namespace
}  // namespace cuda

void combine_experts(CudaContext& ctx, const CombineExpertsParams& p) {
  using namespace cuda;
  constexpr int32_t kPerBlock = kThreads * kPerVector;
  const dim3 grid(static_cast<unsigned>(p.max_rows),
                  static_cast<unsigned>((p.hidden + kPerBlock - 1) / kPerBlock));
  const bool is_vector = p.hidden % kPerVector == 0 && p.stride % kPerVector == 0 &&
                         is_vector_aligned(p.x) && is_vector_aligned(p.y) &&
                         is_vector_aligned(p.base);
  with_element_type(p.dtype, "combine_experts", [&](auto element) {
    using T = decltype(element);
    launch(ctx, "combine_experts",
           is_vector ? combine_experts_kernel<T, true> : combine_experts_kernel<T, false>, grid,
           dim3(kThreads), 0, p);
  });
}

void combine_and_norm(CudaContext& ctx, const CombineAndNormParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.norm.x == p.combine.y && p.norm.x_dtype == p.combine.dtype &&
                     p.norm.hidden == p.combine.hidden && p.combine.stride == 0 &&
                     p.norm.residual != nullptr,
                 "the norm has a residual and reads the combined rows");
  if (!is_one_kernel(p)) {
    combine_experts(ctx, p.combine);
    rms_norm(ctx, p.norm);
    return;
  }
  const RegisterRows rows = register_rows(p.norm.hidden);
  with_element_type(p.norm.x_dtype, "combine_and_norm x", [&](auto x) {
    with_element_type(p.norm.y_dtype, "combine_and_norm y", [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      launch(
          ctx, "combine_and_norm",
          rows.vectors == 1 ? combine_and_norm_kernel<X, Y, 1> : combine_and_norm_kernel<X, Y, 2>,
          dim3(static_cast<unsigned>(p.norm.max_rows)), dim3(rows.threads), 0, p);
    });
  });
}

}  // namespace paceline
