// SPDX-License-Identifier: Apache-2.0
#pragma once

// How queries, keys and values reach shared memory in the prefill attention kernel: rows of 128
// bytes in the 128-byte swizzle, as wgmma reads them.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/paged_attention_loader.cuh"
#include "attention/paged_attention_rows.cuh"
#include "attention/prefill_shape.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"
#include "ops/ops.h"

namespace paceline::cuda::prefill {

// Copies the 64 packed rows of a warpgroup, zeros where there is no live row. The slices lie
// kQSliceBytes apart.
template <class S>
__device__ __forceinline__ void load_queries(const PagedAttentionParams& p, int32_t kv_head,
                                             int32_t heads_per_group, const paged::TileRows& rows,
                                             int32_t group, uint32_t queries) {
  const auto* const qkv = static_cast<const __nv_bfloat16*>(p.qkv);
  const int64_t row_stride =
      int64_t{qkv_heads(p.num_qo_heads, p.num_kv_heads, p.kv_inputs)} * S::kHeadDim;
#pragma unroll 4
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % 128; i < 64 * S::kHeadUnits; i += 128) {
    const int32_t packed = group * 64 + i / S::kHeadUnits;
    const int32_t unit = i % S::kHeadUnits;
    const bool is_live = rows.is_live(packed);
    const int64_t head = int64_t{kv_head} * heads_per_group + rows.head[packed];
    const int64_t from = rows.index[packed] * row_stride + head * S::kHeadDim + unit * 8;
    const uint32_t to = queries + static_cast<uint32_t>(unit / 8 * S::kQSliceBytes) +
                        paged::swizzled(packed, unit % 8, 8);
    cp_async_16(to, is_live ? qkv + from : qkv, is_live);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_shared_for_wgmma();
}

// A warp's part of the copies: 32 keys of each slice.
template <class S>
class Copier {
 public:
  __device__ __forceinline__ explicit Copier(const Ring& ring) : ring_(ring) { to_.parity = 1; }

  // Waits until the next slot is free, and announces what has arrived before it sleeps.
  __device__ __forceinline__ uint32_t next_slot() {
    uint64_t* const empty = &ring_.empty[to_.slot];
    if (__all_sync(kFullWarp, barrier_test(empty, to_.parity) ? 1 : 0) == 0) {
      announce_all();
      barrier_wait(empty, to_.parity);
    }
    return ring_.at(to_.slot);
  }
  __device__ __forceinline__ void commit() {
    cp_async_commit();
    to_.template next<S>();
    if (++num_pending_ > S::kSlicesAhead) {
      cp_async_wait<S::kSlicesAhead>();
      announce();
    }
  }
  __device__ __forceinline__ void announce_all() {
    cp_async_wait<0>();
    while (num_pending_ > 0) announce();
  }

 private:
  // The oldest slice has arrived.
  __device__ __forceinline__ void announce() {
    fence_shared_for_wgmma();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&ring_.full[oldest_.slot]);
    oldest_.template next<S>();
    --num_pending_;
  }

  const Ring& ring_;
  Place to_;
  Place oldest_;
  int32_t num_pending_ = 0;
};

// Copies all chunks: of each the slices of K, then those of V.
template <class S>
__device__ __forceinline__ void copy_chunks(const PagedAttentionParams& p, int32_t kv_head,
                                            const paged::TileKeys& keys, int32_t first_chunk,
                                            int32_t end_chunk, const Ring& ring) {
  paged::SliceLoader<8> loader(p, kv_head, p.block_table + keys.seq_slot * p.block_table_stride,
                               keys.begin, keys.end);
  Copier<S> copier(ring);
  loader.look_up(first_chunk);
#pragma unroll 1
  for (int32_t chunk = first_chunk; chunk < end_chunk; ++chunk) {
    loader.enter();
    loader.look_up(chunk + 1);
#pragma unroll 1
    for (int32_t item = 0; item < 2 * S::kSlices; ++item) {
      const bool is_value = item >= S::kSlices;
      const int32_t slice = is_value ? item - S::kSlices : item;
      const uint32_t to = copier.next_slot();
      loader.copy(to, (is_value ? p.kv.v_offset : p.kv.k_offset) + slice * 128);
      copier.commit();
    }
  }
  copier.announce_all();
}

}  // namespace paceline::cuda::prefill
