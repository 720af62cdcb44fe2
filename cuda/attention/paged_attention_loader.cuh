// SPDX-License-Identifier: Apache-2.0
#pragma once

// How keys and values reach shared memory in the paged attention kernel.

#include <cstddef>
#include <cstdint>

#include "attention/paged_attention_shape.cuh"
#include "common/mma.cuh"
#include "ops/ops.h"

namespace paceline::cuda::paged {

// Copies slices of K and V to the ring. Each lane knows where one key of its warp's 32 lies.
template <int kSliceUnits>
class SliceLoader {
 public:
  __device__ SliceLoader(const PagedAttentionParams& p, const int32_t* blocks, int32_t begin,
                         int32_t end)
      : base_(p.kv.base + int64_t{static_cast<int32_t>(blockIdx.y)} * p.head_dim * 2),
        blocks_(blocks),
        block_bytes_(p.kv.block_bytes),
        token_bytes_(int64_t{p.num_kv_heads} * p.head_dim * 2),
        block_size_(p.kv.block_size),
        begin_(begin),
        end_(end),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        warp_(static_cast<int32_t>(threadIdx.x) / 32) {}

  // Starts the look-up of a chunk's blocks. Keys outside [begin, end) lie nowhere.
  __device__ __forceinline__ void look_up(int32_t chunk) {
    const int32_t key = chunk * kChunk + warp_ * kWarpKeys + lane_;
    next_block_ = -1;
    if (key >= begin_ && key < end_) {
      const int32_t index = key / block_size_;
      next_block_ = blocks_[index];
      next_in_block_ = key - index * block_size_;
    }
  }

  // The chunk looked up last is the one to copy from now on.
  __device__ __forceinline__ void enter() {
    offset_ = next_block_ < 0 ? -1 : next_block_ * block_bytes_ + next_in_block_ * token_bytes_;
  }

  // This warp's keys of one slice; `at` is the byte offset of K or V in the block and of the slice
  // in the key. Neighbouring lanes take neighbouring units of a key.
  __device__ __forceinline__ void copy(uint32_t to, int64_t at) const {
    constexpr int32_t kKeysAtOnce = 32 / kSliceUnits;
    const int32_t unit = lane_ % kSliceUnits;
    const std::byte* const from = base_ + at + unit * 16;
#pragma unroll 4
    for (int32_t i = 0; i < kWarpKeys; i += kKeysAtOnce) {
      const int32_t key = i + lane_ / kSliceUnits;
      const int64_t offset = __shfl_sync(kFullWarp, offset_, key);
      const bool is_live = offset >= 0;
      cp_async_16(to + swizzled(warp_ * kWarpKeys + key, unit, kSliceUnits),
                  is_live ? from + offset : base_, is_live);
    }
  }

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
};
}  // namespace paceline::cuda::paged
