// SPDX-License-Identifier: Apache-2.0

// The ops around latent_attention. Every sum has one order whatever the number of rows, so rows are
// invariant.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "attention/latent_products.cuh"
#include "attention/rope_pairs.cuh"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/latent.h"

namespace paceline {
namespace cuda {
namespace {

// --- append_latents: one block per row -----------------------------------------------------------

constexpr int32_t kAppendThreads = 256;
constexpr int32_t kAppendWarps = kAppendThreads / 32;
constexpr int32_t kRowsAhead = 64;   // which are loaded before it is known whether they exist
constexpr int32_t kQueriesKept = 6;  // of a thread, in registers: 1,536 queries of a row
constexpr int32_t kLatentsKept = 2;  // and 512 latents

// A row that is normed: what a thread has of it, every kAppendThreads-th element. The first kKept
// stay in registers; of longer rows the others are read twice.
template <int32_t kKept, class T>
struct NormedRow {
  const float* weight;  // of the norm; null: no norm
  float weight_offset;
  int32_t size;
  float weights[kKept];
  float values[kKept];

  // Constants; before the kernel waits.
  __device__ __forceinline__ NormedRow(const float* norm, float offset, int32_t length)
      : weight(norm), weight_offset(offset), size(norm == nullptr ? 0 : length) {
#pragma unroll
    for (int32_t i = 0; i < kKept; ++i) weights[i] = at(i) < size ? weight[at(i)] : 0.0f;
  }
  __device__ __forceinline__ static int32_t at(int32_t i) {
    return static_cast<int32_t>(threadIdx.x) + i * kAppendThreads;
  }
  __device__ __forceinline__ void load(const T* x) {
#pragma unroll
    for (int32_t i = 0; i < kKept; ++i) values[i] = at(i) < size ? widen(x[at(i)]) : 0.0f;
  }
  // The thread's part of the sum of squares.
  __device__ __forceinline__ float squares(const T* x) const {
    float sum = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kKept; ++i) sum = __fmaf_rn(values[i], values[i], sum);
#pragma unroll 1
    for (int32_t i = at(kKept); i < size; i += kAppendThreads) {
      const float value = widen(x[i]);
      sum = __fmaf_rn(value, value, sum);
    }
    return sum;
  }
  template <class Y>
  __device__ __forceinline__ void store(const T* x, float factor, Y* y) const {
#pragma unroll
    for (int32_t i = 0; i < kKept; ++i) {
      if (at(i) < size) narrow(values[i] * factor * (weights[i] + weight_offset), y + at(i));
    }
#pragma unroll 1
    for (int32_t i = at(kKept); i < size; i += kAppendThreads) {
      narrow(widen(x[i]) * factor * (weight[i] + weight_offset), y + i);
    }
  }
};

// All loads of a row are in flight together but those of the rotation, which need its position.
template <class T, class Kv>
__global__ void __launch_bounds__(kAppendThreads)
    append_latents_kernel(const __grid_constant__ AppendLatentsParams p) {
  __shared__ float q_partials[kAppendWarps];
  __shared__ float latent_partials[kAppendWarps];
  let_successor_start();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t rank = p.kv_lora_rank;
  const int32_t rope_dim = p.qk_rope_head_dim;
  const int32_t width = rank + rope_dim;
  T* const q = static_cast<T*>(p.qkv_a) + int64_t{row} * (p.q_width + width);
  const T* const c = q + p.q_width;
  NormedRow<kQueriesKept, T> of_q(p.q_norm, p.norm_weight_offset, p.q_width);
  NormedRow<kLatentsKept, T> of_c(p.latent_norm, p.norm_weight_offset, rank);
  wait_for_predecessor();
  if (row >= kRowsAhead && row >= __ldcg(p.num_rows)) return;
  const int32_t num_rows = *p.num_rows;
  const int64_t slot = p.slot_mapping[row];
  const int32_t position = p.rope.positions[row];
  of_q.load(q);
  of_c.load(c);
  const float q_squares = warp_sum(of_q.squares(q));
  const float c_squares = warp_sum(of_c.squares(c));
  if (thread % 32 == 0) {
    q_partials[thread / 32] = q_squares;
    latent_partials[thread / 32] = c_squares;
  }
  __syncthreads();
  // Of few rows not earlier: the loads would wait for the number of rows.
  if (row >= num_rows) return;
  if (p.q_norm != nullptr) {
    const float mean = tree_sum<kAppendWarps>(q_partials) / static_cast<float>(p.q_width);
    of_q.store(q, rsqrtf(mean + p.norm_eps), q);
  }
  // Skip the null block: no kernel reads it, and rows would race on it.
  if (slot < p.entries.block_size) return;
  const int64_t block = slot / p.entries.block_size;
  std::byte* const base = p.entries.base + block * p.entries.block_bytes + p.entries.k_offset;
  Kv* const entry = reinterpret_cast<Kv*>(base) + (slot - block * p.entries.block_size) * width;
  const float mean = tree_sum<kAppendWarps>(latent_partials) / static_cast<float>(rank);
  of_c.store(c, rsqrtf(mean + p.norm_eps), entry);
#pragma unroll 1
  for (int32_t pair = thread; pair < rope_dim / 2; pair += kAppendThreads) {
    rotate_pair_to(p.rope, int64_t{position} + p.rope.position_offset, pair, rope_dim, c + rank,
                   entry + rank);
  }
}

// --- absorb_queries ------------------------------------------------------------------------------

// Rotates the rest of a head's queries, for the rows from first_row on; called by a block.
template <class T>
__device__ __forceinline__ void rotate_queries(const AbsorbQueriesParams& p, int32_t head,
                                               int32_t first_row, int32_t rows) {
  const int32_t nope = p.heads.qk_nope_head_dim;
  const int32_t rope = p.qk_rope_head_dim;
  const int32_t rank = p.heads.kv_b.k;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < rows * (rope / 2);
       i += static_cast<int32_t>(blockDim.x)) {
    const int64_t row = first_row + i / (rope / 2);
    const T* const q =
        static_cast<const T*>(p.q) + row * p.q_stride + int64_t{head} * (nope + rope) + nope;
    T* const y = static_cast<T*>(p.y) + (row * p.heads.num_heads + head) * (rank + rope) + rank;
    rotate_pair(p.rope, static_cast<int32_t>(row), i % (rope / 2), rope, q, y);
  }
}

// On tensor cores. Grid: x heads, y tiles of columns and one block that rotates, z tiles of rows.
template <int32_t kRows>
__global__ void __launch_bounds__(kHeadThreads)
    absorb_queries_tile_kernel(const __grid_constant__ AbsorbQueriesParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  let_successor_start();
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int32_t first_row = static_cast<int32_t>(blockIdx.z) * kRows;
  const int32_t room = min(p.max_rows - first_row, kRows);
  const auto count_rows = [&] { return min(*p.num_rows - first_row, room); };
  if (blockIdx.y == gridDim.y - 1) {
    wait_for_predecessor();
    rotate_queries<__nv_bfloat16>(p, head, first_row, count_rows());
    return;
  }
  const int32_t nope = p.heads.qk_nope_head_dim;
  const int32_t rope = p.qk_rope_head_dim;
  const int32_t rank = p.heads.kv_b.k;
  const int32_t column = static_cast<int32_t>(blockIdx.y) * kHeadColumns;
  const int64_t y_stride = int64_t{p.heads.num_heads} * (rank + rope);
  const HeadProduct product = {
      .weights = reinterpret_cast<const __nv_bfloat16*>(p.heads.kv_b.data) +
                 int64_t{head} * (nope + p.heads.v_head_dim) * rank + column,
      .weight_stride = rank,
      .x = static_cast<const __nv_bfloat16*>(p.q) + first_row * p.q_stride +
           int64_t{head} * (nope + rope),
      .x_stride = p.q_stride,
      .y = static_cast<__nv_bfloat16*>(p.y) + first_row * y_stride + int64_t{head} * (rank + rope) +
           column,
      .y_stride = y_stride,
      .depth = nope};
  multiply_head<true, kRows>(product, room, count_rows, shared_address(shared));
}

// Any sizes and types.
constexpr int32_t kTileRows = 8;  // rows of a block

// A block computes 64 columns of a head for a tile of rows. A thread has 8 columns and every 16th
// row of K_h; the 16 sums of an output are then added in ascending order. The last block of a head
// along y rotates instead.
constexpr int32_t kAbsorbThreads = 128;
constexpr int32_t kAbsorbColumns = 64;
constexpr int32_t kThreadColumns = 8;
constexpr int32_t kColumnThreads = kAbsorbColumns / kThreadColumns;
constexpr int32_t kParts = kAbsorbThreads / kColumnThreads;

template <class T, bool kIsVector>
__global__ void __launch_bounds__(kAbsorbThreads)
    absorb_queries_kernel(const __grid_constant__ AbsorbQueriesParams p) {
  __shared__ float sums[kParts][kTileRows][kAbsorbColumns];
  let_successor_start();
  wait_for_predecessor();
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int32_t first_row = static_cast<int32_t>(blockIdx.z) * kTileRows;
  const int32_t num_rows = min(*p.num_rows, p.max_rows) - first_row;
  if (num_rows <= 0) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t rows = min(num_rows, kTileRows);
  const int32_t nope = p.heads.qk_nope_head_dim;
  const int32_t rope = p.qk_rope_head_dim;
  const int32_t rank = p.heads.kv_b.k;
  if (blockIdx.y == gridDim.y - 1) {
    rotate_queries<T>(p, head, first_row, rows);
    return;
  }
  const int64_t y_stride = int64_t{p.heads.num_heads} * (rank + rope);
  const T* const q =
      static_cast<const T*>(p.q) + first_row * p.q_stride + int64_t{head} * (nope + rope);
  T* const y = static_cast<T*>(p.y) + first_row * y_stride + int64_t{head} * (rank + rope);
  const int32_t part = thread / kColumnThreads;
  const int32_t first_column = static_cast<int32_t>(blockIdx.y) * kAbsorbColumns;
  const int32_t own_column = thread % kColumnThreads * kThreadColumns;
  const int32_t column = first_column + own_column;
  const T* const weight = reinterpret_cast<const T*>(p.heads.kv_b.data) +
                          int64_t{head} * (nope + p.heads.v_head_dim) * rank + column;
  float acc[kTileRows][kThreadColumns] = {};
#pragma unroll 4
  for (int32_t k = part; k < nope; k += kParts) {
    float w[kThreadColumns];
    load_first<kIsVector>(weight + int64_t{k} * rank, rank - column, w);
#pragma unroll
    for (int32_t row = 0; row < kTileRows; ++row) {
      // Rows beyond the last one repeat it, and their sums are dropped.
      const float x = widen(q[min(row, rows - 1) * p.q_stride + k]);
#pragma unroll
      for (int32_t i = 0; i < kThreadColumns; ++i) acc[row][i] = __fmaf_rn(x, w[i], acc[row][i]);
    }
  }
#pragma unroll
  for (int32_t row = 0; row < kTileRows; ++row) {
#pragma unroll
    for (int32_t i = 0; i < kThreadColumns; ++i) sums[part][row][own_column + i] = acc[row][i];
  }
  __syncthreads();
  for (int32_t i = thread; i < rows * kAbsorbColumns; i += kAbsorbThreads) {
    const int32_t row = i / kAbsorbColumns;
    const int32_t at = i % kAbsorbColumns;
    if (first_column + at >= rank) continue;
    float sum = sums[0][row][at];
#pragma unroll
    for (int32_t other = 1; other < kParts; ++other) sum = __fadd_rn(sum, sums[other][row][at]);
    narrow(sum, y + row * y_stride + first_column + at);
  }
}

// --- project_values ------------------------------------------------------------------------------

// On tensor cores. Grid: x heads, y tiles of columns, z tiles of rows.
template <int32_t kRows>
__global__ void __launch_bounds__(kHeadThreads)
    project_values_tile_kernel(const __grid_constant__ ProjectValuesParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  let_successor_start();
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int32_t first_row = static_cast<int32_t>(blockIdx.z) * kRows;
  const int32_t room = min(p.max_rows - first_row, kRows);
  const auto count_rows = [&] { return min(*p.num_rows - first_row, room); };
  const int32_t nope = p.heads.qk_nope_head_dim;
  const int32_t v_dim = p.heads.v_head_dim;
  const int32_t rank = p.heads.kv_b.k;
  const int32_t column = static_cast<int32_t>(blockIdx.y) * kHeadColumns;
  const int64_t x_stride = int64_t{p.heads.num_heads} * rank;
  const int64_t y_stride = int64_t{p.heads.num_heads} * v_dim;
  const int64_t weight_row = int64_t{head} * (nope + v_dim) + nope + column;
  const HeadProduct product = {
      .weights = reinterpret_cast<const __nv_bfloat16*>(p.heads.kv_b.data) + weight_row * rank,
      .weight_stride = rank,
      .x = static_cast<const __nv_bfloat16*>(p.x) + first_row * x_stride + int64_t{head} * rank,
      .x_stride = x_stride,
      .y = static_cast<__nv_bfloat16*>(p.y) + first_row * y_stride + int64_t{head} * v_dim + column,
      .y_stride = y_stride,
      .depth = rank};
  multiply_head<false, kRows>(product, room, count_rows, shared_address(shared));
}

// Any sizes and types.
// A warp computes one column of a head, a row of V_h, for a tile of rows: a lane has 8 elements of
// every 256.
constexpr int32_t kProjectWarps = 8;
constexpr int32_t kLaneElements = 8;

template <class T, bool kIsVector>
__global__ void __launch_bounds__(kProjectWarps * 32)
    project_values_kernel(const __grid_constant__ ProjectValuesParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto head = static_cast<int32_t>(blockIdx.x);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t column =
      static_cast<int32_t>(blockIdx.y) * kProjectWarps + static_cast<int32_t>(threadIdx.x / 32);
  const int32_t first_row = static_cast<int32_t>(blockIdx.z) * kTileRows;
  const int32_t num_rows = min(*p.num_rows, p.max_rows) - first_row;
  const int32_t v_dim = p.heads.v_head_dim;
  if (num_rows <= 0 || column >= v_dim) return;
  const int32_t rows = min(num_rows, kTileRows);
  const int32_t rank = p.heads.kv_b.k;
  const int64_t x_stride = int64_t{p.heads.num_heads} * rank;
  const T* const x = static_cast<const T*>(p.x) + first_row * x_stride + int64_t{head} * rank;
  const int64_t weight_row =
      int64_t{head} * (p.heads.qk_nope_head_dim + v_dim) + p.heads.qk_nope_head_dim + column;
  const T* const weight = reinterpret_cast<const T*>(p.heads.kv_b.data) + weight_row * rank;
  float acc[kTileRows] = {};
  for (int32_t k = lane * kLaneElements; k < rank; k += 32 * kLaneElements) {
    float w[kLaneElements];
    load_first<kIsVector>(weight + k, rank - k, w);
#pragma unroll
    for (int32_t row = 0; row < kTileRows; ++row) {
      float values[kLaneElements];
      load_first<kIsVector>(x + min(row, rows - 1) * x_stride + k, rank - k, values);
#pragma unroll
      for (int32_t i = 0; i < kLaneElements; ++i) acc[row] = __fmaf_rn(values[i], w[i], acc[row]);
    }
  }
#pragma unroll
  for (int32_t row = 0; row < kTileRows; ++row) {
    const float sum = warp_sum(acc[row]);
    if (row < rows && lane == 0) {
      narrow(sum, static_cast<T*>(p.y) +
                      ((int64_t{first_row} + row) * p.heads.num_heads + head) * v_dim + column);
    }
  }
}

void check_heads(const LatentHeads& heads, DType dtype) {
  PACELINE_CHECK(heads.kv_b.format == WeightFormat::kPlain, "kv_b has a format");
  PACELINE_CHECK(heads.kv_b.dtype == dtype, "kv_b is ", dtype_name(heads.kv_b.dtype), " and x ",
                 dtype_name(dtype));
}

[[nodiscard]] constexpr uint32_t tiles(int32_t count, int32_t size) {
  return static_cast<uint32_t>((count + size - 1) / size);
}

constexpr int32_t kFewRows = 16;
constexpr int32_t kManyRows = 64;

// Whether the kernels on tensor cores take products of `depth` by `columns` for each head, with
// rows of x and y that are these numbers of elements apart.
[[nodiscard]] bool fits_tiles(const CudaContext& ctx, DType dtype, const LatentHeads& heads,
                              int32_t depth, int32_t columns, const void* x, int64_t x_stride,
                              const void* y) {
  return dtype == DType::kBFloat16 && depth % kHeadSlice == 0 && columns % kHeadColumns == 0 &&
         head_shared_bytes(kManyRows, depth) <= kMaxHeadBytes &&
         head_shared_bytes(kFewRows, depth) <= ctx.block_shared_bytes && x_stride % 8 == 0 &&
         is_vector_aligned(heads.kv_b.data) && is_vector_aligned(x) && is_vector_aligned(y);
}

template <auto* kKernel, int32_t kRows, class Params>
void launch_tile(CudaContext& ctx, const char* name, uint32_t column_tiles, int32_t depth,
                 const Params& p) {
  static OncePerDevice allow;
  allow(
      [&] { allow_shared_bytes(kKernel, std::min(kMaxHeadBytes, ctx.block_shared_bytes), name); });
  launch(ctx, name, kKernel,
         dim3(static_cast<uint32_t>(p.heads.num_heads), column_tiles, tiles(p.max_rows, kRows)),
         dim3(kHeadThreads), static_cast<size_t>(head_shared_bytes(kRows, depth)), p);
}

// Launches the kernel for few rows or the one for many, for which not every device has room.
template <auto* kFew, auto* kMany, class Params>
void launch_tiles(CudaContext& ctx, const char* name, uint32_t column_tiles, int32_t depth,
                  const Params& p) {
  if (p.max_rows <= kFewRows || head_shared_bytes(kManyRows, depth) > ctx.block_shared_bytes) {
    launch_tile<kFew, kFewRows>(ctx, name, column_tiles, depth, p);
  } else {
    launch_tile<kMany, kManyRows>(ctx, name, column_tiles, depth, p);
  }
}

}  // namespace
}  // namespace cuda

void append_latents(CudaContext& ctx, const AppendLatentsParams& p) {
  PACELINE_CHECK(p.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim ", p.qk_rope_head_dim, " is odd");
  cuda::with_element_type(p.dtype, "qkv_a", [&](auto element) {
    cuda::with_element_type(p.entries.dtype, "KV cache", [&](auto kv_element) {
      cuda::launch(ctx, "append_latents",
                   cuda::append_latents_kernel<decltype(element), decltype(kv_element)>,
                   dim3(static_cast<uint32_t>(p.max_rows)), dim3(cuda::kAppendThreads), 0, p);
    });
  });
}

void absorb_queries(CudaContext& ctx, const AbsorbQueriesParams& p) {
  cuda::check_heads(p.heads, p.dtype);
  const int32_t rank = p.heads.kv_b.k;
  const int32_t nope = p.heads.qk_nope_head_dim;
  if (cuda::fits_tiles(ctx, p.dtype, p.heads, nope, rank, p.q, p.q_stride, p.y) &&
      p.qk_rope_head_dim % 8 == 0) {
    return cuda::launch_tiles<&cuda::absorb_queries_tile_kernel<cuda::kFewRows>,
                              &cuda::absorb_queries_tile_kernel<cuda::kManyRows>>(
        ctx, "absorb_queries", cuda::tiles(rank, cuda::kHeadColumns) + 1, nope, p);
  }
  const dim3 grid(static_cast<uint32_t>(p.heads.num_heads),
                  cuda::tiles(rank, cuda::kAbsorbColumns) + 1,
                  cuda::tiles(p.max_rows, cuda::kTileRows));
  cuda::with_element_type(p.dtype, "q", [&](auto element) {
    using T = decltype(element);
    const bool is_vector = cuda::is_vector_aligned(p.heads.kv_b.data) && rank % 8 == 0;
    cuda::launch(
        ctx, "absorb_queries",
        is_vector ? cuda::absorb_queries_kernel<T, true> : cuda::absorb_queries_kernel<T, false>,
        grid, dim3(cuda::kAbsorbThreads), 0, p);
  });
}

void project_values(CudaContext& ctx, const ProjectValuesParams& p) {
  cuda::check_heads(p.heads, p.dtype);
  const int32_t rank = p.heads.kv_b.k;
  if (cuda::fits_tiles(ctx, p.dtype, p.heads, rank, p.heads.v_head_dim, p.x,
                       int64_t{p.heads.num_heads} * rank, p.y)) {
    return cuda::launch_tiles<&cuda::project_values_tile_kernel<cuda::kFewRows>,
                              &cuda::project_values_tile_kernel<cuda::kManyRows>>(
        ctx, "project_values", cuda::tiles(p.heads.v_head_dim, cuda::kHeadColumns), rank, p);
  }
  const dim3 grid(static_cast<uint32_t>(p.heads.num_heads),
                  cuda::tiles(p.heads.v_head_dim, cuda::kProjectWarps),
                  cuda::tiles(p.max_rows, cuda::kTileRows));
  cuda::with_element_type(p.dtype, "x", [&](auto element) {
    using T = decltype(element);
    const bool is_vector = cuda::is_vector_aligned(p.heads.kv_b.data) &&
                           cuda::is_vector_aligned(p.x) && p.heads.kv_b.k % 8 == 0;
    cuda::launch(
        ctx, "project_values",
        is_vector ? cuda::project_values_kernel<T, true> : cuda::project_values_kernel<T, false>,
        grid, dim3(cuda::kProjectWarps * 32), 0, p);
  });
}

}  // namespace paceline
