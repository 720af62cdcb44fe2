// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a warpgroup of the prefill attention kernel does with one chunk of keys. Each step has the
// operations and the order of paged_attention_chunk.cuh, so that a row has the same bits: a thread
// holds the same columns of its rows in wgmma as in mma.sync.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_rows.cuh"
#include "attention/prefill_shape.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"
#include "gemm/wgmma_products.cuh"

namespace paceline::cuda::prefill {

// Key tile j (8 keys): rows quad_row in [4 j], [4 j + 1], rows quad_row + 8 in [4 j + 2], [4 j +
// 3].
using Scores = float[kChunk / 2];
// Products with the values of a slice, in the same order.
using SliceValues = float[kSliceColumns / 2];
// Probabilities as the register operand of wgmma: [2 j + half] of key tile j.
using Weights = uint32_t[kChunk / 4];

// The position of a thread in its warpgroup.
struct Position {
  int32_t group;
  int32_t lane;
  int32_t quad_lane;
  int32_t first_row;  // packed row of the lower half; that of the upper half is 8 further on
};

__device__ __forceinline__ Position position_here() {
  const int32_t thread = thread_here();
  const int32_t lane = thread % 32;
  const auto group =
      static_cast<int32_t>(uniform(static_cast<uint32_t>(thread / 128 - kCopyWarps * 32 / 128)));
  return {.group = group,
          .lane = lane,
          .quad_lane = lane % 4,
          .first_row = group * 64 + thread % 128 / 32 * 16 + lane / 4};
}

// The lower word of a tile's descriptor (see tile_descriptor); only this one changes from tile to
// tile.
__device__ __forceinline__ uint32_t descriptor_word(uint32_t tile) {
  return (tile & 0x3FFFFu) >> 4 | 1u << 16;
}
__device__ __forceinline__ uint64_t descriptor(uint32_t word) {
  // The 128-byte swizzle, and groups of 8 rows 1,024 bytes apart; see tile_descriptor.
  constexpr uint64_t kUpper = uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32;
  return kUpper | word;
}

// Begins S = Q K^T of the chunk whose keys begin at `place`, and moves `place` behind them.
template <class S>
__device__ __forceinline__ void begin_scores(const Ring& ring, uint32_t queries, Place<S>& place,
                                             Scores& s) {
#pragma unroll
  for (int32_t slice = 0; slice < S::kSlices; ++slice) {
    barrier_wait(&ring.full[place.slot()], place.parity());
    const uint32_t q = descriptor_word(queries + slice * S::kQSliceBytes);
    const uint32_t k = descriptor_word(ring.at(place.slot()));
    wgmma_begin();
#pragma unroll
    for (int32_t i = 0; i < kSliceColumns / 16; ++i) {
      if (slice == 0 && i == 0) {
        wgmma_fresh<kChunk>(s, descriptor(q), descriptor(k));
      } else {
        constexpr uint32_t kNext = kNext16Columns;
        wgmma<kChunk>(s, descriptor(q + i * kNext), descriptor(k + i * kNext));
      }
    }
    place.next();
  }
  wgmma_commit();
}

// Gives `count` slices from `place` on back to the copying warps.
template <class S>
__device__ __forceinline__ void release(const Ring& ring, const Position& at, int32_t count,
                                        Place<S> place) {
#pragma unroll
  for (int32_t i = 0; i < count; ++i) {
    if (at.lane == 0) barrier_arrive(&ring.empty[place.slot()]);
    place.next();
  }
}

// See cap_scores of paged_attention_chunk.cuh.
__device__ __forceinline__ void cap_scores(float scale, float soft_cap, Scores& s) {
#pragma unroll
  for (int32_t i = 0; i < kChunk / 2; ++i) s[i] = capped_product(s[i], scale, soft_cap);
}

// -inf where the row does not see the key.
__device__ __forceinline__ void mask_scores(const paged::TileRows& rows, int32_t first_key,
                                            const Position& at, Scores& s) {
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    const int32_t packed = at.first_row + 8 * half;
    const int32_t begin = rows.begin[packed] - first_key - 2 * at.quad_lane;
    const int32_t end = rows.end[packed] - first_key - 2 * at.quad_lane;
#pragma unroll
    for (int32_t j = 0; j < kChunk / 8; ++j) {
#pragma unroll
      for (int32_t e = 0; e < 2; ++e) {
        const int32_t key = 8 * j + e;
        if (key < begin || key >= end) s[4 * j + 2 * half + e] = negative_infinity();
      }
    }
  }
}

__device__ __forceinline__ void find_maxima(const Scores& s, float (&chunk_max)[2]) {
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    // Two at a time, as each waits for the one before.
    float two[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
    for (int32_t j = 0; j < kChunk / 8; ++j) {
      two[0] = fmaxf(two[0], s[4 * j + 2 * half]);
      two[1] = fmaxf(two[1], s[4 * j + 2 * half + 1]);
    }
    float highest = fmaxf(two[0], two[1]);
    highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
    chunk_max[half] = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
  }
}

// P = 2^(S scale - max), rounded to bfloat16, with its sums: of 32 keys by the tensor cores, then
// of the four 32s in order.
__device__ __forceinline__ void make_weights(const Scores& s, float scale,
                                             const float (&chunk_max)[2], float (&chunk_sum)[2],
                                             Weights& p) {
#pragma unroll
  for (int32_t quarter = 0; quarter < 4; ++quarter) {
    float sums[4] = {};
#pragma unroll
    for (int32_t k = 2 * quarter; k < 2 * quarter + 2; ++k) {
      uint32_t a[4];
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t at = 8 * k + 2 * i;
        a[i] = pack_bf16(weight_of(s[at], scale, chunk_max[i % 2]),
                         weight_of(s[at + 1], scale, chunk_max[i % 2]));
        p[4 * k + i] = a[i];
      }
      add_row_sums(sums, a);
    }
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      chunk_sum[half] = quarter == 0 ? sums[2 * half] : __fadd_rn(chunk_sum[half], sums[2 * half]);
    }
  }
}

// Begins O = P V over the columns of the slice at `place`, and moves `place` behind it.
template <class S>
__device__ __forceinline__ void begin_values(const Ring& ring, const Weights& p, Place<S>& place,
                                             SliceValues& o) {
  constexpr uint32_t kNext16Keys = 16 * 128 >> 4;
  barrier_wait(&ring.full[place.slot()], place.parity());
  const uint32_t v = descriptor_word(ring.at(place.slot()));
  wgmma_begin();
  wgmma_rows_by_columns<kSliceColumns, 0>(o, p, descriptor(v));
#pragma unroll
  for (int32_t i = 1; i < kChunk / 16; ++i) {
    wgmma_rows_by_columns<kSliceColumns, 1>(o, p + 4 * i, descriptor(v + i * kNext16Keys));
  }
  wgmma_commit();
  place.next();
}

}  // namespace paceline::cuda::prefill
