// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernel of compressed_attention in bfloat16 for heads of 512 elements. A block of eight warps
// has all keys of a chunk in shared memory, where they serve as keys and as values:
//   1. S = Q K^T: warp w scores keys [16 w, 16 w + 16) for all heads of the tile, slice by slice of
//      the keys' columns while the next slices arrive
//   2. maxima and sums of the chunk over the warps, through shared memory
//   3. O = O * keep + P V: warp w takes columns [64 w, 64 w + 64) over all keys
// Without clusters one block walks the chunks of each of their blocks in turn, in less shared
// memory: it has two slices of the keys at a time, reads each twice, and warp w takes 16 columns of
// each slice. An output has the same sums in both.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_shape.cuh"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "ops/compressed.h"

namespace paceline::cuda::compressed {

using paged::swizzled;

inline constexpr int32_t kChunk = kAttentionChunk;
inline constexpr int32_t kClusterBlocks = 8;
inline constexpr int32_t kHeadDim = 512;
inline constexpr int32_t kThreads = 256;
inline constexpr int32_t kWarps = kThreads / 32;
inline constexpr int32_t kUnits = kHeadDim / 8;  // of 16 bytes
inline constexpr int32_t kSlices = 4;            // of the columns, which arrive one after the other
inline constexpr int32_t kSliceUnits = kUnits / kSlices;
inline constexpr int32_t kWarpColumns = kHeadDim / kWarps;
inline constexpr int32_t kColumnTiles = kWarpColumns / 8;
static_assert(kChunk == kWarps * 16);

// Tiles of 16 heads that a block takes, and its shared memory: keys, queries, probabilities. In the
// end the accumulators of a block of a cluster, in float32, lie over the keys.
template <int head_tiles, bool is_cluster>
struct Shape {
  static constexpr int32_t kHeadTiles = head_tiles;
  static constexpr bool kIsCluster = is_cluster;
  static constexpr int32_t kRows = 16 * head_tiles;
  static constexpr int32_t kSlots = kIsCluster ? kSlices : 2;  // of slices
  static constexpr int32_t kSlotBytes = kChunk * kSliceUnits * 16;
  static constexpr int32_t kQOffset = kSlots * kSlotBytes;
  static constexpr int32_t kPOffset = kQOffset + kRows * kHeadDim * 2;
  static constexpr int32_t kSharedBytes = kPOffset + kRows * kChunk * 2;
  static_assert(!kIsCluster || kRows * kHeadDim * 4 <= kQOffset);

  // Where unit `unit` of a slice of a key lies among the keys.
  static __device__ __forceinline__ uint32_t key_at(int32_t key, int32_t slice, int32_t unit) {
    if constexpr (kIsCluster) return swizzled(key, slice * kSliceUnits + unit, kUnits);
    return static_cast<uint32_t>(slice % kSlots * kSlotBytes) + swizzled(key, unit, kSliceUnits);
  }
  // The first column of tile `n` of a warp.
  static __device__ __forceinline__ int32_t column_at(int32_t warp, int32_t n) {
    if constexpr (kIsCluster) return warp * kWarpColumns + n * 8;
    return n / 2 * (kSliceUnits * 8) + warp * 16 + n % 2 * 8;
  }
};

// The keys of a row: chunks of the window, then chunks of compressed entries.
class RowKeys {
 public:
  __device__ __forceinline__ RowKeys(const CompressedAttentionParams& p, int32_t row)
      : p_(p), seq_slot_(p.seq_slot[row]) {
    if (seq_slot_ < 0) return;
    window_begin_ = max(p.window_begin[row], 0);
    window_count_ = max(p.window_end[row] - window_begin_, 0);
    window_chunks_ = (window_count_ + kChunk - 1) / kChunk;
    if (p.entry_end == nullptr) return;
    entry_count_ = p.entry_end[row];
    if (p.chosen != nullptr) {
      chosen_ = p.chosen + int64_t{row} * p.top_k;
      entry_count_ = min(p.num_chosen[row], p.top_k);
    }
  }

  __device__ __forceinline__ int32_t num_chunks() const {
    return window_chunks_ + (entry_count_ + kChunk - 1) / kChunk;
  }
  __device__ __forceinline__ int32_t keys_of(int32_t chunk) const {
    const int32_t left = chunk < window_chunks_ ? window_count_ - chunk * kChunk
                                                : entry_count_ - (chunk - window_chunks_) * kChunk;
    return min(left, kChunk);
  }
  // Key `index` of a chunk, which has more keys than that.
  __device__ __forceinline__ const std::byte* at(int32_t chunk, int32_t index,
                                                 int64_t key_bytes) const {
    if (chunk < window_chunks_) {
      return location(p_.window, p_.window_table, window_begin_ + chunk * kChunk + index,
                      key_bytes);
    }
    const int32_t entry = (chunk - window_chunks_) * kChunk + index;
    return location(p_.entries, p_.entry_table, chosen_ == nullptr ? entry : chosen_[entry],
                    key_bytes);
  }

 private:
  __device__ __forceinline__ const std::byte* location(const KvLayerView& view,
                                                       const BlockTable& table, int32_t entry,
                                                       int64_t key_bytes) const {
    const int32_t block = table.blocks[seq_slot_ * table.stride + entry / table.block_size];
    return view.base + block * view.block_bytes + view.k_offset +
           entry % table.block_size * key_bytes;
  }

  const CompressedAttentionParams& p_;
  int32_t seq_slot_;
  int32_t window_begin_ = 0;
  int32_t window_count_ = 0;
  int32_t window_chunks_ = 0;
  int32_t entry_count_ = 0;
  const int32_t* chosen_ = nullptr;
};

// Copies one slice of all keys of a chunk; a null key becomes zeros. Commits nothing. Four keys are
// read before their copies: behind a copy, the compiler would read the next one only then.
template <class S>
__device__ __forceinline__ void request_keys(const std::byte* const* keys, const void* valid,
                                             int32_t slice, uint32_t to) {
  constexpr int32_t kAtOnce = 4;
  constexpr int32_t kStep = kThreads / kSliceUnits;  // keys
  static_assert(kThreads % kSliceUnits == 0 && kChunk % (kStep * kAtOnce) == 0);
  const int32_t first = static_cast<int32_t>(threadIdx.x) / kSliceUnits;
  const int32_t unit = slice * kSliceUnits + static_cast<int32_t>(threadIdx.x) % kSliceUnits;
#pragma unroll
  for (int32_t key = 0; key < kChunk; key += kStep * kAtOnce) {
    const std::byte* from[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) from[i] = keys[first + key + i * kStep];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      cp_async_16(to + S::key_at(first + key + i * kStep, slice, unit - slice * kSliceUnits),
                  from[i] == nullptr ? valid : from[i] + unit * 16, from[i] != nullptr);
    }
  }
}

// The same of the queries of `heads` heads, zeros for the others of the tile.
template <class S>
__device__ __forceinline__ void request_queries(const __nv_bfloat16* q, int32_t heads,
                                                int32_t slice, uint32_t to) {
#pragma unroll
  for (int32_t i = 0; i < S::kRows * kSliceUnits / kThreads; ++i) {
    const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kThreads;
    const int32_t head = at / kSliceUnits;
    const int32_t unit = slice * kSliceUnits + at % kSliceUnits;
    const bool is_live = head < heads;
    cp_async_16(to + swizzled(head, unit, kUnits), is_live ? q + head * kHeadDim + unit * 8 : q,
                is_live);
  }
}

// One slice of S = Q K^T: the warp's 16 keys for all heads.
template <class S>
__device__ __forceinline__ void score_slice(uint32_t keys, uint32_t queries, int32_t slice,
                                            float (&s)[S::kHeadTiles][2][4]) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
#pragma unroll
  for (int32_t k = 0; k < kSliceUnits / 2; ++k) {
    const int32_t unit = slice * kSliceUnits + 2 * k;
    uint32_t b[4];
    ldmatrix_x4(
        b, keys + S::key_at(warp * 16 + lane % 8 + lane / 16 * 8, slice, 2 * k + lane / 8 % 2));
#pragma unroll
    for (int32_t m = 0; m < S::kHeadTiles; ++m) {
      uint32_t a[4];
      ldmatrix_x4(a, queries + swizzled(m * 16 + lane % 16, unit + lane / 16, kUnits));
      mma_16x8x16(s[m][0], a, b[0], b[1]);
      mma_16x8x16(s[m][1], a, b[2], b[3]);
    }
  }
}

// O += P V: the warp's columns, over all keys of the chunk; of one slice where it has two at a
// time.
template <class S>
__device__ __forceinline__ void multiply_values(uint32_t keys, uint32_t probabilities,
                                                int32_t slice,
                                                float (&o)[S::kHeadTiles][kColumnTiles][4]) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
#pragma unroll
  for (int32_t k = 0; k < kChunk / 16; ++k) {
    uint32_t a[S::kHeadTiles][4];
#pragma unroll
    for (int32_t m = 0; m < S::kHeadTiles; ++m) {
      ldmatrix_x4(a[m],
                  probabilities + swizzled(m * 16 + lane % 16, 2 * k + lane / 16, kChunk / 8));
    }
#pragma unroll
    for (int32_t n = 0; n < kColumnTiles / 2; ++n) {
      if (!S::kIsCluster && n != slice) continue;
      uint32_t b[4];
      const int32_t unit = S::column_at(warp, 2 * n) / 8 + lane / 16;
      ldmatrix_x4_transposed(
          b, keys + S::key_at(k * 16 + lane % 16, unit / kSliceUnits, unit % kSliceUnits));
#pragma unroll
      for (int32_t m = 0; m < S::kHeadTiles; ++m) {
        mma_16x8x16(o[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16(o[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Where column `column` of a head's accumulator lies in shared memory, in floats. Eight heads of
// the same column lie in different banks.
__device__ __forceinline__ int32_t accumulator_at(int32_t head, int32_t column) {
  return head * kHeadDim + (column ^ (head & 7) * 8);
}

// What a block that stands for a cluster has of the blocks before: a thread's part.
template <class S>
struct Total {
  float max[S::kHeadTiles][2];
  float sum[S::kHeadTiles][2];
  float o[S::kHeadTiles][kColumnTiles][4];

  // Merges the state of a thread's rows.
  __device__ __forceinline__ void add(bool is_first, int32_t quad_row, const float* block_max,
                                      const float* block_sum,
                                      const float (&of_block)[S::kHeadTiles][kColumnTiles][4]) {
#pragma unroll
    for (int32_t m = 0; m < S::kHeadTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t head = m * 16 + half * 8 + quad_row;
        MergeWeights merge = {};
        if (is_first) {
          max[m][half] = block_max[head];
          sum[m][half] = block_sum[head];
        } else {
          merge = merge_weights(max[m][half], block_max[head]);
          max[m][half] = merge.max;
          sum[m][half] = merge_value(sum[m][half], block_sum[head], merge);
        }
#pragma unroll
        for (int32_t n = 0; n < kColumnTiles; ++n) {
#pragma unroll
          for (int32_t e = 2 * half; e < 2 * half + 2; ++e) {
            o[m][n][e] =
                is_first ? of_block[m][n][e] : merge_value(o[m][n][e], of_block[m][n][e], merge);
          }
        }
      }
    }
  }
};

// Grid: blocks of the cluster, or one, rows, tiles of heads.
template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ CompressedAttentionParams p,
                     const int32_t max_blocks) {
  constexpr int32_t kHeadTiles = S::kHeadTiles;
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ const std::byte* keys[kChunk];
  __shared__ float warp_max[kWarps][S::kRows];
  __shared__ float warp_sum[kWarps][S::kRows];
  __shared__ float block_max[S::kRows];  // the running state, which the other blocks read
  __shared__ float block_sum[S::kRows];
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.y);
  if (row >= min(*p.num_rows, p.max_rows)) return;
  auto rank = static_cast<int32_t>(blockIdx.x);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const int32_t quad_row = lane / 4;
  const int32_t quad_lane = lane % 4;
  const int32_t first_head = static_cast<int32_t>(blockIdx.z) * S::kRows;
  const int32_t heads = min(p.num_heads - first_head, S::kRows);
  const int64_t row_at = (int64_t{row} * p.num_heads + first_head) * kHeadDim;
  __nv_bfloat16* const y = static_cast<__nv_bfloat16*>(p.y) + row_at;
  const RowKeys row_keys(p, row);
  const int32_t num_chunks = row_keys.num_chunks();
  if (num_chunks == 0) {
    if (rank > 0) return;
    for (int32_t i = thread; i < heads * kUnits; i += kThreads) {
      reinterpret_cast<uint4*>(y)[i] = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  // Blocks without a chunk leave; the barriers of a cluster are of the others.
  const int32_t num_blocks = min(num_chunks, max_blocks);
  if (rank >= num_blocks) return;

  const uint32_t key_shared = shared_address(shared);
  const uint32_t q_shared = key_shared + S::kQOffset;
  const uint32_t p_shared = key_shared + S::kPOffset;
  const auto* const q = static_cast<const __nv_bfloat16*>(p.q) + row_at;
  const float scale = __fmul_rn(p.scale, kLog2E);
  float o[kHeadTiles][kColumnTiles][4] = {};
  if (thread < S::kRows) {
    block_max[thread] = negative_infinity();
    block_sum[thread] = 0.0f;
  }
  [[maybe_unused]] Total<S> total_of_blocks;

  // One block goes on with the first chunk of the next block of the cluster that it stands for.
  for (int32_t chunk = rank; chunk < num_chunks;) {
    const int32_t count = row_keys.keys_of(chunk);
    if (thread < kChunk) {
      keys[thread] = thread < count ? row_keys.at(chunk, thread, int64_t{kHeadDim} * 2) : nullptr;
    }
    __syncthreads();  // also after the last reads of the keys of the chunk before
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlots; ++slice) {
      if constexpr (S::kIsCluster) {
        if (chunk == rank) request_queries<S>(q, heads, slice, q_shared);
      } else if (chunk == 0) {
        request_queries<S>(q, heads, 2 * slice, q_shared);
        request_queries<S>(q, heads, 2 * slice + 1, q_shared);
      }
      request_keys<S>(keys, p.window.base, slice, key_shared);
      cp_async_commit();
    }
    float s[kHeadTiles][2][4] = {};
    if constexpr (S::kIsCluster) {
      cp_async_wait<3>();
      __syncthreads();
      score_slice<S>(key_shared, q_shared, 0, s);
      cp_async_wait<2>();
      __syncthreads();
      score_slice<S>(key_shared, q_shared, 1, s);
      cp_async_wait<1>();
      __syncthreads();
      score_slice<S>(key_shared, q_shared, 2, s);
      cp_async_wait<0>();
      __syncthreads();
      score_slice<S>(key_shared, q_shared, 3, s);
    } else {
#pragma unroll
      for (int32_t slice = 0; slice < kSlices; ++slice) {
        cp_async_wait<S::kSlots - 1>();
        __syncthreads();
        score_slice<S>(key_shared, q_shared, slice, s);
        __syncthreads();  // the slot is free for a slice of these keys as values, too
        request_keys<S>(keys, p.window.base, (slice + S::kSlots) % kSlices, key_shared);
        cp_async_commit();
      }
    }

    // Scores in units of log2(e); -inf beyond the last key.
#pragma unroll
    for (int32_t m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float highest = negative_infinity();
#pragma unroll
        for (int32_t n = 0; n < 2; ++n) {
#pragma unroll
          for (int32_t e = 0; e < 2; ++e) {
            float& score = s[m][n][2 * half + e];
            score = __fmul_rn(score, scale);
            if (warp * 16 + n * 8 + 2 * quad_lane + e >= count) score = negative_infinity();
            highest = fmaxf(highest, score);
          }
        }
        highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
        if (quad_lane == 0) warp_max[warp][m * 16 + half * 8 + quad_row] = highest;
      }
    }
    __syncthreads();
    float keep[kHeadTiles][2];
#pragma unroll
    for (int32_t m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t head = m * 16 + half * 8 + quad_row;
        const float before = block_max[head];
        float max = before;
#pragma unroll
        for (int32_t w = 0; w < kWarps; ++w) max = fmaxf(max, warp_max[w][head]);
        keep[m][half] = exp2_approx(__fsub_rn(before, max));
        float sum = 0.0f;
#pragma unroll
        for (int32_t n = 0; n < 2; ++n) {
          // The sums are of the rounded values, since the products use those.
          const __nv_bfloat162 pair =
              __floats2bfloat162_rn(exp2_approx(__fsub_rn(s[m][n][2 * half], max)),
                                    exp2_approx(__fsub_rn(s[m][n][2 * half + 1], max)));
          sum = __fadd_rn(sum, __fadd_rn(__low2float(pair), __high2float(pair)));
          const uint32_t to = S::kPOffset + swizzled(head, warp * 2 + n, kChunk / 8) +
                              static_cast<uint32_t>(quad_lane) * 4;
          *reinterpret_cast<__nv_bfloat162*>(shared + to) = pair;
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 2));
        if (quad_lane == 0) warp_sum[warp][head] = sum;
      }
    }
    __syncthreads();
#pragma unroll
    for (int32_t m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t head = m * 16 + half * 8 + quad_row;
        if (warp == 0 && quad_lane == 0) {
          float max = block_max[head];
          float sum = 0.0f;
#pragma unroll
          for (int32_t w = 0; w < kWarps; ++w) {
            max = fmaxf(max, warp_max[w][head]);
            sum = __fadd_rn(sum, warp_sum[w][head]);
          }
          block_max[head] = max;
          block_sum[head] = __fmaf_rn(block_sum[head], keep[m][half], sum);
        }
#pragma unroll
        for (int32_t n = 0; n < kColumnTiles; ++n) {
          o[m][n][2 * half] = __fmul_rn(o[m][n][2 * half], keep[m][half]);
          o[m][n][2 * half + 1] = __fmul_rn(o[m][n][2 * half + 1], keep[m][half]);
        }
      }
    }
    if constexpr (S::kIsCluster) {
      multiply_values<S>(key_shared, p_shared, 0, o);
      chunk += num_blocks;
    } else {
#pragma unroll
      for (int32_t slice = 0; slice < kSlices; ++slice) {
        cp_async_wait<S::kSlots - 1>();
        __syncthreads();
        multiply_values<S>(key_shared, p_shared, slice, o);
        __syncthreads();
        if (slice + S::kSlots < kSlices) {
          request_keys<S>(keys, p.window.base, slice + S::kSlots, key_shared);
        }
        cp_async_commit();
      }
      chunk += num_blocks;
      if (chunk < num_chunks) continue;
      total_of_blocks.add(rank == 0, quad_row, block_max, block_sum, o);
      if (++rank == num_blocks) break;
      chunk = rank;
#pragma unroll
      for (auto& of_tile : o) {
#pragma unroll
        for (auto& values : of_tile) {
#pragma unroll
          for (float& value : values) value = 0.0f;
        }
      }
      __syncthreads();  // the state has been read
      if (thread < S::kRows) {
        block_max[thread] = negative_infinity();
        block_sum[thread] = 0.0f;
      }
    }
  }

  __syncthreads();  // all warps have read the keys, and the state of the block is complete
  const float* const sinks = p.sinks == nullptr ? nullptr : p.sinks + first_head;
  if constexpr (!S::kIsCluster) {
#pragma unroll
    for (int32_t m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t head = m * 16 + half * 8 + quad_row;
        if (head >= heads) continue;
        const float factor =
            final_factor(total_of_blocks.max[m][half], total_of_blocks.sum[m][half],
                         sinks == nullptr ? nullptr : sinks + head);
#pragma unroll
        for (int32_t n = 0; n < kColumnTiles; ++n) {
          const float* const values = total_of_blocks.o[m][n] + 2 * half;
          __nv_bfloat16* const to = y + head * kHeadDim + S::column_at(warp, n) + 2 * quad_lane;
          *reinterpret_cast<__nv_bfloat162*>(to) =
              __floats2bfloat162_rn(__fmul_rn(values[0], factor), __fmul_rn(values[1], factor));
        }
      }
    }
  } else {
    if (num_blocks == 1) {
#pragma unroll
      for (int32_t m = 0; m < kHeadTiles; ++m) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const int32_t head = m * 16 + half * 8 + quad_row;
          if (head >= heads) continue;
          const float factor = final_factor(block_max[head], block_sum[head],
                                            sinks == nullptr ? nullptr : sinks + head);
          __nv_bfloat16* const to = y + head * kHeadDim + warp * kWarpColumns + 2 * quad_lane;
#pragma unroll
          for (int32_t n = 0; n < kColumnTiles; ++n) {
            *reinterpret_cast<__nv_bfloat162*>(to + n * 8) = __floats2bfloat162_rn(
                __fmul_rn(o[m][n][2 * half], factor), __fmul_rn(o[m][n][2 * half + 1], factor));
          }
        }
      }
      return;
    }

    auto* const accumulators = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int32_t m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t head = m * 16 + half * 8 + quad_row;
#pragma unroll
        for (int32_t n = 0; n < kColumnTiles; ++n) {
          const int32_t at = accumulator_at(head, warp * kWarpColumns + n * 8 + 2 * quad_lane);
          *reinterpret_cast<float2*>(accumulators + at) =
              make_float2(o[m][n][2 * half], o[m][n][2 * half + 1]);
        }
      }
    }
    cluster_barrier();
    // The blocks share the heads; half a block takes a head, four columns a thread.
    constexpr int32_t kHeadThreads = kHeadDim / 4;
    constexpr int32_t kHeadsAtOnce = kThreads / kHeadThreads;
    const int32_t column = thread % kHeadThreads * 4;
    for (int32_t head = rank * kHeadsAtOnce + thread / kHeadThreads; head < heads;
         head += num_blocks * kHeadsAtOnce) {
      const int32_t at = accumulator_at(head, column);
      float max[kClusterBlocks];
      float sum[kClusterBlocks];
      float4 values[kClusterBlocks];
#pragma unroll
      for (int32_t block = 0; block < kClusterBlocks; ++block) {
        if (block >= num_blocks) break;
        max[block] = *in_cluster(&block_max[head], block);
        sum[block] = *in_cluster(&block_sum[head], block);
        values[block] = *reinterpret_cast<const float4*>(in_cluster(accumulators + at, block));
      }
      float total_max = max[0];
      float total_sum = sum[0];
      float4 total = values[0];
#pragma unroll
      for (int32_t block = 1; block < kClusterBlocks; ++block) {
        if (block >= num_blocks) break;
        const MergeWeights merge = merge_weights(total_max, max[block]);
        total_max = merge.max;
        total_sum = merge_value(total_sum, sum[block], merge);
        total.x = merge_value(total.x, values[block].x, merge);
        total.y = merge_value(total.y, values[block].y, merge);
        total.z = merge_value(total.z, values[block].z, merge);
        total.w = merge_value(total.w, values[block].w, merge);
      }
      const float factor =
          final_factor(total_max, total_sum, sinks == nullptr ? nullptr : sinks + head);
      store_vector({__fmul_rn(total.x, factor), __fmul_rn(total.y, factor),
                    __fmul_rn(total.z, factor), __fmul_rn(total.w, factor)},
                   y + head * kHeadDim + column);
    }
    cluster_barrier();  // no block exits while others read its shared memory
  }
}

}  // namespace paceline::cuda::compressed
