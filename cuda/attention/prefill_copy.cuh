// SPDX-License-Identifier: Apache-2.0
#pragma once

// How queries, keys and values reach shared memory in the prefill attention kernel: rows of 128
// bytes in the 128-byte swizzle, as wgmma reads them.

#include <cuda_bf16.h>

#include <cstdint>

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

// A copying warp's view of the ring. With cp.async, it copies 32 keys of each slice. It sleeps
// while it waits, since the warps that compute need the instructions.
template <class S>
class Copier {
 public:
  __device__ __forceinline__ explicit Copier(const Ring& ring) : ring_(ring) { to_.at = S::kSlots; }

  // Waits until the next slot is free, and announces what has arrived before it sleeps.
  __device__ __forceinline__ uint32_t next_slot() {
    uint64_t* const empty = &ring_.empty[to_.slot()];
    if (__all_sync(kFullWarp, barrier_test(empty, to_.parity()) ? 1 : 0) == 0) {
      announce_all();
      barrier_wait_idle(empty, to_.parity());
    }
    return ring_.at(to_.slot());
  }
  // The copies to the slot are begun, with cp.async.
  __device__ __forceinline__ void commit() {
    cp_async_commit();
    to_.next();
    if (++num_pending_ > S::kSlicesAhead) {
      cp_async_wait<S::kSlicesAhead>();
      announce();
    }
  }
  // The copy engine fills the next slot. The warps take turns to ask for it, each of the first
  // num_boxes lanes for one box. At most six slices lie between two of a warp, fewer than the ring
  // has slots; so no slot is a phase further than a warp thinks. No slice is in flight with
  // cp.async.
  template <class Copy>
  __device__ __forceinline__ void fill_slot(int32_t num_boxes, const Copy& copy) {
    const int32_t thread = thread_here();
    const int32_t lane = thread % 32;
    static_assert(S::kSlots > 2 * (kCopyWarps - 1));
    if (thread / 32 == to_.at % kCopyWarps) {
      const uint32_t slot = next_slot();
      uint64_t* const full = &ring_.full[to_.slot()];
      // The first lane arrives for this warp, and the others for the other warps.
      if (lane == 0) {
        barrier_expect(full, kSliceBytes);
      } else if (lane < kCopyWarps) {
        barrier_arrive(full);
      }
      __syncwarp();
      if (lane < num_boxes) copy(slot, full);
    }
    to_.next();
  }
  __device__ __forceinline__ void announce_all() {
    cp_async_wait<0>();
#pragma unroll 1
    while (num_pending_ > 0) announce();
  }

 private:
  // The oldest slice has arrived.
  __device__ __forceinline__ void announce() {
    fence_shared_for_wgmma();
    __syncwarp();
    const Place<S> oldest = to_.before(num_pending_);
    if (threadIdx.x % 32 == 0) barrier_arrive(&ring_.full[oldest.slot()]);
    --num_pending_;
  }

  const Ring& ring_;
  Place<S> to_;
  int32_t num_pending_ = 0;
};

// Copies a warp's 32 keys of a slice, zeros for those that no row sees (offset -1). Neighbouring
// lanes take neighbouring units of a key.
__device__ __forceinline__ void copy_keys(uint32_t slot, const std::byte* from, int64_t offset) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t unit = thread % 8;
#pragma unroll 1  // more at once would take registers that there are not
  for (int32_t i = 0; i < 32; i += 4) {
    const int32_t key = i + thread % 32 / 8;
    const int64_t at = __shfl_sync(kFullWarp, offset, key);
    cp_async_16(slot + paged::swizzled(thread / 32 * 32 + key, unit, 8),
                at >= 0 ? from + at + unit * 16 : from, at >= 0);
  }
}

// The keys and the values of a layer's cache, to the copy engine.
struct KvMaps {
  CUtensorMap keys;
  CUtensorMap values;
  int32_t box_tokens;
  int32_t num_boxes;  // of a chunk; 0: the copy engine cannot copy blocks of this size
};

// Copies the chunks of a part: of each the slices of K, then those of V. Chunks with keys that no
// row of the tile sees are copied with cp.async, since those keys must not be read. What is known
// of the part stays in shared memory, as there are few registers.
template <class S>
__device__ __forceinline__ void copy_chunks(const PagedAttentionParams& p, const KvMaps& maps,
                                            Parts<S>& parts, int32_t index, Copier<S>& copier) {
#pragma unroll 1
  for (int32_t chunk = parts.keys_of(index).first_chunk; chunk < parts.keys_of(index).end_chunk;
       ++chunk) {
    const PartKeys& part = parts.keys_of(index);
    const int32_t* const blocks = p.block_table + part.seq_slot * p.block_table_stride;
    const int32_t first_key = chunk * kChunk;
    if (maps.num_boxes > 0 && first_key >= part.begin && first_key + kChunk <= part.end) {
      copier.announce_all();
      const int32_t lane = thread_here() % 32;
      const int32_t key = first_key + min(lane, maps.num_boxes - 1) * maps.box_tokens;
      const int32_t of_keys = key / p.kv.block_size;
      const int32_t token = key - of_keys * p.kv.block_size;
      const int32_t block = blocks[of_keys];
#pragma unroll 1
      for (int32_t item = 0; item < 2 * S::kSlices; ++item) {
        const bool is_value = item >= S::kSlices;
        const int32_t slice = is_value ? item - S::kSlices : item;
        copier.fill_slot(maps.num_boxes, [&](uint32_t slot, uint64_t* full) {
          copy_box(slot + static_cast<uint32_t>(lane * maps.box_tokens * 128),
                   is_value ? &maps.values : &maps.keys, slice * kSliceColumns,
                   parts.keys_of(index).kv_head, token, block, full);
        });
      }
    } else {
      // Each lane has the location of one of its warp's 32 keys.
      const int32_t key = first_key + static_cast<int32_t>(threadIdx.x);
      int64_t offset = -1;
      if (key >= part.begin && key < part.end) {
        const int32_t of_key = key / p.kv.block_size;
        offset = blocks[of_key] * p.kv.block_bytes +
                 int64_t{key - of_key * p.kv.block_size} * p.num_kv_heads * S::kHeadDim * 2;
      }
#pragma unroll 1
      for (int32_t item = 0; item < 2 * S::kSlices; ++item) {
        const bool is_value = item >= S::kSlices;
        const int32_t slice = is_value ? item - S::kSlices : item;
        const std::byte* const from = p.kv.base + (is_value ? p.kv.v_offset : p.kv.k_offset) +
                                      parts.keys_of(index).kv_head * (S::kHeadDim * 2) +
                                      slice * 128;
        copy_keys(copier.next_slot(), from, offset);
        copier.commit();
      }
    }
  }
  copier.announce_all();
}

}  // namespace paceline::cuda::prefill
