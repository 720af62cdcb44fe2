// SPDX-License-Identifier: Apache-2.0

// Makes compressed entries. A cluster of up to eight blocks makes the entry of a row; each block
// has a part of the channels. Without clusters one block has all parts, one after the other. Eight
// threads share the tokens of a channel, and their states (max, sum, weighted sum) are merged in
// order, so an entry has the same bits in every batch.

#include <algorithm>
#include <cstdint>

#include "attention/rope_pairs.cuh"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "metadata/metadata_rows.h"
#include "ops/compressed.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 512;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kLanes = 64;                  // channels that a block takes at once
constexpr int32_t kShares = kThreads / kLanes;  // threads of a channel
constexpr int32_t kMaxBlocks = 8;               // of a cluster: parts
constexpr int32_t kTermsAtOnce = 8;

// The softmax over some of the tokens of a channel.
struct State {
  float max;
  float sum;       // of the weights
  float weighted;  // sum of weight * kv
};

// The weight of a token whose gate is `gate`, relative to `max`.
__device__ __forceinline__ float weight_of(float gate, float max) {
  return expf(__fsub_rn(gate, max));
}

__device__ __forceinline__ State merged(const State& a, const State& b) {
  if (b.max == negative_infinity()) return a;
  const float max = fmaxf(a.max, b.max);
  const float keep = weight_of(a.max, max);
  const float take = weight_of(b.max, max);
  return {max, __fmaf_rn(b.sum, take, __fmul_rn(a.sum, keep)),
          __fmaf_rn(b.weighted, take, __fmul_rn(a.weighted, keep))};
}

// What the threads of a block share: the row's tokens, and one of its compressors.
struct Inputs {
  const CompressParams& p;
  const Compressor& c;
  int32_t seq_slot;
  int32_t entry;

  // Terms of a channel: entry 0 lacks those of the entry before it, which come first.
  __device__ __forceinline__ int32_t num_terms() const {
    return p.overlaps ? 2 * p.tokens_per_entry : p.tokens_per_entry;
  }
  __device__ __forceinline__ int32_t first_term() const {
    return p.overlaps && entry == 0 ? p.tokens_per_entry : 0;
  }

  // Loads kv and gate of term `term`.
  __device__ __forceinline__ void load(int32_t term, int32_t channel, float& kv,
                                       float& gate) const {
    const int32_t parts = p.overlaps ? 2 : 1;
    const int32_t part = p.overlaps && term >= p.tokens_per_entry ? 1 : 0;
    const int32_t in_entry = term - part * p.tokens_per_entry;
    const int32_t position = (entry + part - (parts - 1)) * p.tokens_per_entry + in_entry;
    const int32_t block =
        p.tail_table.blocks[seq_slot * p.tail_table.stride + position / p.tail_table.block_size];
    const std::byte* const base = p.tail.base + block * p.tail.block_bytes + p.tail.k_offset;
    const float* const token = reinterpret_cast<const float*>(base) +
                               int64_t{position % p.tail_table.block_size} * p.tail_width +
                               c.tail_offset + part * c.dim + channel;
    kv = token[0];
    gate = token[parts * c.dim] +
           c.position_bias[int64_t{in_entry} * parts * c.dim + part * c.dim + channel];
  }
};

// The state of this thread's share of the terms of a channel.
__device__ __forceinline__ State own_state(const Inputs& in, int32_t channel, int32_t share) {
  const int32_t first = in.first_term();
  const int32_t per_share = (in.num_terms() - first + kShares - 1) / kShares;
  const int32_t begin = first + share * per_share;
  const int32_t end = min(begin + per_share, in.num_terms());
  State state = {negative_infinity(), 0.0f, 0.0f};
  for (int32_t term = begin; term < end; term += kTermsAtOnce) {
    float kv[kTermsAtOnce];
    float gate[kTermsAtOnce];
    State next = {negative_infinity(), 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
      kv[i] = 0.0f;
      gate[i] = negative_infinity();
      if (term + i < end) in.load(term + i, channel, kv[i], gate[i]);
    }
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) next.max = fmaxf(next.max, gate[i]);
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
      if (term + i >= end) break;
      const float weight = weight_of(gate[i], next.max);
      next.sum = __fadd_rn(next.sum, weight);
      next.weighted = __fmaf_rn(weight, kv[i], next.weighted);
    }
    state = state.max == negative_infinity() ? next : merged(state, next);
  }
  return state;
}

// Channels of a part. The tail must lie in one part; where it would not, the first one has all
// channels.
__device__ __forceinline__ int32_t channels_of_part(int32_t dim, int32_t tail, int32_t num_parts) {
  const int32_t even = max((dim + num_parts - 1) / num_parts, kLanes);
  return dim % even == 0 && tail <= even ? even : dim;
}

__device__ __forceinline__ void store_value(const KvLayerView& view, std::byte* entry, int32_t at,
                                            float value) {
  if (view.dtype == DType::kFloat32) {
    narrow(value, reinterpret_cast<float*>(entry) + at);
  } else {
    narrow(value, reinterpret_cast<__nv_bfloat16*>(entry) + at);
  }
}

// Makes the values of the channels [first, first + count), without the norm, and returns the
// thread's part of the sum of their squares.
__device__ __forceinline__ float combine_tokens(const Inputs& in, int32_t first, int32_t count,
                                                State (&states)[kShares][kLanes], float* values) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % kLanes;
  const int32_t share = thread / kLanes;
  float squares = 0.0f;
  for (int32_t at = 0; at < count; at += kLanes) {
    const bool is_inside = at + lane < count;
    if (is_inside) states[share][lane] = own_state(in, first + at + lane, share);
    __syncthreads();
    if (share == 0 && is_inside) {
      State state = states[0][lane];
      for (int32_t other = 1; other < kShares; ++other) {
        const State& next = states[other][lane];
        state = state.max == negative_infinity() ? next : merged(state, next);
      }
      const float value = __fdiv_rn(state.weighted, state.sum);
      values[at + lane] = value;
      squares = __fmaf_rn(value, value, squares);
    }
    __syncthreads();
  }
  return squares;
}

// Grid: parts (of a cluster) or 1, rows, compressors.
template <bool kIsCluster>
__global__ void __launch_bounds__(kThreads)
    compress_kernel(const __grid_constant__ CompressParams p, const int32_t num_parts) {
  __shared__ State states[kShares][kLanes];
  __shared__ float values[kMaxCompressedHeadDim];  // of this block's channels
  __shared__ __align__(16) float partials[kWarps];
  __shared__ int32_t sums[kMaxBlocks];  // bits of the parts' sums of squares
  let_successor_start();
  wait_for_predecessor();
  const auto rank = static_cast<int32_t>(blockIdx.x);
  const auto row = static_cast<int32_t>(blockIdx.y);
  const Compressor& c = p.compressors[blockIdx.z];
  // Blocks of a cluster have the same row, and leave together.
  if (row >= min(*p.num_rows, p.max_rows)) return;
  const int32_t seq_slot = p.seq_slot[row];
  const int64_t slot = p.entry_slots[row];
  if (seq_slot < 0 || slot < c.entries.block_size) return;
  if constexpr (kIsCluster) cluster_arrive();
  const Inputs in = {p, c, seq_slot, p.positions[row] / p.tokens_per_entry};

  const int32_t per_part = channels_of_part(c.dim, p.rope_head_dim, num_parts);
  const int32_t first = kIsCluster ? min(rank * per_part, c.dim) : 0;
  const int32_t count = kIsCluster ? min(c.dim - first, per_part) : c.dim;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if constexpr (kIsCluster) {
    const float own_sum = block_sum(combine_tokens(in, first, count, states, values), partials);
    cluster_wait();  // all blocks have begun
    if (thread < num_parts) store_to_cluster(&sums[rank], thread, __float_as_int(own_sum));
    cluster_barrier();
  } else {
    for (int32_t part = 0; part < num_parts; ++part) {
      const int32_t begin = min(part * per_part, c.dim);
      const int32_t size = min(c.dim - begin, per_part);
      const float own_sum =
          block_sum(combine_tokens(in, begin, size, states, values + begin), partials);
      if (thread == 0) sums[part] = __float_as_int(own_sum);
      __syncthreads();  // `partials` is written again
    }
  }
  float sum = 0.0f;
  for (int32_t i = 0; i < num_parts; ++i) sum = __fadd_rn(sum, __int_as_float(sums[i]));
  const float factor = rsqrtf(sum / static_cast<float>(c.dim) + p.norm_eps);
  for (int32_t i = thread; i < count; i += kThreads) {
    values[i] *= factor * (c.norm[first + i] + p.norm_weight_offset);
  }
  __syncthreads();

  const int64_t block = slot / c.entries.block_size;
  std::byte* const entry =
      c.entries.base + block * c.entries.block_bytes + c.entries.k_offset +
      (slot - block * c.entries.block_size) * c.dim * (c.entries.dtype == DType::kFloat32 ? 4 : 2);
  const int32_t before_tail = c.dim - p.rope_head_dim;
  for (int32_t i = thread; i < min(count, before_tail - first); i += kThreads) {
    store_value(c.entries, entry, first + i, values[i]);
  }
  if (first + count < c.dim || count == 0) return;
  // This block has the tail.
  const float* const tail = values + before_tail - first;
  const int64_t position = int64_t{in.entry} * p.tokens_per_entry + p.rope.position_offset;
  for (int32_t pair = thread; pair < p.rope_head_dim / 2; pair += kThreads) {
    const Pair at = pair_of(p.rope, pair, p.rope_head_dim);
    const int64_t angle = position * (p.rope_head_dim / 2) + pair;
    const float2 result =
        rotated(tail[at.first], tail[at.second], p.rope.cos[angle], p.rope.sin[angle]);
    store_value(c.entries, entry, before_tail + at.first, result.x);
    store_value(c.entries, entry, before_tail + at.second, result.y);
  }
}

}  // namespace
}  // namespace cuda

void compress(CudaContext& ctx, const CompressParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.num_compressors >= 1 && p.num_compressors <= kMaxCompressors, p.num_compressors,
                 " compressors");
  int32_t num_parts = 1;
  for (int32_t i = 0; i < p.num_compressors; ++i) {
    const Compressor& c = p.compressors[i];
    PACELINE_CHECK(c.dim > 0 && c.dim <= kMaxCompressedHeadDim && p.rope_head_dim <= c.dim &&
                       p.rope_head_dim % 2 == 0,
                   "entries of ", c.dim, " elements, of which ", p.rope_head_dim, " rotate");
    num_parts = std::max(num_parts, std::min((c.dim + kLanes - 1) / kLanes, kMaxBlocks));
  }
  const dim3 grid(static_cast<uint32_t>(num_parts), static_cast<uint32_t>(p.max_rows),
                  static_cast<uint32_t>(p.num_compressors));
  if (ctx.has_clusters) {
    launch_clusters(ctx, "compress", compress_kernel<true>, grid, dim3(kThreads), dim3(grid.x), 0,
                    p, num_parts);
  } else {
    launch(ctx, "compress", compress_kernel<false>, dim3(1, grid.y, grid.z), dim3(kThreads), 0, p,
           num_parts);
  }
}

}  // namespace paceline
