// SPDX-License-Identifier: Apache-2.0
#pragma once

// The phases of one chunk of keys in the paged attention kernel: scores, probabilities, products
// with the values, and the merge into the running state or the store to the workspace.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_loader.cuh"
#include "attention/paged_attention_rows.cuh"
#include "attention/paged_attention_shape.cuh"
#include "common/mma.cuh"

namespace paceline::cuda::paged {

// Accumulators of a thread, as mma_16x8x16 leaves them: of every MMA tile of rows and keys.
template <class S>
using Scores = float[S::kMTiles][kKeyTiles][4];

// Accumulators of a thread over the warp's columns of one slice.
template <class S>
using Products = float[S::kMTiles][S::kWarpColumnTiles][4];

// Of each of the thread's rows, by tile and half.
template <class S, class T>
using PerRow = T[S::kMTiles][2];

// Maxima and sums of the warps' quarters of a chunk, in shared memory.
template <class S>
struct WarpResults {
  float (*max)[S::kRows];  // [kWarps]
  float (*sum)[S::kRows];

  __device__ __forceinline__ float chunk_max(int32_t packed) const {
    return fmaxf(fmaxf(max[0][packed], max[1][packed]), fmaxf(max[2][packed], max[3][packed]));
  }
  // In the order of the warps.
  __device__ __forceinline__ float chunk_sum(int32_t packed) const {
    return __fadd_rn(__fadd_rn(__fadd_rn(sum[0][packed], sum[1][packed]), sum[2][packed]),
                     sum[3][packed]);
  }
};

// Which keys of one chunk the rows of the tile see.
template <class S>
struct ChunkView {
  const TileRows& rows;
  int32_t first_key;
  bool is_full;  // every live row sees every key of the chunk

  // Whether the row sees any key of the chunk.
  __device__ __forceinline__ bool sees_any(int32_t packed) const {
    return is_full || (rows.begin[packed] < first_key + kChunk && rows.end[packed] > first_key);
  }
};

// S = Q K^T: a warp scores its 32 keys for all rows of the tile.
template <class S>
__device__ __forceinline__ void score_keys(SliceRing<S>& ring, uint32_t q_shared,
                                           const ThreadPosition& at, Scores<S>& s) {
  const int32_t lane = at.lane;
#pragma unroll
  for (int32_t slice = 0; slice < S::kSlices; ++slice) {
    const uint32_t keys = ring.next();
#pragma unroll
    for (int32_t k = 0; k < S::kSlice / 16; ++k) {
      uint32_t b[kKeyTiles / 2][4];
#pragma unroll
      for (int32_t n = 0; n < kKeyTiles / 2; ++n) {
        const int32_t key = at.warp * kWarpKeys + n * 16 + lane % 8 + lane / 16 * 8;
        ldmatrix_x4(b[n], keys + swizzled(key, 2 * k + lane / 8 % 2, S::kSliceUnits));
      }
#pragma unroll
      for (int32_t m = 0; m < S::kMTiles; ++m) {
        uint32_t a[4];
        ldmatrix_x4(
            a, q_shared + swizzled(m * 16 + lane % 16, slice * S::kSliceUnits + 2 * k + lane / 16,
                                   S::kHeadUnits));
#pragma unroll
        for (int32_t n = 0; n < kKeyTiles; ++n) {
          mma_16x8x16(s[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
}

// Makes products scores with a cap. Without one, weight_of scales the products.
template <class S>
__device__ __forceinline__ void cap_scores(float scale, float soft_cap, Scores<S>& s) {
#pragma unroll
  for (int32_t m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int32_t n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) s[m][n][e] = capped_product(s[m][n][e], scale, soft_cap);
    }
  }
}

// -inf where the row does not see the key.
template <class S>
__device__ __forceinline__ void mask_scores(const ChunkView<S>& view, const ThreadPosition& at,
                                            Scores<S>& s) {
  if (view.is_full) return;
  const int32_t first_key = view.first_key + at.warp * kWarpKeys + 2 * at.quad_lane;
#pragma unroll
  for (int32_t m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t packed = packed_row(m, half, at);
      const int32_t begin = view.rows.begin[packed] - first_key;
      const int32_t end = view.rows.end[packed] - first_key;
#pragma unroll
      for (int32_t n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int32_t e = 0; e < 2; ++e) {
          const int32_t key = n * 8 + e;
          if (key < begin || key >= end) s[m][n][2 * half + e] = negative_infinity();
        }
      }
    }
  }
}

// Stores the maxima over the warp's keys. To be followed by a barrier.
template <class S>
__device__ __forceinline__ void store_warp_maxima(const Scores<S>& s, const ThreadPosition& at,
                                                  const WarpResults<S>& results) {
#pragma unroll
  for (int32_t m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      float highest = negative_infinity();
#pragma unroll
      for (int32_t n = 0; n < kKeyTiles; ++n) {
        highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
      if (at.quad_lane == 0) results.max[at.warp][packed_row(m, half, at)] = highest;
    }
  }
}

// P = 2^(S scale - max), rounded to bfloat16, goes to shared memory. The sums are of the rounded
// values, since the products with V use those: of the warp's keys by the tensor cores, then of the
// warps in order. `chunk_max` gets the maxima of the scaled scores. To be followed by a barrier.
template <class S>
__device__ __forceinline__ void store_probabilities(const Scores<S>& s, float scale,
                                                    const ChunkView<S>& view,
                                                    const ThreadPosition& at, std::byte* shared,
                                                    const WarpResults<S>& results,
                                                    PerRow<S, float>& chunk_max) {
#pragma unroll
  for (int32_t m = 0; m < S::kMTiles; ++m) {
    float subtract[2];
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t packed = packed_row(m, half, at);
      const float max = __fmul_rn(results.chunk_max(packed), scale);
      chunk_max[m][half] = max;
      // A row that sees no key of the chunk has max -inf, and -inf - -inf would be NaN.
      subtract[half] = view.is_full || view.sees_any(packed) ? max : 0.0f;
    }
    float sums[4] = {};
#pragma unroll
    for (int32_t k = 0; k < kKeyTiles / 2; ++k) {
      uint32_t a[4];
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t n = 2 * k + i / 2;
        const int32_t half = i % 2;
        a[i] = pack_bf16(weight_of(s[m][n][2 * half], scale, subtract[half]),
                         weight_of(s[m][n][2 * half + 1], scale, subtract[half]));
        const uint32_t to =
            S::kPOffset +
            swizzled(packed_row(m, half, at), at.warp * (kWarpKeys / 8) + n, kChunk / 8) +
            at.quad_lane * 4;
        *reinterpret_cast<uint32_t*>(shared + to) = a[i];
      }
      add_row_sums(sums, a);
    }
    if (at.quad_lane == 0) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        results.sum[at.warp][packed_row(m, half, at)] = sums[2 * half];
      }
    }
  }
}

// O = P V over one slice: a warp takes a quarter of its columns, over all keys of the chunk.
template <class S>
__device__ __forceinline__ void multiply_values(uint32_t values, uint32_t p_shared,
                                                const ThreadPosition& at, Products<S>& o) {
  const int32_t lane = at.lane;
#pragma unroll
  for (int32_t k = 0; k < kChunk / 16; ++k) {
    uint32_t b[S::kWarpColumnTiles / 2][4];
#pragma unroll
    for (int32_t n = 0; n < S::kWarpColumnTiles / 2; ++n) {
      const int32_t unit = at.warp * S::kWarpColumnTiles + 2 * n + lane / 16;
      ldmatrix_x4_transposed(b[n], values + swizzled(k * 16 + lane % 16, unit, S::kSliceUnits));
    }
#pragma unroll
    for (int32_t m = 0; m < S::kMTiles; ++m) {
      uint32_t a[4];
      ldmatrix_x4(a, p_shared + swizzled(m * 16 + lane % 16, 2 * k + lane / 16, kChunk / 8));
#pragma unroll
      for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
        mma_16x8x16(o[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

}  // namespace paceline::cuda::paged
