// SPDX-License-Identifier: Apache-2.0

// The heads of a block drafter, whose rows have few elements. Every sum has one order whatever the
// number of rows, so rows are invariant.

#include <cuda_bf16.h>

#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/markov.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 256;

// The grid (row, piece) that covers max_rows rows of n elements, one for each thread.
dim3 grid_of(int32_t max_rows, int32_t n) {
  return dim3(static_cast<unsigned>(max_rows),
              static_cast<unsigned>((n + kThreads - 1) / kThreads));
}

__device__ __forceinline__ int32_t own_element() {
  return static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x);
}

// The exponential of a large -x is infinite, and the quotient is 0.
__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }

__device__ __forceinline__ float element_of(const RowPart& part, int32_t row, int32_t i) {
  if (part.x == nullptr) return 0.0f;
  const int64_t at = row * part.stride + i;
  return part.dtype == DType::kFloat32 ? static_cast<const float*>(part.x)[at]
                                       : widen(static_cast<const __nv_bfloat16*>(part.x)[at]);
}

template <class Y>
__global__ void __launch_bounds__(kThreads)
    join_parts_kernel(const __grid_constant__ JoinPartsParams p, int32_t width) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t i = own_element();
  if (row >= *p.num_rows || i >= width) return;
  const int32_t second = p.parts[0].width;
  const int32_t third = second + p.parts[1].width;
  const float value = i < second  ? element_of(p.parts[0], row, i)
                      : i < third ? element_of(p.parts[1], row, i - second)
                                  : element_of(p.parts[2], row, i - third);
  narrow(value, static_cast<Y*>(p.y) + int64_t{row} * width + i);
}

template <class Y>
__global__ void __launch_bounds__(kThreads)
    gate_embeddings_kernel(const __grid_constant__ GateEmbeddingsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t i = own_element();
  if (row >= *p.num_rows || i >= p.rank) return;
  const int64_t at = int64_t{row} * p.rank + i;
  narrow(__fmul_rn(sigmoid(p.gate[at]), p.e[at]), static_cast<Y*>(p.y) + at);
}

template <class Y>
__global__ void __launch_bounds__(kThreads)
    advance_markov_kernel(const __grid_constant__ AdvanceMarkovParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t i = own_element();
  if (row >= *p.num_rows || i >= p.rank) return;
  const int64_t at = int64_t{row} * p.rank + i;
  const float* const mix = p.mix + 3 * int64_t{row} * p.rank + i;
  const float gate = sigmoid(mix[0]);
  const float before = p.is_first ? 0.0f : p.state[at];
  const float added = __fmul_rn(1.0f - gate, tanhf(mix[p.rank]));
  p.state[at] = __fadd_rn(__fmul_rn(gate, before), added);
  narrow(tanhf(mix[2 * p.rank]), static_cast<Y*>(p.y) + at);
}

// One block per row.
template <class H>
__global__ void __launch_bounds__(kThreads)
    estimate_acceptance_kernel(const __grid_constant__ EstimateAcceptanceParams p) {
  __shared__ float partials[kThreads / 32];
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  if (row >= *p.num_rows) return;
  const H* const h = static_cast<const H*>(p.h) + int64_t{row} * p.hidden;
  const float* const e = p.e + int64_t{row} * p.rank;
  float sum = 0.0f;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < p.hidden; i += kThreads) {
    sum = __fmaf_rn(widen(h[i]), p.weight[i], sum);
  }
  for (auto i = static_cast<int32_t>(threadIdx.x); i < p.rank; i += kThreads) {
    sum = __fmaf_rn(e[i], p.weight[p.hidden + i], sum);
  }
  sum = block_sum(sum, partials);
  if (threadIdx.x == 0) {
    p.probability[row] = sigmoid(p.bias != nullptr ? __fadd_rn(sum, *p.bias) : sum);
  }
}

}  // namespace
}  // namespace cuda

void join_parts(CudaContext& ctx, const JoinPartsParams& p) {
  using namespace cuda;
  for (const RowPart& part : p.parts) with_element_type(part.dtype, "part of a row", [](auto) {});
  with_element_type(p.y_dtype, "join_parts y", [&](auto y) {
    launch(ctx, "join_parts", join_parts_kernel<decltype(y)>, grid_of(p.max_rows, p.width()),
           dim3(kThreads), 0, p, p.width());
  });
}

void gate_embeddings(CudaContext& ctx, const GateEmbeddingsParams& p) {
  using namespace cuda;
  with_element_type(p.y_dtype, "gate_embeddings y", [&](auto y) {
    launch(ctx, "gate_embeddings", gate_embeddings_kernel<decltype(y)>, grid_of(p.max_rows, p.rank),
           dim3(kThreads), 0, p);
  });
}

void advance_markov(CudaContext& ctx, const AdvanceMarkovParams& p) {
  using namespace cuda;
  with_element_type(p.y_dtype, "advance_markov y", [&](auto y) {
    launch(ctx, "advance_markov", advance_markov_kernel<decltype(y)>, grid_of(p.max_rows, p.rank),
           dim3(kThreads), 0, p);
  });
}

void estimate_acceptance(CudaContext& ctx, const EstimateAcceptanceParams& p) {
  using namespace cuda;
  with_element_type(p.dtype, "estimate_acceptance h", [&](auto h) {
    launch(ctx, "estimate_acceptance", estimate_acceptance_kernel<decltype(h)>,
           dim3(static_cast<unsigned>(p.max_rows)), dim3(kThreads), 0, p);
  });
}

}  // namespace paceline
