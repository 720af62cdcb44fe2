// SPDX-License-Identifier: Apache-2.0
#pragma once

// A warp's reading of packed int4 weights, ahead of their use. A unit is `tiles` packed tiles along
// k of one row tile. Each lane copies the words that it will convert to slots of its own in shared
// memory (`cp.async`), so it waits for its own copies alone, and only for those of one unit. (Loads
// into registers wait for each other: the compiler has few scoreboards, and a wait for the oldest
// load is one for the youngest.)

#include <cstddef>
#include <cstdint>

#include "common/mma.cuh"
#include "common/packed_copies.cuh"
#include "gemm/int4_elements.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_weights.h"

namespace paceline::cuda {

// What a lane converts of a unit: its words of codes, and of scales or zero points.
template <int32_t tiles>
struct SlotWords {
  uint4 codes[tiles];
  uint32_t scales[tiles];
};

// The scales of a unit: float16, else bfloat16; whether all its columns have the same ones.
template <bool is_float16, bool has_one_group>
struct CodeKind {
  static constexpr bool kIsFloat16 = is_float16;
  static constexpr bool kHasOneGroup = has_one_group;
};

template <int32_t tiles>
class CodeSlots {
 public:
  static constexpr int32_t kTileBytes = packed_tile_bytes(WeightFormat::kInt4);
  static constexpr int32_t kWordsAt = tiles * kTileBytes;
  static constexpr int32_t kSlotBytes = kWordsAt + tiles * 128;

  // slots: the warp's, in shared memory.
  __device__ __forceinline__ CodeSlots(const PackedArgs& weights, int32_t row_tile, uint32_t slots)
      : policy_(weights.weight_policy),
        last_tile_((weights.k + kPackedColumns - 1) / kPackedColumns - 1),
        groups_(weights, /*expert=*/0, row_tile),
        has_one_group_(groups_.are_whole(tiles * kPackedColumns)) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    codes_ = weights.data + int64_t{row_tile} * (last_tile_ + 1) * kTileBytes + lane * 16;
    codes_at_ = slots + static_cast<uint32_t>(lane * 16);
    words_at_ = slots + static_cast<uint32_t>(kWordsAt + lane * 4);
  }

  // Requests a unit. Tiles behind the last one repeat it: they meet columns of the tokens beyond K,
  // which are zeros. Commits nothing.
  __device__ __forceinline__ void request(int32_t unit, int32_t slot) const {
    const auto at = static_cast<uint32_t>(slot * kSlotBytes);
#pragma unroll
    for (int32_t t = 0; t < tiles; ++t) {
      const int32_t tile = min(unit * tiles + t, last_tile_);
      copy_weights_16(codes_at_ + at + static_cast<uint32_t>(t * kTileBytes),
                      codes_ + int64_t{tile} * kTileBytes, policy_);
      if ((t > 0 && has_one_group_) || !groups_.reads()) continue;
      copy_weights_4(words_at_ + at + static_cast<uint32_t>(t * 128), groups_.word_of(tile),
                     policy_);
    }
  }

  // Loads a unit that has arrived.
  template <class Kind>
  __device__ __forceinline__ void load(int32_t slot, SlotWords<tiles>& to) const {
    const auto at = static_cast<uint32_t>(slot * kSlotBytes);
#pragma unroll
    for (int32_t t = 0; t < tiles; ++t) {
      to.codes[t] = load_shared_16(codes_at_ + at + static_cast<uint32_t>(t * kTileBytes));
      if (t > 0 && Kind::kHasOneGroup) continue;
      to.scales[t] = load_shared_4(words_at_ + at + static_cast<uint32_t>(t * 128));
    }
  }

  // What the codes of tile t of a unit meet, of its first and of its last 32 columns. Call it for
  // each tile in turn; `by` keeps what is that of the tile before. All lanes call it.
  template <class Kind>
  __device__ __forceinline__ void multipliers(int32_t unit, int32_t t,
                                              const SlotWords<tiles>& words,
                                              Int4Multipliers (&by)[2]) const {
    if (Kind::kHasOneGroup && t > 0) return;
    groups_.template multipliers<Kind::kIsFloat16, !Kind::kHasOneGroup>(words.scales[t],
                                                                        unit * tiles + t, by);
  }

  // Calls `function` with the CodeKind of the weights, so that no unit has a branch for it.
  template <class Function>
  __device__ __forceinline__ void with_kind(const Function& function) const {
    if (groups_.has_float16_scales()) {
      has_one_group_ ? function(CodeKind<true, true>()) : function(CodeKind<true, false>());
    } else {
      has_one_group_ ? function(CodeKind<false, true>()) : function(CodeKind<false, false>());
    }
  }

 private:
  uint64_t policy_;
  int32_t last_tile_;
  Int4Groups groups_;
  bool has_one_group_;  // all columns of a unit have the same scales
  const std::byte* codes_;
  uint32_t codes_at_;
  uint32_t words_at_;
};

}  // namespace paceline::cuda
