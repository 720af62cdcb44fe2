// SPDX-License-Identifier: Apache-2.0
#pragma once

// join_streams for few rows: 64 blocks compute the products of a row, and the last one to arrive
// does the rest. No block waits for another.
//
// A block has three rows of the weights in an eighth of the columns: 24 KB, which it copies to
// shared memory before the predecessor has ended. Each block computes the new streams of its
// columns, but only the last one stores them: the others may still read the old ones. All sums have
// the order of the kernel for many rows.

#include <cstddef>
#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/ordering.cuh"
#include "common/reduce.cuh"
#include "ops/streams.h"
#include "streams/join_parts.cuh"
#include "streams/mix_row.cuh"

namespace paceline::cuda::join {

inline constexpr int32_t kSplitRows = 8;  // at most
inline constexpr int32_t kSplitHidden = 4096;
inline constexpr int32_t kSplitColumns = kSplitHidden / kRanges;
inline constexpr int32_t kSplitProducts = 3;  // of a block
inline constexpr int32_t kSplitWarps = kRanges;
inline constexpr int32_t kSplitWorkers = 32 * kSplitWarps;
inline constexpr int32_t kSplitThreads = kSplitWorkers + 32;  // a further warp makes the mix
inline constexpr int32_t kSplitSteps = kSplitColumns / kStep;
inline constexpr int32_t kStagers = kSplitColumns / kPerThread;  // threads that make new streams
inline constexpr int32_t kPartWidth = 32;  // of a range's sums in the workspace
static_assert(kSplitColumns % (kStep * kHalves) == 0 && kStagers == kSplitWorkers / 2);
static_assert(kSplitProducts < kSplitWarps && kWidth < kPartWidth);
static_assert(kSplitProducts * kStreams * kSplitColumns >= kSplitHidden);

// Bytes of the workspace.
[[nodiscard]] constexpr int64_t split_bytes(int32_t rows) {
  return int64_t{rows} * kRanges * kPartWidth * static_cast<int64_t>(sizeof(float));
}

// A barrier of all warps but the one that makes the mix.
__device__ __forceinline__ void sync_workers() { sync_some_threads<1, kSplitWorkers>(); }

// Grid: x ranges of columns, y groups of products, z rows.
template <class X, class Y>
__global__ void __launch_bounds__(kSplitThreads, 2)
    join_split_kernel(const __grid_constant__ JoinArgs a, float* workspace, int32_t* counters) {
  __shared__ __align__(16) float w[kSplitProducts * kStreams * kSplitColumns];
  __shared__ __align__(16) float x[kStreams * kSplitColumns];
  __shared__ float old_mix[kWidth];
  __shared__ float base[kWidth];
  __shared__ float scale[3];
  __shared__ float totals[kWidth + 1];
  __shared__ float half_squares[kHalves * kRanges];
  __shared__ int32_t is_last;
  let_successor_start();
  const auto range = static_cast<int32_t>(blockIdx.x);
  const auto row = static_cast<int32_t>(blockIdx.z);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const int32_t width = mix_width(kStreams, a.mix.is_end);
  const int64_t at_row = int64_t{row} * kStreams * kSplitHidden;
  const int32_t first_column = range * kSplitColumns;

  // Constants come while the previous kernel still runs. Streams come to L2, where what another
  // kernel still writes is not missed.
  constexpr int32_t kUnits = kStreams * kSplitColumns / kPerThread;  // of a row of weights
  constexpr int32_t kStreamUnits = kSplitColumns / kPerThread;
  const int32_t first_product = static_cast<int32_t>(blockIdx.y) * kSplitProducts;
  const int32_t products = min(width - first_product, kSplitProducts);
  for (int32_t i = thread; i < products * kUnits; i += kSplitThreads) {
    cp_async_16(shared_address(w) + static_cast<uint32_t>(i * kVectorBytes),
                a.mix.weight + int64_t{first_product * kStreams + i / kStreamUnits} * kSplitHidden +
                    first_column + i % kStreamUnits * kPerThread,
                true);
  }
  cp_async_commit();
  if (warp == kSplitWarps) {
    if (lane < width) base[lane] = a.mix.base[lane];
    if (lane < (a.mix.is_end ? 1 : 3)) scale[lane] = a.mix.scale[lane];
  } else if (warp >= kSplitWarps / 2) {
    constexpr int32_t kLine = 32;  // floats of 128 bytes
    constexpr int32_t kLines = kSplitColumns / kLine;
    const int32_t line = thread - kStagers;
    if (line < kStreams * kLines) {
      prefetch_to_l2(a.mix.x + at_row + line / kLines * kSplitHidden + first_column +
                     line % kLines * kLine);
    } else if (line < (kStreams + 1) * kLines) {
      prefetch_to_l2(a.norm + first_column + line % kLines * kLine);
    }
  }
  wait_for_predecessor();
  const int32_t rows = min(*a.num_rows, a.max_rows);

  // Rows that do not exist are loaded, too, so that no load waits for the number of rows.
  const float* const mix = a.mix.mix + int64_t{row} * kWidth;
  if (warp == kSplitWarps) {
    if (a.branch != nullptr && lane < kWidth) old_mix[lane] = mix[lane];
  } else if (warp >= kSplitWarps / 2) {
    const int32_t column = (thread - kStagers) * kPerThread;
    float before[kStreams][kPerThread];
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      load_vector(a.mix.x + at_row + s * kSplitHidden + first_column + column, before[s]);
    }
    if (a.branch != nullptr) {
      float branch[kPerThread];
      float factors[kWidth];
      float values[kStreams][kPerThread];
      load_vector(
          static_cast<const X*>(a.branch) + int64_t{row} * kSplitHidden + first_column + column,
          branch);
#pragma unroll
      for (int i = 0; i < kWidth; i += kPerThread) {
        float four[kPerThread];
        load_vector(mix + i, four);
#pragma unroll
        for (int e = 0; e < kPerThread; ++e) factors[i + e] = four[e];
      }
      join_branch(factors, before, branch, values);
#pragma unroll
      for (int s = 0; s < kStreams; ++s) store_vector(values[s], x + s * kSplitColumns + column);
    } else {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) store_vector(before[s], x + s * kSplitColumns + column);
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  if (row >= rows) return;

  // A warp has a product; of the first group, a further one the sum of squares.
  float* const parts = workspace + int64_t{row} * kRanges * kPartWidth;
  const bool has_squares = warp == kSplitProducts && first_product == 0;
  if (warp < products || has_squares) {
    const float* const factors = has_squares ? x : w + warp * kStreams * kSplitColumns;
    float sum = 0.0f;
#pragma unroll 4
    for (int32_t at = lane * kPerThread; at < kStreams * kSplitColumns; at += kStep) {
      float values[kPerThread];
      float of_values[kPerThread];
      load_vector(x + at, values);
      load_vector(factors + at, of_values);
#pragma unroll
      for (int e = 0; e < kPerThread; ++e) sum = __fmaf_rn(values[e], of_values[e], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) parts[range * kPartWidth + (has_squares ? width : first_product + warp)] = sum;
  }
  __syncthreads();
  if (thread == 0) {
    // Releases the sums of all threads, which the barrier has ordered before, and acquires those of
    // the blocks that arrived earlier.
    const int32_t before = arrive_and_acquire(counters + row);
    is_last = before == static_cast<int32_t>(gridDim.x * gridDim.y) - 1 ? 1 : 0;
    if (is_last != 0) counters[row] = 0;
  }
  __syncthreads();
  if (is_last == 0) return;

  // The last block: the totals and the mix, and what the branch reads.
  const auto total_of = [&](int32_t at) {
    float part[kRanges];
#pragma unroll
    for (int32_t i = 0; i < kRanges; ++i) part[i] = __ldcg(parts + i * kPartWidth + at);
    float total = part[0];
#pragma unroll
    for (int32_t i = 1; i < kRanges; ++i) total = __fadd_rn(total, part[i]);
    return total;
  };
  MixStreamsParams new_mix = a.mix;
  new_mix.base = base;
  new_mix.scale = scale;
  if (warp == kSplitWarps) {
    if (lane <= width) totals[lane] = total_of(lane);
    __syncwarp();
    write_mix<kStreams, /*kIsFull=*/true>(new_mix, row, totals);
    return;
  }
  // The branch's row takes the place of the weights, as it has no room in registers.
  if (a.branch != nullptr) {
    const auto* const branch = static_cast<const std::byte*>(a.branch) +
                               int64_t{row} * kSplitHidden * static_cast<int64_t>(sizeof(X));
#pragma unroll
    for (int32_t i = thread * kVectorBytes; i < kSplitHidden * static_cast<int32_t>(sizeof(X));
         i += kSplitWorkers * kVectorBytes) {
      cp_async_16(shared_address(w) + static_cast<uint32_t>(i), branch + i, true);
    }
    cp_async_commit();
  }
  // A warp has a range, and both halves of it.
  const float total = total_of(lane < kStreams ? lane : width);
  const int32_t first = warp * kSplitColumns + lane * kPerThread;
  float streams[kSplitSteps][kStreams][kPerThread];
#pragma unroll
  for (int i = 0; i < kSplitSteps; ++i) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      load_vector(a.mix.x + at_row + s * kSplitHidden + first + i * kStep, streams[i][s]);
    }
  }
  if (a.branch != nullptr) {
    cp_async_wait<0>();
    sync_workers();
#pragma unroll
    for (int i = 0; i < kSplitSteps; ++i) {
      float branch[kPerThread];
      load_vector(reinterpret_cast<const X*>(w) + first + i * kStep, branch);
      const float* const factors = in_register(old_mix);  // else 20 of them stay in registers
      float values[kStreams][kPerThread];
      join_branch(factors, streams[i], branch, values);
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        store_vector(values[s], a.streams + at_row + s * kSplitHidden + first + i * kStep);
#pragma unroll
        for (int e = 0; e < kPerThread; ++e) streams[i][s][e] = values[s][e];
      }
    }
  }
  float pre[kStreams];
  make_pre(new_mix, total, lane, pre);
  float values[kSplitSteps][kPerThread];
  float squares[kHalves] = {};
#pragma unroll
  for (int i = 0; i < kSplitSteps; ++i) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) add_stream(s, pre[s], streams[i][s], values[i]);
#pragma unroll
    for (const float value : values[i]) {
      squares[i % kHalves] = __fmaf_rn(value, value, squares[i % kHalves]);
    }
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const float sum = warp_sum(squares[half]);
    if (lane == 0) half_squares[half * kRanges + warp] = sum;
  }
  float weights[kSplitSteps][kPerThread];  // of the norm, before the barrier
#pragma unroll
  for (int i = 0; i < kSplitSteps; ++i) load_vector(a.norm + first + i * kStep, weights[i]);
  sync_workers();
  const float part = lane < kHalves * kRanges ? half_squares[lane] : 0.0f;
  const float factor =
      rsqrtf(__fdiv_rn(warp_sum(part), static_cast<float>(kSplitHidden)) + a.norm_eps);
  Y* const y = static_cast<Y*>(a.y) + int64_t{row} * kSplitHidden + first;
#pragma unroll
  for (int i = 0; i < kSplitSteps; ++i) {
    store_normed(weights[i], factor, values[i], y + i * kStep);
  }
}

}  // namespace paceline::cuda::join
