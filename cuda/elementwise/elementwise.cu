// SPDX-License-Identifier: Apache-2.0

// Ops in which every output element depends only on its own inputs, so rows are invariant. A block
// computes a piece of one row, a thread eight elements.

#include <cuda_bf16.h>

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "elementwise/gate_up.cuh"
#include "ops/ops.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kPerThread = 8;
constexpr int32_t kPerBlock = kThreads * kPerThread;
constexpr int32_t kRowsAhead = 64;  // which are loaded before it is known whether they exist

// The grid (row, piece) that covers max_rows rows of n elements.
dim3 grid_of(int32_t max_rows, int32_t n) {
  return dim3(static_cast<unsigned>(max_rows),
              static_cast<unsigned>((n + kPerBlock - 1) / kPerBlock));
}

// First element of the thread in its row.
__device__ __forceinline__ int32_t first_element() {
  return static_cast<int32_t>(blockIdx.y * kPerBlock + threadIdx.x * kPerThread);
}

template <class T, bool kIsVector>
__global__ void __launch_bounds__(kThreads) embed_kernel(const __grid_constant__ EmbedParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t num_rows = *p.num_rows;
  const int32_t token = p.token_ids[row];
  const int32_t first = first_element();
  const int32_t count = p.hidden - first;
  if (row >= num_rows || count <= 0) return;
  float values[kPerThread] = {};
  if (token >= 0 && token < p.vocab_size) {
    load_first<kIsVector>(static_cast<const T*>(p.table) + int64_t{token} * p.hidden + first, count,
                          values);
  }
#pragma unroll
  for (float& value : values) value *= p.scale;
  store_first<kIsVector>(values, count, p.y + int64_t{row} * p.hidden + first);
}

template <class T, bool kIsVector, Activation kActivation, bool kIsInterleaved>
__global__ void __launch_bounds__(kThreads)
    gated_activation_kernel(const __grid_constant__ GatedActivationParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t first = first_element();
  const int32_t count = p.intermediate - first;
  if (count <= 0) return;
  // One of the first rows is loaded before it is known to exist: one latency instead of two.
  if (row >= kRowsAhead && row >= __ldcg(p.num_rows)) return;
  const int32_t num_rows = *p.num_rows;
  float gate[kPerThread];
  float up[kPerThread];
  if constexpr (kIsInterleaved) {
    float both[2 * kPerThread];
    load_first<kIsVector>(static_cast<const T*>(p.x) + (int64_t{row} * p.intermediate + first) * 2,
                          2 * count, both);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      gate[i] = both[2 * i];
      up[i] = both[2 * i + 1];
    }
  } else {
    const bool is_fused = p.up == nullptr;
    const T* const row_gate =
        static_cast<const T*>(p.x) + int64_t{row} * (is_fused ? 2 : 1) * p.intermediate + first;
    const T* const row_up = is_fused ? row_gate + p.intermediate
                                     : static_cast<const T*>(p.up) + row * p.up_stride + first;
    load_first<kIsVector>(row_gate, count, gate);
    load_first<kIsVector>(row_up, count, up);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    gate[i] = gate_up<kActivation>(gate[i], up[i], p.alpha, p.limit);
  }
  asm volatile("" ::: "memory");  // or the compiler puts the loads behind the branch
  if (row >= num_rows) return;
  store_first<kIsVector>(gate, count, static_cast<T*>(p.y) + int64_t{row} * p.intermediate + first);
}

template <bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherRowsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t num_rows = *p.num_rows;
  const int32_t from_row = p.row_index[row];
  const int32_t first = first_element();
  const int32_t count = p.hidden - first;
  if (row >= num_rows || count <= 0) return;
  float values[kPerThread];
  load_first<kIsVector>(p.x + int64_t{from_row} * p.hidden + first, count, values);
  store_first<kIsVector>(values, count, p.y + int64_t{row} * p.hidden + first);
}

template <class X, class Y, bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ CopyRowsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t num_rows = *p.num_rows;
  const int32_t from_row = p.row_index != nullptr ? p.row_index[row] : row;
  const int32_t first = first_element();
  const int32_t count = p.width - first;
  if (row >= num_rows || count <= 0) return;
  float values[kPerThread];
  load_first<kIsVector>(static_cast<const X*>(p.x) + from_row * p.x_stride + first, count, values);
  store_first<kIsVector>(values, count, static_cast<Y*>(p.y) + row * p.y_stride + first);
}

template <bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    soft_cap_kernel(const __grid_constant__ SoftCapParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t first = first_element();
  const int32_t count = p.n - first;
  if (row >= *p.num_rows || count <= 0) return;
  float* const logits = p.logits + row * p.stride + first;
  float values[kPerThread];
  load_first<kIsVector>(logits, count, values);
#pragma unroll
  for (float& value : values) {
    value *= p.scale;
    if (p.cap > 0) value = p.cap * tanhf(value / p.cap);
  }
  store_first<kIsVector>(values, count, logits);
}

// Whether rows of n elements consist of whole aligned vectors of kPerThread.
template <class... Pointers>
bool takes_vectors(int32_t n, const Pointers*... pointers) {
  return n % kPerThread == 0 && (is_vector_aligned(pointers) && ...);
}

template <class T, bool kIsVector, bool kIsInterleaved>
auto gated_activation_kernel_of(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return gated_activation_kernel<T, kIsVector, Activation::kSilu, kIsInterleaved>;
    case Activation::kGeluTanh:
      return gated_activation_kernel<T, kIsVector, Activation::kGeluTanh, kIsInterleaved>;
    case Activation::kSwigluOai:
      return gated_activation_kernel<T, kIsVector, Activation::kSwigluOai, kIsInterleaved>;
    case Activation::kClampedSilu:
      return gated_activation_kernel<T, kIsVector, Activation::kClampedSilu, kIsInterleaved>;
    case Activation::kSigmoid:
      return gated_activation_kernel<T, kIsVector, Activation::kSigmoid, kIsInterleaved>;
  }
  throw InternalError("unknown activation");
}

}  // namespace
}  // namespace cuda

void embed(CudaContext& ctx, const EmbedParams& p) {
  using namespace cuda;
  with_element_type(p.table_dtype, "embedding table", [&](auto element) {
    using T = decltype(element);
    const auto kernel =
        takes_vectors(p.hidden, p.table, p.y) ? embed_kernel<T, true> : embed_kernel<T, false>;
    launch(ctx, "embed", kernel, grid_of(p.max_rows, p.hidden), dim3(kThreads), 0, p);
  });
}

void gated_activation(CudaContext& ctx, const GatedActivationParams& p) {
  using namespace cuda;
  PACELINE_CHECK(!p.is_interleaved || p.up == nullptr, "an interleaved x holds both factors");
  with_element_type(p.dtype, "gated activation", [&](auto element) {
    using T = decltype(element);
    const bool is_vector = takes_vectors(p.intermediate, p.x, p.y) && is_vector_aligned(p.up) &&
                           p.up_stride % kPerThread == 0;
    const auto kernel_of = is_vector
                               ? (p.is_interleaved ? gated_activation_kernel_of<T, true, true>
                                                   : gated_activation_kernel_of<T, true, false>)
                               : (p.is_interleaved ? gated_activation_kernel_of<T, false, true>
                                                   : gated_activation_kernel_of<T, false, false>);
    launch(ctx, "gated_activation", kernel_of(p.activation), grid_of(p.max_rows, p.intermediate),
           dim3(kThreads), 0, p);
  });
}

void gather_rows(CudaContext& ctx, const GatherRowsParams& p) {
  using namespace cuda;
  const auto kernel =
      takes_vectors(p.hidden, p.x, p.y) ? gather_rows_kernel<true> : gather_rows_kernel<false>;
  launch(ctx, "gather_rows", kernel, grid_of(p.max_rows, p.hidden), dim3(kThreads), 0, p);
}

void copy_rows(CudaContext& ctx, const CopyRowsParams& p) {
  using namespace cuda;
  const bool is_vector = takes_vectors(p.width, p.x, p.y) && p.x_stride % kPerThread == 0 &&
                         p.y_stride % kPerThread == 0;
  with_element_type(p.x_dtype, "copy_rows x", [&](auto x) {
    with_element_type(p.y_dtype, "copy_rows y", [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      launch(ctx, "copy_rows",
             is_vector ? copy_rows_kernel<X, Y, true> : copy_rows_kernel<X, Y, false>,
             grid_of(p.max_rows, p.width), dim3(kThreads), 0, p);
    });
  });
}

void soft_cap(CudaContext& ctx, const SoftCapParams& params) {
  using namespace cuda;
  SoftCapParams p = params;
  p.stride = params.row_stride();
  const bool is_vector = takes_vectors(p.n, p.logits) && p.stride % kPerThread == 0;
  const auto kernel = is_vector ? soft_cap_kernel<true> : soft_cap_kernel<false>;
  launch(ctx, "soft_cap", kernel, grid_of(p.max_rows, p.n), dim3(kThreads), 0, p);
}

}  // namespace paceline
