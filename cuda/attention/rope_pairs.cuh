// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rotary embedding of a LatentRope, pair by pair.

#include <cstdint>

#include "common/convert.cuh"
#include "ops/latent.h"

namespace paceline::cuda {

// The two elements of a pair.
struct Pair {
  int32_t first;
  int32_t second;
};
__device__ __forceinline__ Pair pair_of(const LatentRope& rope, int32_t pair, int32_t width) {
  return rope.is_interleaved ? Pair{2 * pair, 2 * pair + 1} : Pair{pair, pair + width / 2};
}

// The pair (a, b) rotated by an angle.
__device__ __forceinline__ float2 rotated(float a, float b, float cos, float sin) {
  return make_float2(__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)),
                     __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin)));
}

// Pair `pair` of `from`, rotated to `position`, goes to `to`.
template <class From, class To>
__device__ __forceinline__ void rotate_pair_to(const LatentRope& rope, int64_t position,
                                               int32_t pair, int32_t width, const From* from,
                                               To* to) {
  const float cos = rope.cos[position * (width / 2) + pair];
  const float sin = rope.sin[position * (width / 2) + pair];
  const Pair at = pair_of(rope, pair, width);
  const float2 result = rotated(widen(from[at.first]), widen(from[at.second]), cos, sin);
  narrow(result.x, to + at.first);
  narrow(result.y, to + at.second);
}

// The same to the position of a row.
template <class From, class To>
__device__ __forceinline__ void rotate_pair(const LatentRope& rope, int32_t row, int32_t pair,
                                            int32_t width, const From* from, To* to) {
  rotate_pair_to(rope, rope.positions[row] + rope.position_offset, pair, width, from, to);
}

}  // namespace paceline::cuda
