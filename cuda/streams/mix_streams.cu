// SPDX-License-Identifier: Apache-2.0

// The mix of residual streams: dot products of a whole row with the rows of a small matrix, then
// factors by sigmoid and Sinkhorn's iterations. A cluster of eight blocks takes four rows; each
// block has an eighth of the columns, and reads the weights of these once for all four rows.
// Without clusters one block takes one eighth after the other. A sum is over ascending columns in a
// lane, then over the lanes and then over the blocks in order, so rows are invariant.

#include <algorithm>
#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "ops/streams.h"
#include "streams/mix_row.cuh"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kBlocks = 8;    // of a cluster
constexpr int32_t kRows = 4;      // of a cluster
constexpr int32_t kPerLane = 4;   // columns that a lane takes at once
constexpr int32_t kStrip = 1024;  // columns that a block takes at once
constexpr int32_t kMaxMixWidth = mix_width(kMaxStreams, false);
static_assert(kRows <= kBlocks && kRows <= kWarps && kMaxMixWidth < kThreads);

// A warp has every kWarps-th row of the weights, kPerWarp at most.
template <bool kIsVector, int kPerWarp, int kMaxCount, bool kIsCluster>
__global__ void __launch_bounds__(kThreads)
    mix_streams_kernel(const __grid_constant__ MixStreamsParams p) {
  // Of this block's columns; of one block in place of a cluster, of each eighth.
  constexpr int32_t kParts = kIsCluster ? 1 : kBlocks;
  __shared__ __align__(16) float x[kRows][kStrip];
  __shared__ float products[kParts][kRows][kMaxMixWidth + 1];
  __shared__ float totals[kMaxMixWidth + 1];  // of the row that this block completes
  let_successor_start();
  wait_for_predecessor();
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kRows;
  const int32_t rows = min(min(*p.num_rows, p.max_rows) - first_row, kRows);
  if (rows <= 0) return;  // all blocks of the cluster
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const int32_t size = p.num_streams * p.hidden;
  const int32_t width = mix_width(p.num_streams, p.is_end);
  const int32_t per_block = ((size + kBlocks - 1) / kBlocks + kPerLane - 1) / kPerLane * kPerLane;
  for (int32_t part = 0; part < kParts; ++part) {
    const int32_t rank = kIsCluster ? static_cast<int32_t>(blockIdx.x) : part;
    const int32_t begin = min(rank * per_block, size);
    const int32_t end = min(begin + per_block, size);
    float sums[kPerWarp][kRows] = {};
    float squares = 0.0f;
    for (int32_t strip = begin; strip < end; strip += kStrip) {
      const int32_t count = min(end - strip, kStrip);
      __syncthreads();
      for (int32_t i = thread * kPerLane; i < kRows * kStrip; i += kThreads * kPerLane) {
        const int32_t row = i / kStrip;
        const int32_t column = i % kStrip;
        float values[kPerLane];
        load_first<kIsVector>(p.x + int64_t{first_row + row} * size + strip + column,
                              row < rows ? count - column : 0, values);
        store_vector(values, &x[row][column]);
      }
      __syncthreads();
#pragma unroll 2
      for (int32_t column = lane * kPerLane; column < count; column += 32 * kPerLane) {
        float w[kPerWarp][kPerLane];
#pragma unroll
        for (int i = 0; i < kPerWarp; ++i) {
          const int32_t at = warp + i * kWarps;
          load_first<kIsVector>(p.weight + int64_t{at} * size + strip + column,
                                at < width ? count - column : 0, w[i]);
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          float values[kPerLane];
          load_vector(&x[row][column], values);
#pragma unroll
          for (int i = 0; i < kPerWarp; ++i) {
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
              sums[i][row] = __fmaf_rn(values[j], w[i][j], sums[i][row]);
            }
          }
        }
      }
      if (warp < kRows) {
        for (int32_t column = lane * kPerLane; column < count; column += 32 * kPerLane) {
          float values[kPerLane];
          load_vector(&x[warp][column], values);
#pragma unroll
          for (const float value : values) squares = __fmaf_rn(value, value, squares);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      const int32_t at = warp + i * kWarps;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float sum = warp_sum(sums[i][row]);
        if (lane == 0 && at < width) products[part][row][at] = sum;
      }
    }
    squares = warp_sum(squares);
    if (warp < kRows && lane == 0) products[part][warp][width] = squares;
  }
  if constexpr (kIsCluster) {
    cluster_barrier();
    // Block i completes row i.
    const auto rank = static_cast<int32_t>(blockIdx.x);
    if (rank < rows) {
      if (thread <= width) {
        float total = *in_cluster(&products[0][rank][thread], 0);
#pragma unroll
        for (int32_t block = 1; block < kBlocks; ++block) {
          total = __fadd_rn(total, *in_cluster(&products[0][rank][thread], block));
        }
        totals[thread] = total;
      }
      __syncthreads();
      if (warp == 0) write_mix<kMaxCount, /*kIsFull=*/false>(p, first_row + rank, totals);
    }
    cluster_barrier();  // no block exits while others read its shared memory
  } else {
    for (int32_t row = 0; row < rows; ++row) {
      __syncthreads();  // also after the last reads of the totals of the row before
      if (thread <= width) {
        float total = products[0][row][thread];
        for (int32_t part = 1; part < kParts; ++part) {
          total = __fadd_rn(total, products[part][row][thread]);
        }
        totals[thread] = total;
      }
      __syncthreads();
      if (warp == 0) write_mix<kMaxCount, /*kIsFull=*/false>(p, first_row + row, totals);
    }
  }
}

}  // namespace
}  // namespace cuda

void mix_streams(CudaContext& ctx, const MixStreamsParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.num_streams >= 1 && p.num_streams <= kMaxStreams, p.num_streams, " streams");
  const bool is_vector = p.num_streams * p.hidden % kPerLane == 0 && is_vector_aligned(p.x) &&
                         is_vector_aligned(p.weight);
  const auto run = [&]<bool kIsCluster>() {
    const auto launch_it = [&](void (*kernel)(MixStreamsParams)) {
      const uint32_t blocks = kIsCluster ? kBlocks : 1;
      launch_clusters(ctx, "mix_streams", kernel,
                      dim3(blocks, static_cast<uint32_t>((p.max_rows + kRows - 1) / kRows)),
                      dim3(kThreads), dim3(blocks), 0, p);
    };
    constexpr int kMost = (kMaxMixWidth + kWarps - 1) / kWarps;
    if (p.num_streams <= 4) {
      constexpr int kFew = mix_width(4, false) / kWarps;
      launch_it(is_vector ? mix_streams_kernel<true, kFew, 4, kIsCluster>
                          : mix_streams_kernel<false, kFew, 4, kIsCluster>);
    } else {
      launch_it(is_vector ? mix_streams_kernel<true, kMost, kMaxStreams, kIsCluster>
                          : mix_streams_kernel<false, kMost, kMaxStreams, kIsCluster>);
    }
  };
  ctx.has_clusters ? run.operator()<true>() : run.operator()<false>();
}

}  // namespace paceline
