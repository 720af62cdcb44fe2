// SPDX-License-Identifier: Apache-2.0
#pragma once

// The shapes of the prefill attention kernel's instances and its ring of keys and values.

#include <algorithm>
#include <cstdint>

#include "attention/paged_attention_rows.cuh"
#include "attention/paged_attention_shape.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda::prefill {

using paged::kChunk;
using paged::kFullWarp;

inline constexpr int32_t kSliceColumns = 64;  // of a row of 128 bytes
inline constexpr int32_t kSliceBytes = kChunk * 128;
inline constexpr int32_t kCopyWarps = 4;
inline constexpr int32_t kMaxSharedBytes = (227 << 10) - 8192;  // rows and barriers take the rest

// `groups` warpgroups have 64 packed rows each. has_cap: scores have a soft cap.
template <int head_dim, int groups, bool has_cap>
struct Shape {
  static constexpr int32_t kHeadDim = head_dim;
  static constexpr int32_t kHeadUnits = head_dim / 8;  // of 16 bytes
  static constexpr bool kHasCap = has_cap;
  static constexpr int32_t kGroups = groups;
  static constexpr int32_t kRows = 64 * groups;
  static constexpr int32_t kThreads = 128 * (groups + 1);
  static constexpr int32_t kSlices = head_dim / kSliceColumns;  // of K, and of V
  static constexpr int32_t kQSliceBytes = kRows * 128;
  static constexpr int32_t kQBytes = kSlices * kQSliceBytes;
  static constexpr int32_t kSlots = std::min((kMaxSharedBytes - kQBytes) / kSliceBytes, 12);
  static constexpr int32_t kSharedBytes = 1024 + kQBytes + kSlots * kSliceBytes;
  // Slices that a copying warp lets fly before it waits for the oldest.
  static constexpr int32_t kSlicesAhead = 3;
  // Of the copying warpgroup and of the others.
  static constexpr int32_t kCopyRegisters = groups == 3 ? 32 : 40;
  static constexpr int32_t kRegisters = groups == 3 ? 160 : 232;
  static_assert(kSlots >= kSlices + kSlicesAhead);
  // The state of a warpgroup in the workspace: what each thread holds of it.
  static constexpr int32_t kStateFloats = 128 * (head_dim / 2 + 4);
};

// What the warps know of a part, in shared memory.
struct PartKeys {
  int32_t index;  // of the block's parts
  bool exists;
  bool resumes;
  bool publishes;
  int32_t kv_head;
  int32_t seq_slot;
  int32_t begin;  // the keys that the rows of the tile see
  int32_t end;
  int32_t first_chunk;  // of the part
  int32_t end_chunk;
};

// What else a warp must know for each chunk, in shared memory, where it takes no registers.
struct CommonKeys {
  int32_t begin;  // all live rows see [begin, end)
  int32_t end;
  float scale;  // of weight_of
};

// A part of a block, and the rows of its tile.
template <class S>
struct PreparedPart {
  PartKeys keys;
  int32_t row_begin[S::kRows];
  int32_t row_end[S::kRows];
  int32_t row_index[S::kRows];
  int32_t row_head[S::kRows];

  __device__ __forceinline__ paged::TileRows rows() {
    return {.begin = row_begin, .end = row_end, .index = row_index, .head = row_head};
  }
};

// The part that is computed, and the one behind it, by turns.
template <class S>
struct Parts {
  PreparedPart<S> prepared[2];
  uint64_t are_ready[2];              // to be copied,
  uint64_t are_copied[2];             // and no longer needed by the copying warps
  CommonKeys common[4 * S::kGroups];  // of the part that a warp computes

  // The address is computed here, not kept in a register.
  __device__ __forceinline__ const PartKeys& keys_of(int32_t index) const {
    asm volatile("" : "+r"(index));
    return prepared[index % 2].keys;
  }
};

// A place in the ring, which goes round and round: a slot, and the parity of its phase. In one
// number, as there are few registers.
template <class S>
struct Place {
  int32_t at = 0;  // the slot, in odd rounds kSlots more

  [[nodiscard]] __device__ __forceinline__ int32_t slot() const {
    return at >= S::kSlots ? at - S::kSlots : at;
  }
  [[nodiscard]] __device__ __forceinline__ uint32_t parity() const {
    return at >= S::kSlots ? 1 : 0;
  }
  __device__ __forceinline__ void next() { at = at + 1 == 2 * S::kSlots ? 0 : at + 1; }
  // The place `count` slots back, at most one round.
  [[nodiscard]] __device__ __forceinline__ Place before(int32_t count) const {
    return {at < count ? at - count + 2 * S::kSlots : at - count};
  }
};

struct Ring {
  uint32_t slots;   // [kSlots] of kSliceBytes
  uint64_t* full;   // [kSlots] a slice has arrived
  uint64_t* empty;  // [kSlots] all warpgroups are done with it

  __device__ __forceinline__ uint32_t at(int32_t slot) const {
    return slots + static_cast<uint32_t>(slot * kSliceBytes);
  }
};

}  // namespace paceline::cuda::prefill
