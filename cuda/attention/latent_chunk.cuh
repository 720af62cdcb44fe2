// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the two warpgroups of the latent attention kernel do with a chunk of 64 entries. Entries and
// columns of values are the 64 rows of wgmma, queries its columns, so that any multiple of 16
// queries fits:
//   1. S^T = E Q^T: a warpgroup scores all entries of the chunk for its half of the queries
//   2. maxima and weights of those queries; P goes to shared memory
//   3. O^T = V^T P^T: a warpgroup takes every other slice of the values, for all queries
// A slice of O begins at zero and is added to the segment's accumulators, which stay in registers.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/latent_ring.cuh"
#include "attention/latent_shape.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"
#include "gemm/wgmma_products.cuh"

namespace paceline::cuda::latent {

// The static shared memory of a block.
template <class S>
struct SharedArrays {
  alignas(16) float warp_max[S::kRows][4];
  alignas(16) float2 weights[S::kRows];  // subtracted from scores; factor of the chunk
  alignas(16) float2 totals[S::kRows];   // factors of the total and of the segment
  alignas(16) float keep[S::kRows];      // factor of the segment's accumulators
  alignas(16) float normal[S::kRows];    // 1 / sum
  alignas(16) uint32_t rescales[4];      // by warps that own maxima: whether any keep is below 1
  uint64_t landed[S::kSlots];
  uint64_t full[S::kSlots];
  uint64_t empty[S::kSlots];
  const std::byte* addresses[2][kChunk];
};

// The position of a thread of a warpgroup.
struct Position {
  int32_t group;
  int32_t thread;  // of the group
  int32_t warp;
  int32_t lane;
  int32_t quad_row;
  int32_t quad_lane;
};

// A warpgroup's accumulators of a state, and what single threads hold of it: thread i of a group
// the maximum of the group's row i, and warp w the sums of row tiles w, w + 4, ... of the group
// (every quad has them all).
template <class S>
struct State {
  static constexpr int32_t kSumTiles = (S::kGroupRowTiles + 3) / 4;
  float values[kGroupSlices][S::kRows / 2];
  float max;
  float sums[kSumTiles][2];

  __device__ __forceinline__ void clear() {
    max = negative_infinity();
#pragma unroll
    for (int32_t i = 0; i < kSumTiles; ++i) sums[i][0] = sums[i][1] = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kGroupSlices; ++i) {
#pragma unroll
      for (int32_t n = 0; n < S::kRows / 2; ++n) values[i][n] = 0.0f;
    }
  }
};

template <class S>
using Scores = float[S::kGroupRows / 2];

// The first row of the group's row tile `tile`; a thread has rows 2 quad_lane (+ 1) of it.
template <class S>
__device__ __forceinline__ int32_t group_row(const Position& at, int32_t tile) {
  return at.group * S::kGroupRows + tile * 8;
}

template <class S>
__device__ __forceinline__ void score(const Ring& ring, const RingPlace<S>& place, uint32_t queries,
                                      const Position& at, Scores<S>& s) {
#pragma unroll
  for (int32_t i = 0; i < S::kGroupRows / 2; ++i) s[i] = 0.0f;
  const uint32_t own_queries = uniform(queries + static_cast<uint32_t>(group_row<S>(at, 0) * 128));
#pragma unroll
  for (int32_t slice = 0; slice < kSlices; ++slice) {
    const RingPlace<S> of_slice = place.of_slice(slice);
    barrier_wait(&ring.full[of_slice.slot], of_slice.parity);
    const uint64_t entries =
        tile_descriptor(ring.slots + static_cast<uint32_t>(of_slice.slot * kSliceBytes));
    const uint64_t q = tile_descriptor(own_queries + slice * S::kQSliceBytes);
    pin(s);
    wgmma_begin();
#pragma unroll
    for (int32_t k = 0; k < kSliceColumns / 16; ++k) {
      wgmma<S::kGroupRows>(s, entries + k * kNext16Columns, q + k * kNext16Columns);
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  pin(s);
}

// -inf where the row does not see the entry.
template <class S>
__device__ __forceinline__ void mask_scores(const TileRows& rows, int32_t first_key,
                                            const Position& at, Scores<S>& s) {
  const int32_t key = first_key + at.warp * 16 + at.quad_row;
#pragma unroll
  for (int32_t n = 0; n < S::kGroupRowTiles; ++n) {
    const int2 end =
        *reinterpret_cast<const int2*>(rows.end + group_row<S>(at, n) + 2 * at.quad_lane);
#pragma unroll
    for (int32_t e = 0; e < 4; ++e) {
      if (key + e / 2 * 8 >= (e % 2 == 0 ? end.x : end.y)) s[4 * n + e] = negative_infinity();
    }
  }
}

// Stores the maxima of the group's rows over the warp's 16 entries.
template <class S>
__device__ __forceinline__ void store_warp_maxima(const Scores<S>& s, const Position& at,
                                                  SharedArrays<S>& shared) {
  constexpr int32_t kHalf = S::kGroupRowTiles;  // of the thread's rows
  float highest[2 * kHalf];
#pragma unroll
  for (int32_t n = 0; n < S::kGroupRowTiles; ++n) {
#pragma unroll
    for (int32_t e = 0; e < 2; ++e) highest[2 * n + e] = fmaxf(s[4 * n + e], s[4 * n + e + 2]);
  }
  // Lanes 16 apart share the rows: each goes on with half of them.
  const bool is_upper = at.lane >= 16;
#pragma unroll
  for (int32_t i = 0; i < kHalf; ++i) {
    const float give = is_upper ? highest[i] : highest[i + kHalf];
    const float keep = is_upper ? highest[i + kHalf] : highest[i];
    highest[i] = fmaxf(keep, __shfl_xor_sync(kFullWarp, give, 16));
  }
#pragma unroll
  for (int32_t i = 0; i < kHalf; ++i) {
    highest[i] = fmaxf(highest[i], __shfl_xor_sync(kFullWarp, highest[i], 8));
    highest[i] = fmaxf(highest[i], __shfl_xor_sync(kFullWarp, highest[i], 4));
    if (at.quad_row % 4 == 0) {
      const int32_t of_thread = i + (is_upper ? kHalf : 0);
      const int32_t row = group_row<S>(at, of_thread / 2) + 2 * at.quad_lane + of_thread % 2;
      shared.warp_max[row][at.warp] = highest[i];
    }
  }
}

// Makes the maxima of the warps those of the chunk and of the segment, one row a thread.
template <class S>
__device__ __forceinline__ void take_maxima(float scale, const Position& at, State<S>& state,
                                            SharedArrays<S>& shared) {
  bool rescales = false;
  if (at.thread < S::kGroupRows) {
    const int32_t row = group_row<S>(at, 0) + at.thread;
    const float4 of_warps = *reinterpret_cast<const float4*>(shared.warp_max[row]);
    const float score = fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w));
    const float max = ceilf(__fmul_rn(score, scale));
    const Factors factors = merge_factors(state.max, max);
    rescales = factors.keep != 1.0f && state.max != negative_infinity();
    state.max = factors.max;
    // A row that sees no entry of the chunk has scores of -inf, and -inf - -inf would be NaN.
    shared.weights[row] = make_float2(max == negative_infinity() ? 0.0f : max, factors.take);
    shared.keep[row] = factors.keep;
  }
  if (at.warp < 2) {
    const bool any = __any_sync(kFullWarp, rescales);
    if (at.lane == 0) shared.rescales[2 * at.group + at.warp] = any ? 1 : 0;
  }
}

// P = 2^(S - max) times the factor of the chunk, in bfloat16, goes to shared memory as
// [row][entry].
template <class S>
__device__ __forceinline__ void store_weights(float scale, const Scores<S>& s, const Position& at,
                                              const SharedArrays<S>& shared, uint32_t weights) {
  uint32_t pairs[2 * S::kGroupRowTiles];
#pragma unroll
  for (int32_t n = 0; n < S::kGroupRowTiles; ++n) {
    // The maximum and the factor of a row, then of the next.
    const float4 of_rows =
        *reinterpret_cast<const float4*>(&shared.weights[group_row<S>(at, n) + 2 * at.quad_lane]);
    float p[4];
#pragma unroll
    for (int32_t e = 0; e < 4; ++e) {
      const float exponent = __fmaf_rn(s[4 * n + e], scale, e % 2 == 0 ? -of_rows.x : -of_rows.z);
      const float weight = exponent < kLeastPower ? 0.0f : exp2_approx(exponent);
      p[e] = __fmul_rn(weight, e % 2 == 0 ? of_rows.y : of_rows.w);
    }
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(p[2 * half], p[2 * half + 1]);
      pairs[2 * n + half] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  // Lane l gives the address of row l % 8 of matrix l / 8: two halves of the warp's entries, two
  // row tiles.
  const int32_t unit = 2 * at.warp + at.lane / 8 % 2;
  const int32_t row = group_row<S>(at, 0) + at.lane / 16 * 8 + at.lane % 8;
  const uint32_t to = weights + static_cast<uint32_t>(row * 128 + (unit ^ (at.lane % 8)) * 16);
#pragma unroll
  for (int32_t n = 0; n + 1 < S::kGroupRowTiles; n += 2) {
    stmatrix_x4_transposed(to + n * 1024, pairs[2 * n], pairs[2 * n + 1], pairs[2 * n + 2],
                           pairs[2 * n + 3]);
  }
  if constexpr (S::kGroupRowTiles % 2 == 1) {
    constexpr int32_t n = S::kGroupRowTiles - 1;
    stmatrix_x2_transposed(to + n * 1024, pairs[2 * n], pairs[2 * n + 1]);
  }
}

// Adds the rows of P to the sums: products with a matrix of ones.
template <class S>
__device__ __forceinline__ void add_sums(const Position& at, const SharedArrays<S>& shared,
                                         uint32_t weights, State<S>& state) {
  constexpr uint32_t kOnes[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
#pragma unroll
  for (int32_t i = 0; i < State<S>::kSumTiles; ++i) {
    const int32_t tile = at.warp + 4 * i;
    if (tile >= S::kGroupRowTiles) break;
    const int32_t row = group_row<S>(at, tile) + at.lane % 8;
    float sums[4] = {};
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      uint32_t b[4];
      const int32_t unit = 4 * half + at.lane / 8;
      ldmatrix_x4(b, weights + static_cast<uint32_t>(row * 128 + (unit ^ (at.lane % 8)) * 16));
      mma_16x8x16(sums, kOnes, b[0], b[1]);
      mma_16x8x16(sums, kOnes, b[2], b[3]);
    }
    const float2 keep =
        *reinterpret_cast<const float2*>(&shared.keep[group_row<S>(at, tile) + 2 * at.quad_lane]);
    state.sums[i][0] = merged(state.sums[i][0], sums[0], keep.x, 1.0f);
    state.sums[i][1] = merged(state.sums[i][1], sums[1], keep.y, 1.0f);
  }
}

// Multiplies the chunk's values with P, adds them to the state, and gives the slices back.
template <class S>
__device__ __forceinline__ void add_values(const Ring& ring, const RingPlace<S>& place,
                                           const Position& at, const SharedArrays<S>& shared,
                                           uint32_t weights, State<S>& state) {
  const uint4 flags = *reinterpret_cast<const uint4*>(shared.rescales);
  const bool rescales = (flags.x | flags.y | flags.z | flags.w) != 0;
  const uint64_t p = tile_descriptor(weights);
#pragma unroll
  for (int32_t i = 0; i < kGroupSlices; ++i) {
    const RingPlace<S> of_slice = place.of_slice(2 * i + at.group);
    const uint64_t values =
        tile_descriptor(uniform(ring.slots + static_cast<uint32_t>(of_slice.slot * kSliceBytes)));
    float fresh[S::kRows / 2];
    wgmma_begin();
    wgmma_by_columns<S::kRows, 0>(fresh, values, p);
#pragma unroll
    for (int32_t k = 1; k < kChunk / 16; ++k) {
      wgmma_by_columns<S::kRows, 1>(fresh, values + k * (2048 >> 4), p + k * kNext16Columns);
    }
    wgmma_commit();
    if (i == 0) add_sums<S>(at, shared, weights, state);
    if (rescales) {
#pragma unroll
      for (int32_t n = 0; n < S::kRowTiles; ++n) {
        const float2 keep =
            *reinterpret_cast<const float2*>(&shared.keep[8 * n + 2 * at.quad_lane]);
#pragma unroll
        for (int32_t e = 0; e < 4; ++e) {
          float& value = state.values[i][4 * n + e];
          value = __fmul_rn(value, e % 2 == 0 ? keep.x : keep.y);
        }
      }
    }
    wgmma_wait<0>();
    pin(fresh);
    if (at.lane == 0) barrier_arrive(&ring.empty[of_slice.slot]);
#pragma unroll
    for (int32_t n = 0; n < S::kRows / 2; ++n) {
      state.values[i][n] = __fadd_rn(state.values[i][n], fresh[n]);
    }
  }
}

}  // namespace paceline::cuda::latent
