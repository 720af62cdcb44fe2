// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moves accumulators to y through shared memory, so that each token's outputs are written in long
// pieces.

#include <cuda_bf16.h>

#include <cstdint>

#include "gemm/gemm_args.h"
#include "gemm/staged_rows.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda {

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Four 8x8 matrices of 16-bit elements, each spread over the warp as an accumulator is: lane l
// holds elements 2 (l % 4) and the next of row l / 4. Row l % 8 of matrix l / 8 goes to lane l's
// address.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
__device__ __forceinline__ void store_matrices(void* to, const uint32_t (&from)[4]) {
  store_matrices(shared_address(to), from);
}

// The same with every matrix transposed on the way.
__device__ __forceinline__ void store_matrices_transposed(void* to, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(to)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// The accumulators of one consumer thread.
template <class Tile>
using Accumulators = float[Tile::kColumns / 2];

// A tile of y in shared memory.
template <class Out, class Tile>
struct StagedTile : StagedRows<Out, Tile::kWeights, Tile::kTokens, Tile::kConsumers> {
  using Rows = StagedRows<Out, Tile::kWeights, Tile::kTokens, Tile::kConsumers>;
  using Rows::data;
  using Rows::kPitch;

  // Stores the calling warp's part of the accumulators. `bias_of(column)` takes columns of the
  // tile.
  template <class BiasOf>
  __device__ __forceinline__ void put(const Accumulators<Tile>& sums, const BiasOf& bias_of) const {
    const int32_t first_row = static_cast<int32_t>(threadIdx.x) / 32 * 16;
    if constexpr (Tile::kWeightsAreRows) {
      if (first_row >= Tile::kWeights) return;  // of a thin tile
      put_weight_rows(sums, first_row, bias_of);
    } else {
      put_token_rows(sums, first_row, bias_of);
    }
  }

  // Stores the sums of 16 weights of the tile from `first_row` for the first kSums / 4 groups of 8
  // tokens, in the layout in which a product leaves them in a warp.
  template <int32_t kSums, class BiasOf>
  __device__ __forceinline__ void put_weight_rows(const float (&sums)[kSums], int32_t first_row,
                                                  const BiasOf& bias_of) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const float low = bias_of(first_row + lane / 4);
    const float high = bias_of(first_row + lane / 4 + 8);
    Out* const rows = data + first_row;
    // bfloat16 is stored by matrices: weights 0-7 and 8-15 for eight tokens, then for the next
    // eight.
    constexpr int32_t kInMatrices = sizeof(Out) == 2 ? kSums / 8 * 2 : 0;
    if constexpr (kInMatrices > 0) {
      Out* const to = rows + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
#pragma unroll
      for (int32_t j = 0; j < kInMatrices; j += 2) {
        const float* const s = sums + 4 * j;
        const uint32_t matrices[4] = {pack(s[0] + low, s[1] + low), pack(s[2] + high, s[3] + high),
                                      pack(s[4] + low, s[5] + low), pack(s[6] + high, s[7] + high)};
        store_matrices_transposed(to + 8 * j * kPitch, matrices);
      }
    }
#pragma unroll
    for (int32_t j = kInMatrices; j < kSums / 4; ++j) {
      Out* const to = rows + (8 * j + 2 * (lane % 4)) * kPitch + lane / 4;
      to[0] = to_out<Out>(sums[4 * j] + low);
      to[kPitch] = to_out<Out>(sums[4 * j + 1] + low);
      // Behind the weights of a thin tile there is the next token.
      if (Tile::kWeights % 16 != 0 && first_row + 8 >= Tile::kWeights) continue;
      to[8] = to_out<Out>(sums[4 * j + 2] + high);
      to[kPitch + 8] = to_out<Out>(sums[4 * j + 3] + high);
    }
  }

 private:
  template <class BiasOf>
  __device__ __forceinline__ void put_token_rows(const Accumulators<Tile>& sums, int32_t first_row,
                                                 const BiasOf& bias_of) const {
    static_assert(Tile::kColumns % 16 == 0);
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll
    for (int32_t j = 0; j < Tile::kColumns / 8; j += 2) {
      const float* const s = sums + 4 * j;
      const int32_t column = 8 * j + 2 * (lane % 4);
      const float bias[4] = {bias_of(column), bias_of(column + 1), bias_of(column + 8),
                             bias_of(column + 9)};
      if constexpr (sizeof(Out) == 2) {
        // Matrices: tokens 0-7 and 8-15, for eight weights, then for the next eight.
        const uint32_t matrices[4] = {
            pack(s[0] + bias[0], s[1] + bias[1]), pack(s[2] + bias[0], s[3] + bias[1]),
            pack(s[4] + bias[2], s[5] + bias[3]), pack(s[6] + bias[2], s[7] + bias[3])};
        store_matrices(data + (first_row + lane % 16) * kPitch + 8 * j + lane / 16 * 8, matrices);
      } else {
        float* const to = data + (first_row + lane / 4) * kPitch + column;
        *reinterpret_cast<float2*>(to) = {s[0] + bias[0], s[1] + bias[1]};
        *reinterpret_cast<float2*>(to + 8 * kPitch) = {s[2] + bias[0], s[3] + bias[1]};
        *reinterpret_cast<float2*>(to + 8) = {s[4] + bias[2], s[5] + bias[3]};
        *reinterpret_cast<float2*>(to + 8 * kPitch + 8) = {s[6] + bias[2], s[7] + bias[3]};
      }
    }
  }
};

}  // namespace paceline::cuda
