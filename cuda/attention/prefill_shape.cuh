// SPDX-License-Identifier: Apache-2.0
#pragma once

// The shapes of the prefill attention kernel's instances and its ring of keys and values.

#include <algorithm>
#include <cstdint>

#include "attention/paged_attention_shape.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda::prefill {

using paged::kChunk;
using paged::kFullWarp;

inline constexpr int32_t kSliceColumns = 64;  // of a row of 128 bytes
inline constexpr int32_t kSliceBytes = kChunk * 128;
inline constexpr int32_t kCopyWarps = 4;
inline constexpr int32_t kMaxSharedBytes = (227 << 10) - 4608;  // rows and barriers take the rest

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
};

struct Place {
  int32_t slot = 0;
  uint32_t parity = 0;

  template <class S>
  __device__ __forceinline__ void next() {
    if (++slot == S::kSlots) {
      slot = 0;
      parity ^= 1;
    }
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
