// SPDX-License-Identifier: Apache-2.0

// write_streams, mix_streams and read_streams in one kernel, for four streams. Where there are few
// rows, join_split.cuh takes them. Else a cluster of eight blocks takes four rows; each block has
// an eighth of the columns of all streams, which it keeps in shared memory from the write to the
// read. Without clusters one block takes one eighth after the other. Sums are over ascending
// columns in a lane, over the lanes, and then over the warps and the blocks in order, in all
// kernels: rows are invariant.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "ops/streams.h"
#include "streams/join_parts.cuh"
#include "streams/join_split.cuh"
#include "streams/mix_row.cuh"

namespace paceline {
namespace cuda::join {
namespace {

constexpr int32_t kBlocks = kRanges;  // of a cluster
constexpr int32_t kRows = 4;          // of a cluster
constexpr int32_t kWorkers = 256;
constexpr int32_t kWorkerWarps = kWorkers / 32;
constexpr int32_t kThreads = kWorkers + 32;  // a further warp makes the mix while others read
constexpr int32_t kPerWarp = kWidth / kWorkerWarps;
constexpr int32_t kMaxColumns = 1024;                  // of a block and a stream
constexpr int32_t kWarpsOfRow = kWorkerWarps / kRows;  // of what the branch reads
constexpr int32_t kMaxPieces = kMaxColumns / (32 * kWarpsOfRow * kPerThread);  // of a lane
static_assert(kRows <= kBlocks && kPerWarp * kWorkerWarps == kWidth && kWarpsOfRow == kHalves);

struct Shared {
  float products[kRows][kWidth + 1];  // of the block's columns, then the sum of squares
  float totals[kWidth + 1];           // of the row whose mix this block makes
  float squares[kRows][kWarpsOfRow];  // of what the branch reads, of the block's columns
};

// Makes the new streams of the block's rows in `columns` columns of each stream, in shared memory
// and, with a branch, in global memory.
template <class X>
__device__ __forceinline__ void make_streams(const JoinArgs& a, int32_t first_row, int32_t rows,
                                             int32_t first_column, int32_t columns, float* x) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t vectors = columns / kPerThread;  // of a stream
  for (int32_t i = thread; i < kRows * vectors; i += kThreads) {
    const int32_t row = i / vectors;
    const int32_t column = i % vectors * kPerThread;
    float values[kStreams][kPerThread] = {};
    if (row < rows) {
      const int64_t at = int64_t{first_row + row} * kStreams * a.hidden + first_column + column;
      const float* const from = a.mix.x + at;
      float before[kStreams][kPerThread];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) load_vector(from + int64_t{s} * a.hidden, before[s]);
      if (a.branch != nullptr) {
        float branch[kPerThread];
        load_vector(static_cast<const X*>(a.branch) + int64_t{first_row + row} * a.hidden +
                        first_column + column,
                    branch);
        join_branch(a.mix.mix + int64_t{first_row + row} * kWidth, before, branch, values);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
          store_vector(values[s], a.streams + at + int64_t{s} * a.hidden);
        }
      } else {
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
#pragma unroll
          for (int e = 0; e < kPerThread; ++e) values[s][e] = before[s][e];
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      store_vector(values[s], x + (row * kStreams + s) * columns + column);
    }
  }
}

// Products of these columns with the weights, then the sum of squares: a warp has every eighth row
// of the weights.
__device__ __forceinline__ void multiply_streams(const JoinArgs& a, int32_t first_column,
                                                 int32_t columns, int32_t width, const float* x,
                                                 float (&products)[kRows][kWidth + 1]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  if (warp < kWorkerWarps) {
    float sums[kPerWarp][kRows] = {};
    float squares = 0.0f;
    for (int s = 0; s < kStreams; ++s) {
#pragma unroll 4
      for (int32_t column = lane * kPerThread; column < columns; column += 32 * kPerThread) {
        float w[kPerWarp][kPerThread] = {};
#pragma unroll
        for (int i = 0; i < kPerWarp; ++i) {
          const int32_t at = warp + i * kWorkerWarps;
          if (at < width) {
            load_vector(
                a.mix.weight + (int64_t{at} * kStreams + s) * a.hidden + first_column + column,
                w[i]);
          }
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          float values[kPerThread];
          load_vector(x + (row * kStreams + s) * columns + column, values);
#pragma unroll
          for (int i = 0; i < kPerWarp; ++i) {
#pragma unroll
            for (int e = 0; e < kPerThread; ++e) {
              sums[i][row] = __fmaf_rn(values[e], w[i][e], sums[i][row]);
            }
          }
          if (row == warp) {
#pragma unroll
            for (const float value : values) squares = __fmaf_rn(value, value, squares);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float sum = warp_sum(sums[i][row]);
        const int32_t at = warp + i * kWorkerWarps;
        if (lane == 0 && at < width) products[row][at] = sum;
      }
    }
    squares = warp_sum(squares);
    if (warp < kRows && lane == 0) products[warp][width] = squares;
  }
}

template <class X, class Y>
__global__ void __launch_bounds__(kThreads)
    join_streams_kernel(const __grid_constant__ JoinArgs a) {
  extern __shared__ __align__(16) float x[];  // [kRows, kStreams, columns]
  __shared__ Shared shared;
  let_successor_start();
  const auto rank = static_cast<int32_t>(blockIdx.x);
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kRows;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const int32_t columns = a.hidden / kBlocks;
  const int32_t first_column = rank * columns;
  const int32_t width = mix_width(kStreams, a.mix.is_end);
  // Constants come to L2 while the previous kernel still runs.
  constexpr int32_t kLine = 32;  // floats of 128 bytes
  const int32_t lines = columns / kLine;
  for (int32_t i = thread; i < width * kStreams * lines; i += kThreads) {
    const int32_t part = i / lines;  // a stream's part of a row of weights
    prefetch_to_l2(a.mix.weight + int64_t{part} * a.hidden + first_column + i % lines * kLine);
  }
  if (thread < lines) prefetch_to_l2(a.norm + first_column + thread * kLine);
  if (thread == kWorkers) {
    prefetch_to_l2(a.mix.base);
    prefetch_to_l2(a.mix.scale);
  }
  wait_for_predecessor();
  const int32_t rows = min(min(*a.num_rows, a.max_rows) - first_row, kRows);
  if (rows <= 0) return;  // all blocks of the cluster

  make_streams<X>(a, first_row, rows, first_column, columns, x);
  __syncthreads();

  multiply_streams(a, first_column, columns, width, x, shared.products);
  cluster_barrier();
  const auto total_of = [&](int32_t row, int32_t at) {
    float total = *in_cluster(&shared.products[row][at], 0);
#pragma unroll
    for (int32_t block = 1; block < kBlocks; ++block) {
      total = __fadd_rn(total, *in_cluster(&shared.products[row][at], block));
    }
    return total;
  };

  if (warp == kWorkerWarps) {
    // Block i makes the mix of row i. This warp reads what the others do before it arrives, which
    // is about when they arrive, too, and computes while they wait for each other.
    if (rank < rows && lane <= width) shared.totals[lane] = total_of(rank, lane);
    __syncwarp();
    cluster_arrive();
    if (rank < rows) {
      write_mix<kStreams, /*kIsFull=*/true>(a.mix, first_row + rank, shared.totals);
    }
    cluster_wait();
    cluster_barrier();
    return;
  }

  // What the branch reads: two warps have a row, and every block computes `pre` for itself.
  const int32_t row = warp % kRows;
  const int32_t first = (warp / kRows * 32 + lane) * kPerThread;
  constexpr int32_t kPieceStep = kWarpsOfRow * kStep;
  float pre[kStreams];
  make_pre(a.mix, total_of(row, lane < kStreams ? lane : width), lane, pre);
  float values[kMaxPieces][kPerThread];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPieces; ++i) {
    const int32_t column = first + i * kPieceStep;
    if (column >= columns) break;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      float of_stream[kPerThread];
      load_vector(x + (row * kStreams + s) * columns + column, of_stream);
      add_stream(s, pre[s], of_stream, values[i]);
    }
#pragma unroll
    for (const float value : values[i]) squares = __fmaf_rn(value, value, squares);
  }
  float weights[kMaxPieces][kPerThread];  // of the norm, before the barriers that follow
#pragma unroll
  for (int i = 0; i < kMaxPieces; ++i) {
    const int32_t column = first + i * kPieceStep;
    if (column >= columns) break;
    load_vector(a.norm + first_column + column, weights[i]);
  }
  squares = warp_sum(squares);
  if (lane == 0) shared.squares[row][warp / kRows] = squares;
  cluster_barrier();
  constexpr int32_t kParts = kBlocks * kWarpsOfRow;
  static_assert(kParts <= 32);
  const float part =
      lane < kParts ? *in_cluster(&shared.squares[row][lane / kBlocks], lane % kBlocks) : 0.0f;
  const float mean = __fdiv_rn(warp_sum(part), static_cast<float>(a.hidden));
  cluster_arrive();
  const float factor = rsqrtf(mean + a.norm_eps);
  if (row < rows) {
    Y* const y = static_cast<Y*>(a.y) + int64_t{first_row + row} * a.hidden + first_column;
#pragma unroll
    for (int i = 0; i < kMaxPieces; ++i) {
      const int32_t column = first + i * kPieceStep;
      if (column >= columns) break;
      store_normed(weights[i], factor, values[i], y + column);
    }
  }
  cluster_wait();  // no block exits while others read its shared memory
}

struct WholeShared {
  float products[kBlocks][kRows][kWidth + 1];
  float totals[kRows][kWidth + 1];
  float squares[kBlocks][kRows][kWarpsOfRow];
};

// The same by one block in place of a cluster, one eighth of the columns after the other. What the
// branch reads is computed twice, as neither registers nor shared memory have room for it.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads) join_whole_kernel(const __grid_constant__ JoinArgs a) {
  extern __shared__ __align__(16) float x[];  // [kRows, kStreams, columns]
  __shared__ WholeShared shared;
  let_successor_start();
  wait_for_predecessor();
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) * kRows;
  const int32_t rows = min(min(*a.num_rows, a.max_rows) - first_row, kRows);
  if (rows <= 0) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const int32_t columns = a.hidden / kBlocks;
  const int32_t width = mix_width(kStreams, a.mix.is_end);
#pragma unroll 1
  for (int32_t part = 0; part < kBlocks; ++part) {
    make_streams<X>(a, first_row, rows, part * columns, columns, x);
    __syncthreads();
    multiply_streams(a, part * columns, columns, width, x, shared.products[part]);
    __syncthreads();  // `x` is written again
  }
  for (int32_t i = thread; i < rows * (width + 1); i += kThreads) {
    const int32_t row = i / (width + 1);
    const int32_t at = i % (width + 1);
    float total = shared.products[0][row][at];
    for (int32_t part = 1; part < kBlocks; ++part) {
      total = __fadd_rn(total, shared.products[part][row][at]);
    }
    shared.totals[row][at] = total;
  }
  __syncthreads();

  // Calls visit(i, values) for what the branch reads of this warp's part of a row, of one eighth of
  // the columns.
  const int32_t row = warp % kRows;
  const bool reads = warp < kWorkerWarps && row < rows;
  constexpr int32_t kPieceStep = kWarpsOfRow * kStep;
  float pre[kStreams];
  const float* const streams =
      (a.branch != nullptr ? a.streams : a.mix.x) + int64_t{first_row + row} * kStreams * a.hidden;
  const auto for_pieces = [&](int32_t part, const auto& visit) {
    for (int32_t at = (warp / kRows * 32 + lane) * kPerThread; at < columns; at += kPieceStep) {
      const int32_t column = part * columns + at;
      float values[kPerThread];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        float of_stream[kPerThread];
        load_vector(streams + int64_t{s} * a.hidden + column, of_stream);
        add_stream(s, pre[s], of_stream, values);
      }
      visit(column, values);
    }
  };
  if (warp == kWorkerWarps) {
    for (int32_t i = 0; i < rows; ++i) {
      write_mix<kStreams, /*kIsFull=*/true>(a.mix, first_row + i, shared.totals[i]);
    }
  } else if (reads) {
    make_pre(a.mix, shared.totals[row][lane < kStreams ? lane : width], lane, pre);
#pragma unroll 1
    for (int32_t part = 0; part < kBlocks; ++part) {
      float squares = 0.0f;
      for_pieces(part, [&](int32_t, const float (&values)[kPerThread]) {
#pragma unroll
        for (const float value : values) squares = __fmaf_rn(value, value, squares);
      });
      squares = warp_sum(squares);
      if (lane == 0) shared.squares[part][row][warp / kRows] = squares;
    }
  }
  __syncthreads();
  if (!reads) return;
  constexpr int32_t kParts = kBlocks * kWarpsOfRow;
  const float part_squares =
      lane < kParts ? shared.squares[lane % kBlocks][row][lane / kBlocks] : 0.0f;
  const float mean = __fdiv_rn(warp_sum(part_squares), static_cast<float>(a.hidden));
  const float factor = rsqrtf(mean + a.norm_eps);
  Y* const y = static_cast<Y*>(a.y) + int64_t{first_row + row} * a.hidden;
#pragma unroll 1
  for (int32_t part = 0; part < kBlocks; ++part) {
    for_pieces(part, [&](int32_t column, float (&values)[kPerThread]) {
      float weights[kPerThread];
      load_vector(a.norm + column, weights);
      store_normed(weights, factor, values, y + column);
    });
  }
}

// Whether one of the three kernels takes the op; else it is three ops.
bool is_whole(const JoinStreamsParams& p) {
  const MixStreamsParams& mix = p.mix;
  return mix.num_streams == kStreams && mix.hidden % (kBlocks * kPerThread) == 0 &&
         mix.hidden <= kBlocks * kMaxColumns && is_vector_aligned(mix.x) &&
         is_vector_aligned(mix.weight) && is_vector_aligned(p.read.weight) &&
         is_vector_aligned(p.read.y) && (!p.write || is_vector_aligned(p.write->x));
}

bool takes_split(const CudaContext& ctx, const MixStreamsParams& mix) {
  return mix.max_rows <= std::min(kSplitRows, ctx.num_counters) && mix.hidden == kSplitHidden &&
         is_vector_aligned(mix.mix) && split_bytes(mix.max_rows) <= ctx.workspace_bytes;
}

}  // namespace
}  // namespace cuda::join

void join_streams(CudaContext& ctx, const JoinStreamsParams& p) {
  using namespace cuda;
  using namespace cuda::join;
  check_join(p);
  if (!is_whole(p)) {
    if (p.write) write_streams(ctx, *p.write);
    mix_streams(ctx, p.mix);
    read_streams(ctx, p.read);
    return;
  }
  const JoinArgs args = {.num_rows = p.mix.num_rows,
                         .max_rows = p.mix.max_rows,
                         .hidden = p.mix.hidden,
                         .branch = p.write ? p.write->x : nullptr,
                         .streams = p.write ? p.write->y : nullptr,
                         .mix = p.mix,
                         .norm = p.read.weight,
                         .norm_eps = p.read.eps,
                         .y = p.read.y};
  const auto max_rows = static_cast<uint32_t>(args.max_rows);
  const auto width = static_cast<uint32_t>(mix_width(kStreams, p.mix.is_end));
  const auto shared_bytes = static_cast<size_t>(kRows * kStreams * (p.mix.hidden / kBlocks)) * 4;
  with_element_type(p.write ? p.write->x_dtype : DType::kFloat32, "a branch", [&](auto x_element) {
    with_element_type(p.read.y_dtype, "the input of a branch", [&](auto y_element) {
      using X = decltype(x_element);
      using Y = decltype(y_element);
      if (takes_split(ctx, p.mix)) {
        launch(ctx, "join_streams", join_split_kernel<X, Y>,
               dim3(kRanges, (width + kSplitProducts - 1) / kSplitProducts, max_rows),
               dim3(kSplitThreads), 0, args, reinterpret_cast<float*>(ctx.workspace), ctx.counters);
        return;
      }
      constexpr auto* kKernel = &join_streams_kernel<X, Y>;
      constexpr auto* kWholeKernel = &join_whole_kernel<X, Y>;
      static OncePerDevice allow;
      allow([] {
        constexpr size_t kBytes = size_t{kRows} * kStreams * kMaxColumns * 4;
        allow_shared_bytes(kKernel, kBytes, "join_streams");
        allow_shared_bytes(kWholeKernel, kBytes, "join_streams");
      });
      const uint32_t tiles = (max_rows + kRows - 1) / kRows;
      if (!ctx.has_clusters) {
        launch(ctx, "join_streams", kWholeKernel, dim3(tiles), dim3(kThreads), shared_bytes, args);
        return;
      }
      launch_clusters(ctx, "join_streams", kKernel, dim3(kBlocks, tiles), dim3(kThreads),
                      dim3(kBlocks), shared_bytes, args);
    });
  });
}

}  // namespace paceline
