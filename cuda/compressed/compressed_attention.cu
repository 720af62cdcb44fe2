// SPDX-License-Identifier: Apache-2.0

// Attention over the window and the compressed entries of a row. A row's keys are cut into chunks:
// the window from its first position on, then the compressed entries by their index in the row's
// list. A cluster of blocks takes a row and a tile of its heads: block b walks chunks b, b +
// kClusterBlocks, ... into one running state, and the blocks then merge their states in order
// through each other's shared memory. So the order of everything depends on the row alone, and rows
// are invariant, whatever the tile of heads.

#include "attention/attention_common.cuh"
#include "common/convert.cuh"
#include "compressed/compressed_kernel.cuh"
#include "ops/compressed.h"

namespace paceline {
namespace cuda {
namespace {

using namespace compressed;

// --- any shape: for tests ------------------------------------------------------------------------

constexpr int32_t kPlainThreads = kChunk;
constexpr int32_t kPlainWarps = kPlainThreads / 32;
constexpr int32_t kPlainColumns = kMaxCompressedHeadDim / kPlainThreads;

// A block takes a row and a head: thread i scores key i of a chunk, then thread d takes columns d,
// d + 128, ... of the values. Correct and simple, not fast.
template <class T, class Kv>
__global__ void __launch_bounds__(kPlainThreads)
    plain_kernel(const __grid_constant__ CompressedAttentionParams p) {
  __shared__ float q[kMaxCompressedHeadDim];
  __shared__ float weights[kChunk];
  __shared__ const Kv* values[kChunk];
  __shared__ float of_warps[kPlainWarps];
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.y);
  if (row >= min(*p.num_rows, p.max_rows)) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int64_t at = (int64_t{row} * p.num_heads + head) * p.head_dim;
  T* const y = static_cast<T*>(p.y) + at;
  const RowKeys keys(p, row);
  if (keys.num_chunks() == 0) {
    for (int32_t d = thread; d < p.head_dim; d += kPlainThreads) store_as(y + d, 0.0f);
    return;
  }
  const T* const row_q = static_cast<const T*>(p.q) + at;
  for (int32_t d = thread; d < p.head_dim; d += kPlainThreads) q[d] = to_float(row_q[d]);
  float running_max = negative_infinity();
  float running_sum = 0.0f;
  float running[kPlainColumns] = {};
  for (int32_t chunk = 0; chunk < keys.num_chunks(); ++chunk) {
    __syncthreads();  // all threads are done with the last chunk's weights
    const int32_t count = keys.keys_of(chunk);
    float score = negative_infinity();
    if (thread < count) {
      const auto* const key = reinterpret_cast<const Kv*>(
          keys.at(chunk, thread, p.head_dim * static_cast<int64_t>(sizeof(Kv))));
      values[thread] = key;
      score = 0.0f;
      for (int32_t d = 0; d < p.head_dim; ++d) score = __fmaf_rn(q[d], to_float(key[d]), score);
      score = __fmul_rn(score, __fmul_rn(p.scale, kLog2E));
    }
    float chunk_max = score;
    for (int32_t step = 1; step < 32; step *= 2) {
      chunk_max = fmaxf(chunk_max, __shfl_xor_sync(kAllLanes, chunk_max, step));
    }
    if (thread % 32 == 0) of_warps[thread / 32] = chunk_max;
    __syncthreads();
    for (const float max : of_warps) chunk_max = fmaxf(chunk_max, max);
    const float weight = thread < count ? exp2f(__fsub_rn(score, chunk_max)) : 0.0f;
    weights[thread] = weight;
    const float warp_total = warp_sum(weight);
    __syncthreads();  // the maxima have been read
    if (thread % 32 == 0) of_warps[thread / 32] = warp_total;
    __syncthreads();
    float chunk_sum = 0.0f;
    for (const float sum : of_warps) chunk_sum = __fadd_rn(chunk_sum, sum);
    const MergeWeights merge = merge_weights(running_max, chunk_max);
    for (int32_t i = 0; i < kPlainColumns; ++i) {
      const int32_t d = thread + i * kPlainThreads;
      if (d >= p.head_dim) break;
      float sum = 0.0f;
      for (int32_t j = 0; j < count; ++j) {
        sum = __fmaf_rn(weights[j], to_float(values[j][d]), sum);
      }
      running[i] = merge_value(running[i], sum, merge);
    }
    running_sum = merge_value(running_sum, chunk_sum, merge);
    running_max = merge.max;
  }
  const float factor =
      final_factor(running_max, running_sum, p.sinks == nullptr ? nullptr : p.sinks + head);
  for (int32_t i = 0; i < kPlainColumns; ++i) {
    const int32_t d = thread + i * kPlainThreads;
    if (d < p.head_dim) store_as(y + d, __fmul_rn(running[i], factor));
  }
}

// --- launches ------------------------------------------------------------------------------------

template <class S>
void launch_tiles(CudaContext& ctx, const CompressedAttentionParams& p, int32_t cluster_blocks) {
  constexpr auto* kKernel = &attention_kernel<S>;
  const auto num_blocks = S::kIsCluster ? static_cast<uint32_t>(cluster_blocks) : 1;
  static OncePerDevice allow;
  allow([] { allow_shared_bytes(kKernel, S::kSharedBytes, "compressed_attention"); });
  launch_clusters(ctx, "compressed_attention", kKernel,
                  dim3(num_blocks, static_cast<uint32_t>(p.max_rows),
                       static_cast<uint32_t>((p.num_heads + S::kRows - 1) / S::kRows)),
                  dim3(kThreads), dim3(num_blocks), S::kSharedBytes, p, cluster_blocks);
}

bool has_instance(const CompressedAttentionParams& p) {
  const auto is_aligned = [](const KvLayerView& view) {
    return view.dtype == DType::kBFloat16 && is_vector_aligned(view.base) &&
           view.block_bytes % 16 == 0 && view.k_offset % 16 == 0;
  };
  return p.dtype == DType::kBFloat16 && p.head_dim == kHeadDim && is_vector_aligned(p.q) &&
         is_vector_aligned(p.y) && is_aligned(p.window) &&
         (p.entry_end == nullptr || is_aligned(p.entries));
}

}  // namespace
}  // namespace cuda

void compressed_attention(CudaContext& ctx, const CompressedAttentionParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.head_dim > 0 && p.head_dim <= kMaxCompressedHeadDim, "heads of ", p.head_dim,
                 " elements; they can have 1 to ", kMaxCompressedHeadDim);
  PACELINE_CHECK(p.entry_end == nullptr || p.entries.dtype == p.window.dtype,
                 "entries of two dtypes");
  if (!has_instance(p)) {
    with_element_type(p.dtype, "q", [&](auto element) {
      with_element_type(p.window.dtype, "KV cache", [&](auto kv_element) {
        launch(ctx, "compressed_attention", plain_kernel<decltype(element), decltype(kv_element)>,
               dim3(static_cast<uint32_t>(p.max_rows), static_cast<uint32_t>(p.num_heads)),
               dim3(kPlainThreads), 0, p);
      });
    });
    return;
  }
  // A row without compressed entries has one chunk, unless its window is long.
  const int32_t cluster_blocks = p.entry_end == nullptr ? 1 : kClusterBlocks;
  if (!ctx.has_clusters) return launch_tiles<Shape<1, false>>(ctx, p, cluster_blocks);
  // Few rows: more blocks, which read the same keys from L2. Many: each block reads keys once for
  // all heads.
  const int32_t blocks_at_most = p.max_rows * (p.entry_end == nullptr ? 1 : 5);
  if (4 * blocks_at_most <= ctx.num_sms)
    return launch_tiles<Shape<1, true>>(ctx, p, cluster_blocks);
  if (2 * blocks_at_most <= ctx.num_sms)
    return launch_tiles<Shape<2, true>>(ctx, p, cluster_blocks);
  launch_tiles<Shape<4, true>>(ctx, p, cluster_blocks);
}

}  // namespace paceline
