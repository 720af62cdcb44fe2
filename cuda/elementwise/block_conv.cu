// SPDX-License-Identifier: Apache-2.0

// A thread has a few adjacent elements of all rows of one block. It goes from the last row to the
// first, so that it can write over a row that no other row reads any more, and the rows that the
// next taps read stay in the cache. Sums run over the taps in ascending order, whatever the number
// of rows, so rows are invariant.

#include <cuda_bf16.h>

#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "ops/block_conv.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 64;  // small, for a block for each of many processors at batch 1
constexpr int32_t kPerThread = 2;

template <class T, bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    convolve_blocks_kernel(const __grid_constant__ ConvolveBlocksParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto seq = static_cast<int32_t>(blockIdx.x);
  const auto own = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x) * kPerThread;
  const int32_t count = p.hidden - own;
  if (seq >= *p.num_seqs || count <= 0) return;
  const int32_t first = p.row_indptr[seq];
  const int32_t num_groups = p.hidden / p.group;
  T* const x = static_cast<T*>(p.x) + own;
  for (int32_t row = p.row_indptr[seq + 1] - 1; row >= first; --row) {
    const float* const delta = p.delta + row * p.delta_stride;
    float sums[kPerThread] = {};
    const int32_t num_taps = taps_of_row(p.num_taps, row - first);
#pragma unroll 4
    for (int32_t t = 0; t < num_taps; ++t) {
      float values[kPerThread];
      float base[kPerThread];
      load_first<kIsVector>(x + int64_t{row - t} * p.hidden, count, values);
      load_first<kIsVector>(p.base + int64_t{t} * p.hidden + own, count, base);
#pragma unroll
      for (int32_t i = 0; i < kPerThread; ++i) {
        if (i >= count) break;
        const float weight = base[i] + delta[t * num_groups + (own + i) / p.group];
        sums[i] = fmaf(values[i], weight, sums[i]);
      }
    }
    store_first<kIsVector>(sums, count, x + int64_t{row} * p.hidden);
  }
}

}  // namespace
}  // namespace cuda

void convolve_blocks(CudaContext& ctx, const ConvolveBlocksParams& p) {
  using namespace cuda;
  check_convolution(p);
  constexpr int32_t kPerBlock = kThreads * kPerThread;
  const dim3 grid(static_cast<unsigned>(p.max_seqs),
                  static_cast<unsigned>((p.hidden + kPerBlock - 1) / kPerBlock));
  const bool is_vector =
      p.hidden % kPerThread == 0 && is_vector_aligned(p.x) && is_vector_aligned(p.base);
  with_element_type(p.dtype, "convolved rows", [&](auto element) {
    using T = decltype(element);
    launch(ctx, "convolve_blocks",
           is_vector ? convolve_blocks_kernel<T, true> : convolve_blocks_kernel<T, false>, grid,
           dim3(kThreads), 0, p);
  });
}

}  // namespace paceline
