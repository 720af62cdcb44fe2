// SPDX-License-Identifier: Apache-2.0
#pragma once

// The logits of few rows by one block: y = x W^T for 16 rows of W in each warp. Each output is
// the sum that gemm_kernel.cuh computes, K in steps of 16, ascending, in one float32 accumulator;
// so the bits are equal. All weights are in shared memory before the rows are known.

#include <cuda_bf16.h>

#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"
#include "ops/moe.h"

namespace paceline::cuda {

inline constexpr int32_t kRouterThreads = 256;
inline constexpr int32_t kMaxRouterRows = 8;  // a warp routes a row; eight are a tile of tokens
inline constexpr int32_t kMaxRouterBytes = 226 << 10;

// Bytes from row to row in shared memory: eight rows lie in different banks.
__host__ __device__ constexpr int32_t router_pitch(int32_t k) { return 2 * k + 16; }
inline int32_t router_bytes(const GemmParams& p) {
  return ((p.weight.n + 15) / 16 * 16 + p.max_rows) * router_pitch(p.weight.k);
}

// Whether one block computes the logits.
inline bool is_router_product(const GemmParams& p) {
  const WeightMatrix& w = p.weight;
  return w.format == WeightFormat::kPlain && w.dtype == DType::kBFloat16 &&
         p.x_dtype == DType::kBFloat16 && p.y_dtype == DType::kFloat32 && p.num_groups == 1 &&
         w.n <= kRouterThreads / 2 && w.k % 64 == 0 && p.x_stride % 8 == 0 &&
         is_vector_aligned(w.data) && is_vector_aligned(p.x) && p.max_rows <= kMaxRouterRows &&
         router_bytes(p) <= kMaxRouterBytes;
}

// Requests the weights; called by all threads of the block before they wait for the predecessor.
__device__ __forceinline__ void request_router_weights(const GemmParams& p, uint32_t shared,
                                                       uint64_t* arrived) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto row_bytes = static_cast<uint32_t>(2 * p.weight.k);
  if (thread == 0) {
    barrier_init(arrived, 1);
    barrier_init_fence();
    barrier_expect(arrived, static_cast<uint32_t>(p.weight.n) * row_bytes);
  }
  __syncthreads();
  for (int32_t row = thread; row < p.weight.n; row += kRouterThreads) {
    copy_bulk(shared + static_cast<uint32_t>(row * router_pitch(p.weight.k)),
              p.weight.data + int64_t{row} * row_bytes, row_bytes, arrived, kEvictNormal);
  }
}

// What a lane needs of four steps of 16 columns.
struct RouterSteps {
  uint32_t a[4][4];
  uint32_t b[2][4];

  // weights, tokens: the lane's addresses of the first column.
  __device__ __forceinline__ void load(uint32_t weights, uint32_t tokens) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      ldmatrix_x4(a[i], weights + static_cast<uint32_t>(32 * i));
      if (i % 2 == 0) ldmatrix_x4(b[i / 2], tokens + static_cast<uint32_t>(32 * i));
    }
  }
};

// Computes and stores the logits of all rows that may exist; called by all threads of the block.
__device__ __forceinline__ void compute_router_logits(const GemmParams& p, uint32_t shared,
                                                      uint64_t* arrived) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t k = p.weight.k;
  const int32_t pitch = router_pitch(k);
  const uint32_t tokens = shared + static_cast<uint32_t>((p.weight.n + 15) / 16 * 16 * pitch);
  const auto* const x = static_cast<const __nv_bfloat16*>(p.x);
  for (int32_t row = 0; row < p.max_rows; ++row) {
    for (int32_t piece = thread; piece < k / 8; piece += kRouterThreads) {
      cp_async_16(tokens + static_cast<uint32_t>(row * pitch + piece * 16),
                  x + row * p.x_stride + piece * 8, /*is_live=*/true);
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const int32_t first = thread / 32 * 16;  // row of W
  if (first >= p.weight.n) return;
  barrier_wait(arrived, 0);
  uint32_t of_weights =
      shared + static_cast<uint32_t>((first + lane % 16) * pitch + lane / 16 * 16);
  // Rows that do not exist are read from the last one; their outputs are not stored.
  uint32_t of_tokens =
      tokens + static_cast<uint32_t>(min(lane % 8, p.max_rows - 1) * pitch + lane / 8 * 16);
  float sums[4] = {};
  RouterSteps now;
  now.load(of_weights, of_tokens);
#pragma unroll 2
  for (int32_t column = 64; column <= k; column += 64) {
    of_weights += 128;
    of_tokens += 128;
    RouterSteps next;
    if (column < k) next.load(of_weights, of_tokens);
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      mma_16x8x16(sums, now.a[i], now.b[i / 2][i % 2 * 2], now.b[i / 2][i % 2 * 2 + 1]);
    }
    now = next;
  }
  auto* const y = static_cast<float*>(p.y);
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t output = first + lane / 4 + i / 2 * 8;
    const int32_t row = lane % 4 * 2 + i % 2;
    if (output >= p.weight.n || row >= p.max_rows) continue;
    const float bias = p.bias != nullptr ? p.bias[output] : 0.0f;
    y[row * p.y_stride + output] = __fadd_rn(sums[i], bias);
  }
}

}  // namespace paceline::cuda
