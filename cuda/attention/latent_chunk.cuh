// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the warpgroups of the latent attention kernel do with a chunk of 64 entries. Entries and
// columns of values are the 64 rows of wgmma, queries its columns, so that any multiple of 16
// queries fits:
//   1. S^T = E Q^T, by the scorers, a warpgroup of its own
//   2. maxima and weights of all queries; P goes to shared memory
//   3. O^T = V^T P^T: each of two further warpgroups takes every other slice of the values
// The scorers are a chunk ahead, so that the products of one chunk and the softmax of the next
// overlap. A slice of O begins at zero and is added to the segment's accumulators, which stay in
// registers.

#include <cuda_bf16.h>

#include <cstddef>
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
  // Subtracted from scores; factor of the chunk. Behind a segment: factors of the total and of it.
  alignas(16) float2 weights[S::kRows];
  alignas(16) float keep[2][S::kRows];  // by chunks in turn: factor of the segment's accumulators
  alignas(16) float sums[S::kRows];     // of the segment; at last, 1 / sum
  alignas(16) float total_sums[S::kRows];
  alignas(16) uint32_t rescales[2][4];  // by warps of scorers: whether any keep is below 1
  uint64_t landed[S::kSlots];
  uint64_t full[S::kSlots];
  uint64_t empty[S::kSlots];
  const std::byte* addresses[2][kChunk];
};

__device__ __forceinline__ Position position_of(int32_t thread) {
  return {.group = static_cast<int32_t>(uniform(thread / 128)),
          .thread = thread % 128,
          .warp = thread % 128 / 32,
          .lane = thread % 32,
          .quad_row = thread % 32 / 4,
          .quad_lane = thread % 4};
}

// Calls f(row) in the lanes that own sums: those of rows `row` and `row` + 1.
template <class S, class F>
__device__ __forceinline__ void for_each_sum(const Position& at, const F& f) {
  if (at.quad_row != 0) return;
#pragma unroll
  for (int32_t tile = at.warp; tile < S::kRowTiles; tile += kScorers / 32) {
    f(8 * tile + 2 * at.quad_lane);
  }
}

// A warpgroup's accumulators of a state.
template <class S>
using Values = float[kGroupSlices][S::kRows / 2];

template <class S>
using Scores = float[S::kRows / 2];

template <class S>
__device__ __forceinline__ void score(const Ring& ring, const RingPlace<S>& place, uint32_t queries,
                                      Scores<S>& s) {
#pragma unroll
  for (int32_t i = 0; i < S::kRows / 2; ++i) s[i] = 0.0f;
#pragma unroll
  for (int32_t slice = 0; slice < kSlices; ++slice) {
    const RingPlace<S> of_slice = place.of_slice(slice);
    barrier_wait(&ring.full[of_slice.slot], of_slice.parity);
    const uint64_t entries =
        tile_descriptor(ring.slots + static_cast<uint32_t>(of_slice.slot * kSliceBytes));
    const uint64_t q = tile_descriptor(queries + slice * S::kQSliceBytes);
    pin(s);
    wgmma_begin();
#pragma unroll
    for (int32_t k = 0; k < kSliceColumns / 16; ++k) {
      wgmma<S::kRows>(s, entries + k * kNext16Columns, q + k * kNext16Columns);
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
  for (int32_t n = 0; n < S::kRowTiles; ++n) {
    const int2 end = *reinterpret_cast<const int2*>(rows.end + 8 * n + 2 * at.quad_lane);
#pragma unroll
    for (int32_t e = 0; e < 4; ++e) {
      if (key + e / 2 * 8 >= (e % 2 == 0 ? end.x : end.y)) s[4 * n + e] = negative_infinity();
    }
  }
}

// Stores the maxima of all rows over the warp's 16 entries.
template <class S>
__device__ __forceinline__ void store_warp_maxima(const Scores<S>& s, const Position& at,
                                                  SharedArrays<S>& shared) {
  // Lanes 16 apart share two rows of a tile: each goes on with one of them.
  const bool is_upper = at.lane >= 16;
#pragma unroll
  for (int32_t n = 0; n < S::kRowTiles; ++n) {
    const float even = fmaxf(s[4 * n], s[4 * n + 2]);
    const float odd = fmaxf(s[4 * n + 1], s[4 * n + 3]);
    float highest =
        fmaxf(is_upper ? odd : even, __shfl_xor_sync(kFullWarp, is_upper ? even : odd, 16));
    highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 8));
    highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 4));
    if (at.quad_row % 4 == 0) {
      shared.warp_max[8 * n + 2 * at.quad_lane + (is_upper ? 1 : 0)][at.warp] = highest;
    }
  }
}

// Makes the maxima of the warps those of the chunk and of the segment, one row a thread,
// which holds the segment's. `turn`
// says which of the two arrays of factors the chunk has.
template <class S>
__device__ __forceinline__ void take_maxima(float scale, int32_t turn, const Position& at,
                                            float& segment_max, SharedArrays<S>& shared) {
  bool rescales = false;
  if (at.thread < S::kRows) {
    const int32_t row = at.thread;
    const float4 of_warps = *reinterpret_cast<const float4*>(shared.warp_max[row]);
    const float score = fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w));
    const float max = ceilf(__fmul_rn(score, scale));
    const Factors factors = merge_factors(segment_max, max);
    rescales = factors.keep != 1.0f && segment_max != negative_infinity();
    segment_max = factors.max;
    // A row that sees no entry of the chunk has scores of -inf, and -inf - -inf would be NaN.
    shared.weights[row] = make_float2(max == negative_infinity() ? 0.0f : max, factors.take);
    shared.keep[turn][row] = factors.keep;
  }
  const bool any = __any_sync(kFullWarp, rescales);
  if (at.lane == 0) shared.rescales[turn][at.warp] = any ? 1 : 0;
}

// P = 2^(S - max) times the factor of the chunk, in bfloat16: pairs of neighbouring rows.
template <class S>
__device__ __forceinline__ void make_weights(float scale, const Scores<S>& s, const Position& at,
                                             const SharedArrays<S>& shared,
                                             uint32_t (&pairs)[S::kRows / 4]) {
#pragma unroll
  for (int32_t n = 0; n < S::kRowTiles; ++n) {
    // The maximum and the factor of a row, then of the next.
    const float4 of_rows =
        *reinterpret_cast<const float4*>(&shared.weights[8 * n + 2 * at.quad_lane]);
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
    // What comes next waits, or else it would take more registers than there are.
    if (n % 2 == 1) asm volatile("" ::: "memory");
  }
}

// Stores P as [row][entry].
template <class S>
__device__ __forceinline__ void store_weights(const uint32_t (&pairs)[S::kRows / 4],
                                              const Position& at, uint32_t weights) {
  // Lane l gives the address of row l % 8 of matrix l / 8: two halves of the warp's entries, two
  // row tiles.
  const int32_t unit = 2 * at.warp + at.lane / 8 % 2;
  const int32_t row = at.lane / 16 * 8 + at.lane % 8;
  const uint32_t to = weights + static_cast<uint32_t>(row * 128 + (unit ^ (at.lane % 8)) * 16);
#pragma unroll
  for (int32_t n = 0; n < S::kRowTiles; n += 2) {
    stmatrix_x4_transposed(to + n * 1024, pairs[2 * n], pairs[2 * n + 1], pairs[2 * n + 2],
                           pairs[2 * n + 3]);
  }
}

// Adds the rows of P to the sums: products with a matrix of ones.
template <class S>
__device__ __forceinline__ void add_sums(const Position& at, int32_t turn, uint32_t weights,
                                         SharedArrays<S>& shared) {
  constexpr uint32_t kOnes[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
#pragma unroll
  for (int32_t tile = at.warp; tile < S::kRowTiles; tile += kScorers / 32) {
    float sums[4] = {};
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      uint32_t b[4];
      const int32_t unit = 4 * half + at.lane / 8;
      ldmatrix_x4(b, weights + static_cast<uint32_t>((8 * tile + at.lane % 8) * 128 +
                                                     (unit ^ (at.lane % 8)) * 16));
      mma_16x8x16(sums, kOnes, b[0], b[1]);
      mma_16x8x16(sums, kOnes, b[2], b[3]);
    }
    if (at.quad_row != 0) continue;
    const int32_t row = 8 * tile + 2 * at.quad_lane;
    shared.sums[row] = merged(shared.sums[row], sums[0], shared.keep[turn][row], 1.0f);
    shared.sums[row + 1] = merged(shared.sums[row + 1], sums[1], shared.keep[turn][row + 1], 1.0f);
  }
}

// Multiplies the chunk's values with P, adds them to the state, and gives the slices back.
template <class S>
__device__ __forceinline__ void add_values(const Ring& ring, const RingPlace<S>& place,
                                           int32_t turn, const Position& at,
                                           const SharedArrays<S>& shared, uint32_t weights,
                                           Values<S>& state) {
  const uint4 flags = *reinterpret_cast<const uint4*>(shared.rescales[turn]);
  const bool rescales = (flags.x | flags.y | flags.z | flags.w) != 0;
#pragma unroll
  for (int32_t i = 0; i < kGroupSlices; ++i) {
    const RingPlace<S> of_slice = place.of_slice(2 * i + at.group);
    const uint64_t values =
        tile_descriptor(uniform(ring.slots + static_cast<uint32_t>(of_slice.slot * kSliceBytes)));
#pragma unroll
    for (int32_t part = 0; part < S::kRows / S::kPartRows; ++part) {
      const uint64_t p = tile_descriptor(weights + part * S::kPartRows * 128);
      float fresh[S::kPartRows / 2];
      wgmma_begin();
      wgmma_by_columns<S::kPartRows, 0>(fresh, values, p);
#pragma unroll
      for (int32_t k = 1; k < kChunk / 16; ++k) {
        wgmma_by_columns<S::kPartRows, 1>(fresh, values + k * (2048 >> 4), p + k * kNext16Columns);
      }
      wgmma_commit();
      float* const of_part = state[i] + part * (S::kPartRows / 2);
      if (rescales) {
#pragma unroll
        for (int32_t n = 0; n < S::kPartRows / 8; ++n) {
          const float2 keep = *reinterpret_cast<const float2*>(
              &shared.keep[turn][part * S::kPartRows + 8 * n + 2 * at.quad_lane]);
#pragma unroll
          for (int32_t e = 0; e < 4; ++e) {
            float& value = of_part[4 * n + e];
            value = __fmul_rn(value, e % 2 == 0 ? keep.x : keep.y);
          }
        }
      }
      wgmma_wait<0>();
      pin(fresh);
      if (part == S::kRows / S::kPartRows - 1 && at.lane == 0) {
        barrier_arrive(&ring.empty[of_slice.slot]);
      }
#pragma unroll
      for (int32_t n = 0; n < S::kPartRows / 2; ++n) {
        of_part[n] = __fadd_rn(of_part[n], fresh[n]);
      }
    }
  }
}

}  // namespace paceline::cuda::latent
