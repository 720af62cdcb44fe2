// SPDX-License-Identifier: Apache-2.0
#pragma once

// A tile of y in shared memory, from which each token's outputs are written in long pieces.

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "common/convert.cuh"
#include "elementwise/gate_up.cuh"
#include "gemm/gemm_args.h"

namespace paceline::cuda {

template <class Out>
__device__ __forceinline__ Out to_out(float value);
template <>
__device__ __forceinline__ float to_out<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 to_out<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// One token per row. The pitch is 16 bytes more than the outputs of a row, which spreads eight rows
// over all banks. `threads` of the block write.
template <class Out, int32_t weights, int32_t tokens, int32_t threads>
struct StagedRows {
  static constexpr int32_t kVector = 16 / static_cast<int32_t>(sizeof(Out));
  static constexpr int32_t kPitch = weights + kVector;
  static constexpr int32_t kBytes = tokens * kPitch * static_cast<int32_t>(sizeof(Out));

  Out* data;

  // Writes the first tokens and columns of the tile to y, which points to the first of them. Call
  // after all threads have stored their parts.
  __device__ __forceinline__ void write(Out* y, int64_t y_stride, int32_t num_tokens,
                                        int32_t num_columns) const {
    const bool is_aligned = y_stride % kVector == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
    constexpr int32_t kPieces = weights / kVector;  // of one token
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_tokens * kPieces; i += threads) {
      const int32_t token = i / kPieces;
      const int32_t begin = i % kPieces * kVector;
      const Out* const from = data + token * kPitch + begin;
      Out* const to = y + token * y_stride + begin;
      if (is_aligned && begin + kVector <= num_columns) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int32_t c = 0; c < kVector && begin + c < num_columns; ++c) to[c] = from[c];
      }
    }
  }

  // The piece of the residual to which a thread adds outputs: 8 columns of one token.
  struct ResidualPiece {
    float* at = nullptr;  // null: none
    float values[8];
  };
  // Reads it; `residual` points to the first outputs of the tile. Its rows are of whole pieces.
  static __device__ __forceinline__ void read_residual(float* residual, int64_t stride,
                                                       int32_t num_tokens, int32_t num_columns,
                                                       ResidualPiece& piece) {
    static_assert(sizeof(Out) == 2 && tokens * weights / kVector <= threads);
    constexpr int32_t kPieces = weights / kVector;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t token = thread / kPieces;
    const int32_t begin = thread % kPieces * kVector;
    if (token >= num_tokens || begin >= num_columns) return;
    piece.at = residual + token * stride + begin;
    load_vector(piece.at, piece.values);
  }
  // Adds the outputs to it. Call after all threads have stored their parts.
  __device__ __forceinline__ void add(const ResidualPiece& piece) const {
    if (piece.at == nullptr) return;
    constexpr int32_t kPieces = weights / kVector;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    float sums[8];
    load_vector(data + thread / kPieces * kPitch + thread % kPieces * kVector, sums);
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) sums[i] += piece.values[i];
    store_vector(sums, piece.at);
  }

  // Writes the activation of a tile whose first half of columns are gates and whose second half are
  // their ups.
  __device__ __forceinline__ void write_gated(Out* y, int64_t y_stride, int32_t num_tokens,
                                              int32_t num_columns, const GatedRows& gated) const {
    static_assert(sizeof(Out) == 2 && weights % (2 * kVector) == 0);
    const bool is_aligned = y_stride % kVector == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
    constexpr int32_t kPieces = weights / 2 / kVector;  // of one token
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_tokens * kPieces; i += threads) {
      const int32_t token = i / kPieces;
      const int32_t begin = i % kPieces * kVector;
      const Out* const gates = data + token * kPitch + begin;
      const Out* const ups = gates + weights / 2;
      Out* const to = y + token * y_stride + begin;
      __align__(16) Out values[kVector];
#pragma unroll
      for (int32_t c = 0; c < kVector; ++c) {
        values[c] =
            __float2bfloat16_rn(gate_up(gated.activation, __bfloat162float(gates[c]),
                                        __bfloat162float(ups[c]), gated.alpha, gated.limit));
      }
      if (is_aligned && begin + kVector <= num_columns) {
        uint4 piece;
        memcpy(&piece, values, sizeof(piece));
        *reinterpret_cast<uint4*>(to) = piece;
      } else {
#pragma unroll
        for (int32_t c = 0; c < kVector; ++c) {
          if (begin + c < num_columns) to[c] = values[c];
        }
      }
    }
  }
};

}  // namespace paceline::cuda
