// SPDX-License-Identifier: Apache-2.0

// One block per row. The number of threads, and so the order of the sum of squares, depends only on
// the length of a row; that keeps rows invariant.

#include <cuda_bf16.h>

#include <algorithm>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "norm/register_norm.cuh"
#include "norm/register_rows.cuh"
#include "ops/ops.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kLoopThreads = 512;
constexpr int32_t kPerLayerThreads = 256;

// Rows of whole aligned vectors, kept in registers between the passes.
template <class X, class Y, int kVectors>
__global__ void __launch_bounds__(kMaxRegisterThreads)
    rms_norm_in_registers(const __grid_constant__ RmsNormParams p) {
  __shared__ __align__(16) NormPartials partials;
  let_successor_start();
  RegisterNorm<kVectors> norm;
  norm.begin(p, partials);

  wait_for_predecessor();
  // Loads the row before checking whether it exists: one latency instead of two.
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t num_rows = *p.num_rows;
  const X* const row_x = static_cast<const X*>(p.x) + row * p.x_stride;
  float x[kVectors][kPerVector] = {};
  float residual[kVectors][kPerVector] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (norm.is_inside[v]) load_vector(row_x + norm.at[v], x[v]);
  }
  norm.load_residual(p, row, residual);
  if (row >= num_rows) return;
  norm.template finish<Y>(p, row, x, residual, partials);
}

// Serves all other rows. Every pass reads the row again; a thread visits the same elements in each
// pass, so it sees its own writes without a barrier.
template <class X, class Y>
__global__ void __launch_bounds__(kLoopThreads)
    rms_norm_in_loops(const __grid_constant__ RmsNormParams p) {
  __shared__ __align__(16) float partials[2][kLoopThreads / 32];
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  if (row >= *p.num_rows) return;  // the same for all threads of the block
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const float inverse_hidden = 1.0f / static_cast<float>(p.hidden);
  const X* const x = static_cast<const X*>(p.x) + row * p.x_stride;
  float* const residual = p.residual == nullptr ? nullptr : p.residual + int64_t{row} * p.hidden;

  const float residual_scale = p.residual_scale == nullptr ? 1.0f : *p.residual_scale;
  float x_factor = 1.0f;
  if (p.x_weight != nullptr) {
    float squares = 0.0f;
    for (int32_t i = thread; i < p.hidden; i += kLoopThreads) {
      const float value = widen(x[i]);
      squares = fmaf(value, value, squares);
    }
    x_factor = norm_factor(block_sum(squares, partials[0]), inverse_hidden, p.eps);
  }
  float squares = 0.0f;
  for (int32_t i = thread; i < p.hidden; i += kLoopThreads) {
    float value = widen(x[i]);
    if (p.x_weight != nullptr) value *= x_factor * (p.x_weight[i] + p.weight_offset);
    if (residual != nullptr) {
      value = (value + residual[i]) * residual_scale;
      residual[i] = value;
    }
    squares = fmaf(value, value, squares);
  }
  if (p.y == nullptr) return;
  Y* const y = static_cast<Y*>(p.y) + row * p.y_stride;
  const bool is_copy = p.weight == nullptr;
  const float factor =
      is_copy ? 1.0f : norm_factor(block_sum(squares, partials[1]), inverse_hidden, p.eps);
  for (int32_t i = thread; i < p.hidden; i += kLoopThreads) {
    const float value = residual != nullptr ? residual[i] : widen(x[i]);
    narrow(is_copy ? value : value * (factor * (p.weight[i] + p.weight_offset)), y + i);
  }
}

// A warp computes one layer's part of a row, a lane every 32nd element of it, in a fixed order, so
// rows are invariant.
template <class T, class Table>
__global__ void __launch_bounds__(kPerLayerThreads)
    per_layer_inputs_kernel(const __grid_constant__ PerLayerInputsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t layer =
      static_cast<int32_t>(blockIdx.y * (kPerLayerThreads / 32) + threadIdx.x / 32);
  if (row >= *p.num_rows || layer >= p.num_layers) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t width = int64_t{p.num_layers} * p.size;
  const int64_t at = int64_t{layer} * p.size;
  const int32_t token = p.token_ids[row];
  const Table* const table = token < 0 || token >= p.vocab_size
                                 ? nullptr
                                 : static_cast<const Table*>(p.table) + token * width + at;
  T* const x = static_cast<T*>(p.x) + row * width + at;
  float squares = 0.0f;
  for (int32_t i = lane; i < p.size; i += 32) {
    const float value = p.x_scale * widen(x[i]);
    squares = fmaf(value, value, squares);
  }
  const float factor = norm_factor(warp_sum(squares), 1.0f / static_cast<float>(p.size), p.eps);
  for (int32_t i = lane; i < p.size; i += 32) {
    const float value = p.x_scale * widen(x[i]);
    const float entry = table == nullptr ? 0.0f : p.table_scale * widen(table[i]);
    const float normed = value * (factor * (p.weight[i] + p.weight_offset));
    narrow(p.scale * (normed + entry), x + i);
  }
}

template <class X, class Y>
void launch_rms_norm(CudaContext& ctx, const RmsNormParams& p) {
  const dim3 grid(static_cast<unsigned>(p.max_rows));
  if (!fits_registers(p)) {
    launch(ctx, "rms_norm", rms_norm_in_loops<X, Y>, grid, dim3(kLoopThreads), 0, p);
    return;
  }
  const RegisterRows rows = register_rows(p.hidden);
  launch(ctx, "rms_norm",
         rows.vectors == 1 ? rms_norm_in_registers<X, Y, 1> : rms_norm_in_registers<X, Y, 2>, grid,
         dim3(rows.threads), 0, p);
}

}  // namespace
}  // namespace cuda

void rms_norm(CudaContext& ctx, const RmsNormParams& p) {
  PACELINE_CHECK(p.residual != nullptr ||
                     (p.x_weight == nullptr && p.residual_scale == nullptr && p.y != nullptr),
                 "x_weight, residual_scale and a null y go with a residual");
  cuda::with_element_type(p.x_dtype, "rms_norm x", [&](auto x) {
    cuda::with_element_type(p.y_dtype, "rms_norm y", [&](auto y) {
      cuda::launch_rms_norm<decltype(x), decltype(y)>(ctx, p);
    });
  });
}

void per_layer_inputs(CudaContext& ctx, const PerLayerInputsParams& p) {
  using namespace cuda;
  constexpr int32_t kLayers = kPerLayerThreads / 32;  // of a block
  const dim3 grid(static_cast<unsigned>(p.max_rows),
                  static_cast<unsigned>((p.num_layers + kLayers - 1) / kLayers));
  with_element_type(p.dtype, "per-layer inputs", [&](auto x) {
    with_element_type(p.table_dtype, "per-layer embedding table", [&](auto table) {
      launch(ctx, "per_layer_inputs", per_layer_inputs_kernel<decltype(x), decltype(table)>, grid,
             dim3(kPerLayerThreads), 0, p);
    });
  });
}

}  // namespace paceline
