// SPDX-License-Identifier: Apache-2.0

// The ops of compressed attention that write window entries, rotate heads and fill the tail store.
// Every sum has one order whatever the number of rows, so rows are invariant.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/rope_pairs.cuh"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/compressed.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kPerThread = 8;  // elements that a thread takes at once

// --- append_window_entries: a block norms q of a row, another makes the entry --------------------

constexpr int32_t kAppendThreads = 128;
constexpr int32_t kAppendWarps = kAppendThreads / 32;

// Calls visit(first, count) for the pieces of kPerThread elements that the thread takes.
template <class Visit>
__device__ __forceinline__ void for_pieces(int32_t size, const Visit& visit) {
  for (int32_t first = static_cast<int32_t>(threadIdx.x) * kPerThread; first < size;
       first += kAppendThreads * kPerThread) {
    visit(first, size - first);
  }
}

// Writes norm(x) to `to`, which may be x. Every thread of the block calls it.
template <bool kIsVector, class T, class To>
__device__ __forceinline__ void norm_row(const T* x, int32_t size, const float* weight,
                                         float weight_offset, float eps,
                                         float (&partials)[kAppendWarps], To* to) {
  float squares = 0.0f;
  for_pieces(size, [&](int32_t first, int32_t count) {
    float values[kPerThread];
    load_first<kIsVector>(x + first, count, values);
#pragma unroll
    for (const float value : values) squares = __fmaf_rn(value, value, squares);
  });
  const float factor = rsqrtf(block_sum(squares, partials) / static_cast<float>(size) + eps);
  for_pieces(size, [&](int32_t first, int32_t count) {
    float values[kPerThread];
    float weights[kPerThread];
    load_first<kIsVector>(x + first, count, values);
    load_first<kIsVector>(weight + first, count, weights);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] *= factor * (weights[i] + weight_offset);
    store_first<kIsVector>(values, count, to + first);
  });
}

template <class T, class Kv, bool kIsVector>
__global__ void __launch_bounds__(kAppendThreads)
    append_window_entries_kernel(const __grid_constant__ AppendWindowEntriesParams p) {
  __shared__ __align__(16) float values[kMaxCompressedHeadDim];
  __shared__ float partials[kAppendWarps];
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  if (row >= *p.num_rows) return;
  T* const q = static_cast<T*>(p.qkv_a) + int64_t{row} * (p.q_width + p.head_dim);
  if (blockIdx.y == 0) {
    norm_row<kIsVector>(q, p.q_width, p.q_norm, p.norm_weight_offset, p.norm_eps, partials, q);
    return;
  }
  const int64_t slot = p.slot_mapping[row];
  // Skip the null block: no kernel reads it, and rows would race on it.
  if (slot < p.entries.block_size) return;
  norm_row<kIsVector>(q + p.q_width, p.head_dim, p.entry_norm, p.norm_weight_offset, p.norm_eps,
                      partials, values);
  __syncthreads();
  const int64_t block = slot / p.entries.block_size;
  std::byte* const base = p.entries.base + block * p.entries.block_bytes + p.entries.k_offset;
  Kv* const entry =
      reinterpret_cast<Kv*>(base) + (slot - block * p.entries.block_size) * p.head_dim;
  const int32_t before_tail = p.head_dim - p.rope_head_dim;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t i = thread; i < before_tail; i += kAppendThreads) narrow(values[i], entry + i);
  for (int32_t pair = thread; pair < p.rope_head_dim / 2; pair += kAppendThreads) {
    rotate_pair(p.rope, row, pair, p.rope_head_dim, values + before_tail, entry + before_tail);
  }
}

// --- rotate_heads --------------------------------------------------------------------------------

constexpr int32_t kHeadWarps = 8;                                          // of a block
constexpr int32_t kMaxPieces = kMaxCompressedHeadDim / (32 * kPerThread);  // of a lane

// Rotates four neighbouring pairs of the tail, of which `first` is the first element.
__device__ __forceinline__ void rotate_piece(const RotateHeadsParams& p, int64_t position,
                                             int32_t first, float (&values)[kPerThread]) {
  constexpr int32_t kPairs = kPerThread / 2;
  float cos[kPairs];
  float sin[kPairs];
  const int64_t at = position * (p.rope_head_dim / 2) + first / 2;
  load_vector(p.rope.cos + at, cos);
  load_vector(p.rope.sin + at, sin);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 pair =
        rotated(values[2 * i], values[2 * i + 1], cos[i], p.is_inverse ? -sin[i] : sin[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// A warp norms and rotates a head, which its lanes keep in registers. The tail begins at a piece
// and has neighbouring pairs.
template <class T>
__global__ void __launch_bounds__(kHeadWarps * 32)
    norm_heads_kernel(const __grid_constant__ RotateHeadsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.y * kHeadWarps + threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (row >= *p.num_rows || head >= p.num_heads) return;
  T* const x = static_cast<T*>(p.x) + (int64_t{row} * p.num_heads + head) * p.head_dim;
  const int64_t position = p.rope.positions[row] + p.rope.position_offset;
  const int32_t before_tail = p.head_dim - p.rope_head_dim;
  float values[kMaxPieces][kPerThread];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPieces; ++i) {
    const int32_t first = (lane + 32 * i) * kPerThread;
    load_first<true>(x + first, p.head_dim - first, values[i]);
#pragma unroll
    for (const float value : values[i]) squares = __fmaf_rn(value, value, squares);
  }
  const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.norm_eps);
#pragma unroll
  for (int i = 0; i < kMaxPieces; ++i) {
    const int32_t first = (lane + 32 * i) * kPerThread;
    if (first >= p.head_dim) break;
#pragma unroll
    for (float& value : values[i]) value = __fmul_rn(value, factor);
    if (first >= before_tail) rotate_piece(p, position, first - before_tail, values[i]);
    store_vector(values[i], x + first);
  }
}

// A thread rotates one piece of a tail, of such heads.
template <class T>
__global__ void __launch_bounds__(kHeadWarps * 32)
    rotate_tails_kernel(const __grid_constant__ RotateHeadsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t pieces = p.rope_head_dim / kPerThread;  // of a head
  const auto at = static_cast<int32_t>(blockIdx.y * (kHeadWarps * 32) + threadIdx.x);
  const int32_t head = at / pieces;
  if (row >= *p.num_rows || head >= p.num_heads) return;
  const int32_t first = at % pieces * kPerThread;
  T* const x = static_cast<T*>(p.x) + (int64_t{row} * p.num_heads + head) * p.head_dim +
               p.head_dim - p.rope_head_dim + first;
  float values[kPerThread];
  load_vector(x, values);
  rotate_piece(p, p.rope.positions[row] + p.rope.position_offset, first, values);
  store_vector(values, x);
}

// A warp takes a head of any shape.
template <class T>
__global__ void __launch_bounds__(kHeadWarps * 32)
    rotate_heads_kernel(const __grid_constant__ RotateHeadsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.y * kHeadWarps + threadIdx.x / 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (row >= *p.num_rows || head >= p.num_heads) return;
  T* const x = static_cast<T*>(p.x) + (int64_t{row} * p.num_heads + head) * p.head_dim;
  const int32_t before_tail = p.head_dim - p.rope_head_dim;
  float factor = 1.0f;
  if (p.has_norm) {
    float squares = 0.0f;
    for (int32_t i = lane; i < p.head_dim; i += 32) {
      const float value = widen(x[i]);
      squares = __fmaf_rn(value, value, squares);
    }
    factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.norm_eps);
    for (int32_t i = lane; i < before_tail; i += 32) narrow(__fmul_rn(widen(x[i]), factor), x + i);
  }
  const int64_t position = p.rope.positions[row] + p.rope.position_offset;
  T* const tail = x + before_tail;
  for (int32_t i = lane; i < p.rope_head_dim / 2; i += 32) {
    const int64_t angle = position * (p.rope_head_dim / 2) + i;
    const float sin = p.is_inverse ? -p.rope.sin[angle] : p.rope.sin[angle];
    const Pair at = pair_of(p.rope, i, p.rope_head_dim);
    const float2 result =
        rotated(__fmul_rn(widen(tail[at.first]), factor), __fmul_rn(widen(tail[at.second]), factor),
                p.rope.cos[angle], sin);
    narrow(result.x, tail + at.first);
    narrow(result.y, tail + at.second);
  }
}

// --- append_tail ---------------------------------------------------------------------------------

constexpr int32_t kTailThreads = 128;

__global__ void __launch_bounds__(kTailThreads)
    append_tail_kernel(const __grid_constant__ AppendTailParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const auto first = static_cast<int32_t>(blockIdx.y * kTailThreads + threadIdx.x) * 4;
  if (row >= *p.num_rows || first >= p.width) return;
  const int64_t slot = p.slot_mapping[row];
  if (slot < p.tail.block_size) return;
  const int64_t block = slot / p.tail.block_size;
  std::byte* const base = p.tail.base + block * p.tail.block_bytes + p.tail.k_offset;
  float* const to = reinterpret_cast<float*>(base) +
                    (slot - block * p.tail.block_size) * int64_t{p.width} + first;
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(p.x + row * p.x_stride + first);
}

[[nodiscard]] constexpr uint32_t tiles(int32_t count, int32_t size) {
  return static_cast<uint32_t>((count + size - 1) / size);
}

void check_tail(const char* of, int32_t head_dim, int32_t rope_head_dim) {
  PACELINE_CHECK(head_dim > 0 && head_dim <= kMaxCompressedHeadDim, of, " of ", head_dim,
                 " elements; they can have 1 to ", kMaxCompressedHeadDim);
  PACELINE_CHECK(rope_head_dim >= 0 && rope_head_dim % 2 == 0 && rope_head_dim <= head_dim,
                 "rope_head_dim ", rope_head_dim, " of ", head_dim);
}

}  // namespace
}  // namespace cuda

void append_window_entries(CudaContext& ctx, const AppendWindowEntriesParams& p) {
  using namespace cuda;
  check_tail("entries", p.head_dim, p.rope_head_dim);
  const bool is_vector = p.q_width % kPerThread == 0 && p.head_dim % kPerThread == 0 &&
                         is_vector_aligned(p.qkv_a) && is_vector_aligned(p.q_norm) &&
                         is_vector_aligned(p.entry_norm);
  with_element_type(p.dtype, "qkv_a", [&](auto element) {
    with_element_type(p.entries.dtype, "KV cache", [&](auto kv_element) {
      using T = decltype(element);
      using Kv = decltype(kv_element);
      launch(ctx, "append_window_entries",
             is_vector ? append_window_entries_kernel<T, Kv, true>
                       : append_window_entries_kernel<T, Kv, false>,
             dim3(static_cast<uint32_t>(p.max_rows), 2), dim3(kAppendThreads), 0, p);
    });
  });
}

void rotate_heads(CudaContext& ctx, const RotateHeadsParams& p) {
  using namespace cuda;
  check_tail("heads", p.head_dim, p.rope_head_dim);
  const bool has_pieces = p.rope.is_interleaved && p.head_dim % kPerThread == 0 &&
                          p.rope_head_dim % kPerThread == 0 && p.rope_head_dim > 0 &&
                          is_vector_aligned(p.x) && is_vector_aligned(p.rope.cos) &&
                          is_vector_aligned(p.rope.sin);
  const auto rows = static_cast<uint32_t>(p.max_rows);
  const dim3 grid(rows, tiles(p.num_heads, kHeadWarps));
  with_element_type(p.dtype, "heads", [&](auto element) {
    using T = decltype(element);
    if (has_pieces && !p.has_norm) {
      const int32_t pieces = p.num_heads * (p.rope_head_dim / kPerThread);
      launch(ctx, "rotate_heads", rotate_tails_kernel<T>,
             dim3(rows, tiles(pieces, kHeadWarps * 32)), dim3(kHeadWarps * 32), 0, p);
      return;
    }
    launch(ctx, "rotate_heads", has_pieces ? norm_heads_kernel<T> : rotate_heads_kernel<T>, grid,
           dim3(kHeadWarps * 32), 0, p);
  });
}

void append_tail(CudaContext& ctx, const AppendTailParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.width % 4 == 0 && p.x_stride % 4 == 0 && is_vector_aligned(p.x) &&
                     p.tail.block_bytes % 16 == 0 && p.tail.k_offset % 16 == 0,
                 "rows of a tail store are whole vectors; width ", p.width, ", x_stride ",
                 p.x_stride);
  PACELINE_CHECK(p.tail.dtype == DType::kFloat32, "a tail store of ", dtype_name(p.tail.dtype));
  launch(ctx, "append_tail", append_tail_kernel,
         dim3(static_cast<uint32_t>(p.max_rows), tiles(p.width, kTailThreads * 4)),
         dim3(kTailThreads), 0, p);
}

}  // namespace paceline
