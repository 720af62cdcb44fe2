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

// Copies slices of K and V to the ring. A warp copies 32 keys of a chunk. If the size of a block of
// the pool is a multiple of 16, sixteen of these keys are always in one block: then each lane holds
// the place of the first of its sixteen keys. Otherwise each lane holds the place of one key.
template <int kSliceUnits>
class SliceLoader {
 public:
  __device__ SliceLoader(const PagedAttentionParams& p, int32_t kv_head, const int32_t* blocks,
                         int32_t begin, int32_t end)
      : base_(p.kv.base + int64_t{kv_head} * p.head_dim * 2),
        blocks_(blocks),
        block_bytes_(p.kv.block_bytes),
        token_bytes_(p.num_kv_heads * p.head_dim * 2),
        block_size_(p.kv.block_size),
        begin_(begin),
        end_(end),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        warp_(static_cast<int32_t>(threadIdx.x) / 32) {}

  // Starts the look-up of a chunk's blocks. Keys outside [begin, end) are not read.
  __device__ __forceinline__ void look_up(int32_t chunk) {
    const int32_t key = first_key(chunk) + (has_halves() ? lane_ / kHalf * kHalf : lane_);
    next_block_ = -1;
    if (key + (has_halves() ? kHalf - 1 : 0) >= begin_ && key < end_) {
      const int32_t index = key / block_size_;
      next_block_ = __ldcg(blocks_ + index);
      next_in_block_ = key - index * block_size_;
    }
  }

  // The chunk looked up last is the one to copy from now on.
  __device__ __forceinline__ void enter() {
    offset_ =
        next_block_ < 0 ? -1 : next_block_ * block_bytes_ + int64_t{next_in_block_} * token_bytes_;
  }

  // Copies keys of this warp of the chunk entered last, of one slice; `at` is the byte offset of K
  // or V in the block plus that of the slice in the key. Neighbouring lanes take neighbouring units
  // of a key.
  template <Keys kKeys>
  __device__ __forceinline__ void copy(int32_t chunk, uint32_t to, int64_t at) const {
    const std::byte* const from = base_ + at + lane_ % kSliceUnits * 16;
    const int32_t begin = begin_ - first_key(chunk);
    const int32_t end = end_ - first_key(chunk);
    // New keys are few, so that more code for them does not pay.
    constexpr bool kIsNew = kKeys == Keys::kNew;
    if (!kIsNew && has_halves()) return copy_halves<kKeys>(to, from, begin, end);
    const int32_t last = kIsNew ? min(end, kWarpKeys) : kWarpKeys;
#pragma unroll 1
    for (int32_t i = kIsNew ? num_old_ / kKeysAtOnce * kKeysAtOnce : 0; i < last;
         i += kKeysAtOnce) {
      const int32_t key = i + lane_ / kSliceUnits;
      int64_t offset = __shfl_sync(kFullWarp, offset_, has_halves() ? key / kHalf * kHalf : key);
      bool is_live = offset >= 0;
      if (has_halves()) {
        offset += int64_t{key % kHalf} * token_bytes_;
        is_live &= key >= begin && key < end;
      }
      if (is_wanted<kKeys>(key, end)) {
        cp_async_16(to + swizzled(warp_ * kWarpKeys + key, lane_ % kSliceUnits, kSliceUnits),
                    is_live ? from + offset : base_, is_live);
      }
    }
  }

  // Tells how many of this warp's keys in the chunk looked up last are before position `old_end`.
  // These are old. Keys that are never read are copied with them, as zeros.
  __device__ __forceinline__ void set_old(int32_t chunk, int32_t old_end) {
    num_old_ = min(max(old_end - first_key(chunk), 0), kWarpKeys);
  }
  [[nodiscard]] __device__ __forceinline__ bool has_old() const { return num_old_ > 0; }
  [[nodiscard]] __device__ __forceinline__ bool has_new(int32_t chunk) const {
    return num_old_ < min(end_ - first_key(chunk), kWarpKeys);
  }

 private:
  static constexpr int32_t kHalf = kWarpKeys / 2;
  static constexpr int32_t kKeysAtOnce = 32 / kSliceUnits;

  [[nodiscard]] __device__ __forceinline__ bool has_halves() const {
    return block_size_ % kHalf == 0;
  }
  // Of the warp.
  [[nodiscard]] __device__ __forceinline__ int32_t first_key(int32_t chunk) const {
    return chunk * kChunk + warp_ * kWarpKeys;
  }
  template <Keys kKeys>
  [[nodiscard]] __device__ __forceinline__ bool is_wanted(int32_t key, int32_t end) const {
    return kKeys == Keys::kAll || (key >= num_old_ && key < end) == (kKeys == Keys::kNew);
  }
  // Of the keys copied, those in [begin, end) are read. Few instructions for a copy: with few
  // warps, their number is the time of a chunk.
  template <Keys kKeys>
  __device__ __forceinline__ void copy_halves(uint32_t to, const std::byte* from, int32_t begin,
                                              int32_t end) const {
    const int32_t lane_key = lane_ / kSliceUnits;
    const uint32_t to_key = to + swizzled_row(lane_key);
    const auto first_unit = static_cast<uint32_t>((lane_ % kSliceUnits ^ lane_key) * 16);
    const int64_t step = int64_t{kKeysAtOnce} * token_bytes_;
#pragma unroll
    for (int32_t half = 0; half < kWarpKeys; half += kHalf) {
      const int64_t offset = __shfl_sync(kFullWarp, offset_, half);
      const std::byte* key_at =
          offset >= 0 ? from + offset + int64_t{lane_key} * token_bytes_ : base_;
#pragma unroll
      for (int32_t i = half; i < half + kHalf; i += kKeysAtOnce) {
        const int32_t key = i + lane_key;
        // As `swizzled`: the units of a row are permuted by the lowest three bits of its number.
        const uint32_t unit_at = first_unit ^ static_cast<uint32_t>(i % 8 * 16);
        if (is_wanted<kKeys>(key, end)) {
          cp_async_16(to_key + unit_at + static_cast<uint32_t>(i * kSliceUnits * 16), key_at,
                      key >= begin && key < end);
        }
        key_at += step;
      }
    }
  }
  // Where a key of the warp begins in a stage.
  [[nodiscard]] __device__ __forceinline__ uint32_t swizzled_row(int32_t key) const {
    return static_cast<uint32_t>((warp_ * kWarpKeys + key) * kSliceUnits * 16);
  }

  const std::byte* base_;  // of the KV head in block 0, without K's or V's offset
  const int32_t* blocks_;
  int64_t block_bytes_;
  int32_t token_bytes_;
  int32_t block_size_;
  int32_t begin_;
  int32_t end_;
  int32_t lane_;
  int32_t warp_;
  int64_t offset_ = -1;  // of this lane's half, or key; -1: not to be read
  int64_t next_block_ = -1;
  int32_t next_in_block_ = 0;
  int32_t num_old_ = 0;  // of the warp's keys
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
      if (!loader_.has_old()) return;
#pragma unroll 1
      for (int32_t i = 0; i < kAhead; ++i) copy_item<Keys::kOld>(i, i);
    }
  }

  // Requests the rest of the first items. To be called once, after wait_for_predecessor().
  __device__ __forceinline__ void fill() {
    if constexpr (S::kReadsAhead) {
      const bool is_live = load_chunk_ < end_chunk_;
      loader_.look_up(load_chunk_ + chunk_step_);
      // Loops, so that code that runs once is short.
#pragma unroll 1
      for (int32_t i = 0; i < kAhead; ++i) {
        if (is_live && !loader_.has_old()) {
          copy_item<Keys::kAll>(i, i);
        } else if (is_live && loader_.has_new(load_chunk_)) {
          copy_item<Keys::kNew>(i, i);
        }
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
        load_chunk_, stages_ + stage * S::kSliceBytes,
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
