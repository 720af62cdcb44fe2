// SPDX-License-Identifier: Apache-2.0
#pragma once

// How queries, keys and values reach shared memory in the paged attention kernel.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/paged_attention_rows.cuh"
#include "attention/paged_attention_shape.cuh"
#include "common/mma.cuh"
#include "ops/ops.h"

namespace paceline::cuda::paged {

// Copies the queries of the tile, zeros where there is no live row. The copies join the group that
// is committed next.
template <class S>
__device__ __forceinline__ void load_queries(const PagedAttentionParams& p, int32_t kv_head,
                                             int32_t heads_per_group, const TileRows& rows,
                                             uint32_t to) {
  const auto* const qkv = static_cast<const __nv_bfloat16*>(p.qkv);
  const int64_t row_stride =
      int64_t{qkv_heads(p.num_qo_heads, p.num_kv_heads, p.kv_inputs)} * S::kHeadDim;
#pragma unroll
  for (int32_t i = 0; i < S::kRows * S::kHeadUnits / kThreads; ++i) {
    const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kThreads;
    const int32_t packed = at / S::kHeadUnits;
    const int32_t unit = at % S::kHeadUnits;
    const bool is_live = rows.is_live(packed);
    const int64_t head = int64_t{kv_head} * heads_per_group + rows.head[packed];
    const int64_t from = rows.index[packed] * row_stride + head * S::kHeadDim + unit * 8;
    cp_async_16(to + swizzled(packed, unit, S::kHeadUnits), is_live ? qkv + from : qkv, is_live);
  }
}

// Of the keys of a chunk: all, those that were in the cache before the rows of the launch were
// appended, or the others.
enum class Keys : uint8_t { kAll, kOld, kNew };

// Copies slices of K and V to the ring. Each lane holds the location of one of its warp's 32 keys.
template <int kSliceUnits>
class SliceLoader {
 public:
  __device__ SliceLoader(const PagedAttentionParams& p, int32_t kv_head, const int32_t* blocks,
                         int32_t begin, int32_t end)
      : base_(p.kv.base + int64_t{kv_head} * p.head_dim * 2),
        blocks_(blocks),
        block_bytes_(p.kv.block_bytes),
        token_bytes_(int64_t{p.num_kv_heads} * p.head_dim * 2),
        block_size_(p.kv.block_size),
        begin_(begin),
        end_(end),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        warp_(static_cast<int32_t>(threadIdx.x) / 32) {}

  // Starts the look-up of a chunk's blocks. Keys outside [begin, end) are not read.
  __device__ __forceinline__ void look_up(int32_t chunk) {
    const int32_t key = chunk * kChunk + warp_ * kWarpKeys + lane_;
    next_block_ = -1;
    if (key >= begin_ && key < end_) {
      const int32_t index = key / block_size_;
      next_block_ = __ldcg(blocks_ + index);
      next_in_block_ = key - index * block_size_;
    }
  }

  // The chunk looked up last is the one to copy from now on.
  __device__ __forceinline__ void enter() {
    offset_ = next_block_ < 0 ? -1 : next_block_ * block_bytes_ + next_in_block_ * token_bytes_;
  }

  // Copies keys of this warp, of one slice; `at` is the byte offset of K or V in the block plus
  // that of the slice in the key. Neighbouring lanes take neighbouring units of a key.
  template <Keys kKeys>
  __device__ __forceinline__ void copy(uint32_t to, int64_t at) const {
    constexpr int32_t kKeysAtOnce = 32 / kSliceUnits;
    const int32_t unit = lane_ % kSliceUnits;
    const std::byte* const from = base_ + at + unit * 16;
#pragma unroll 4
    for (int32_t i = 0; i < kWarpKeys; i += kKeysAtOnce) {
      const int32_t key = i + lane_ / kSliceUnits;
      const int64_t offset = __shfl_sync(kFullWarp, offset_, key);
      const bool is_live = offset >= 0;
      if (kKeys == Keys::kAll || (key < num_old_) == (kKeys == Keys::kOld)) {
        cp_async_16(to + swizzled(warp_ * kWarpKeys + key, unit, kSliceUnits),
                    is_live ? from + offset : base_, is_live);
      }
    }
  }

  // Of this warp's keys in the chunk looked up last, those before position `end` are old.
  __device__ __forceinline__ void set_old(int32_t chunk, int32_t end) {
    num_old_ = min(max(end - (chunk * kChunk + warp_ * kWarpKeys), 0), kWarpKeys);
  }
  __device__ __forceinline__ int32_t num_old() const { return num_old_; }

 private:
  const std::byte* base_;  // of the KV head in block 0, without K's or V's offset
  const int32_t* blocks_;
  int64_t block_bytes_;
  int64_t token_bytes_;
  int32_t block_size_;
  int32_t begin_;
  int32_t end_;
  int32_t lane_;
  int32_t warp_;
  int64_t offset_ = -1;  // of this lane's key, -1: not to be read
  int64_t next_block_ = -1;
  int32_t next_in_block_ = 0;
  int32_t num_old_ = 0;
};

// The ring of slices. Its items are, chunk by chunk, the K slices and then the V slices; item i is
// in cp.async group i. The first items are requested in two parts: old keys and values (before
// position old_end) when the ring is made, and the others by fill().
template <class S>
class SliceRing {
 public:
  __device__ __forceinline__ SliceRing(const PagedAttentionParams& p, const TileKeys& keys,
                                       const Chunks& chunks, uint32_t stages, int32_t old_end)
      : loader_(p, static_cast<int32_t>(blockIdx.y),
                p.block_table + keys.seq_slot * p.block_table_stride, keys.begin, keys.end),
        kv_(p.kv),
        stages_(stages),
        end_chunk_(chunks.end),
        chunk_step_(chunks.num_splits),
        load_chunk_(chunks.first + chunks.split) {
    loader_.look_up(load_chunk_);
    if constexpr (S::kReadsAhead) {
      loader_.enter();
      loader_.set_old(load_chunk_, old_end);
      if (loader_.num_old() == 0) return;
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) copy_item<Keys::kOld>(i, i);
    }
  }

  // Requests the rest of the first items. To be called once, after wait_for_predecessor().
  __device__ __forceinline__ void fill() {
    if constexpr (S::kReadsAhead) {
      const bool has_new = loader_.num_old() < kWarpKeys && load_chunk_ < end_chunk_;
      loader_.look_up(load_chunk_ + chunk_step_);
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        if (has_new) copy_item<Keys::kNew>(i, i);
        cp_async_commit();
      }
      load_stage_ = kAhead;
      load_item_ = kAhead % kItems;
      if (load_item_ == 0) load_chunk_ += chunk_step_;
    } else {
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) load_next();
    }
  }

  // Waits for the next item and returns its address. Its barrier is after all threads' reads of the
  // item before, so the stage of that one can be filled again.
  __device__ __forceinline__ uint32_t next() {
    cp_async_wait<S::kStages - 2>();
    __syncthreads();
    load_next();
    const uint32_t at = stages_ + stage_to_use_ * S::kSliceBytes;
    if (++stage_to_use_ == S::kStages) stage_to_use_ = 0;
    return at;
  }

 private:
  static constexpr int32_t kItems = 2 * S::kSlices;  // of a chunk
  static constexpr int32_t kAhead = S::kStages - 1;
  static_assert(kAhead <= kItems, "the first items are of one chunk");

  template <Keys kKeys>
  __device__ __forceinline__ void copy_item(int32_t item, uint32_t stage) const {
    const bool is_value = item >= S::kSlices;
    const int32_t slice = is_value ? item - S::kSlices : item;
    loader_.template copy<kKeys>(
        stages_ + stage * S::kSliceBytes,
        (is_value ? kv_.v_offset : kv_.k_offset) + slice * (S::kSlice * 2));
  }

  __device__ __forceinline__ void load_next() {
    if (load_chunk_ < end_chunk_) {
      if (load_item_ == 0) {
        loader_.enter();
        loader_.look_up(load_chunk_ + chunk_step_);
      }
      copy_item<Keys::kAll>(load_item_, load_stage_);
      if (++load_item_ == kItems) {
        load_item_ = 0;
        load_chunk_ += chunk_step_;
      }
      if (++load_stage_ == S::kStages) load_stage_ = 0;
    }
    cp_async_commit();  // an empty group at the end keeps the count right
  }

  SliceLoader<S::kSliceUnits> loader_;
  const KvLayerView& kv_;
  uint32_t stages_;
  int32_t end_chunk_;
  int32_t chunk_step_;
  uint32_t stage_to_use_ = 0;
  uint32_t load_stage_ = 0;
  int32_t load_item_ = 0;  // of the chunk
  int32_t load_chunk_;
};

}  // namespace paceline::cuda::paged
