// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the CPU does with one head of q, k or v, or with one latent: norm, rotation, and the copy to
// the KV cache. Included by ops that run_best_isa compiles.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include <paceline/dtype.h>

#include "base/float_types.h"
#include "base/vector_math.h"
#include "ops/latent.h"

namespace paceline {

// 1 / sqrt(mean(x^2) + eps) of a head.
template <class Lanes>
[[gnu::always_inline]] inline float inverse_rms(const float* in, float eps, int32_t head_dim) {
  Lanes squares = {};
  int32_t d = 0;
  for (; d + 16 <= head_dim; d += 16) {
    const Lanes value = load<Lanes>(in + d);
    squares += value * value;
  }
  if (d < head_dim) {
    const Lanes value = load_first<Lanes>(in + d, head_dim - d);
    squares += value * value;
  }
  return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(head_dim) + eps);
}

// RMS norm of one head from `in` to `out`, which may be the same; a copy if there is no weight.
template <class Lanes>
[[gnu::always_inline]] inline void norm_head(const float* in, const float* weight,
                                             float weight_offset, float eps, float* out,
                                             int32_t head_dim) {
  if (weight == nullptr) {
    if (in != out) std::copy_n(in, head_dim, out);
    return;
  }
  const float factor = inverse_rms<Lanes>(in, eps, head_dim);
  int32_t d = 0;
  for (; d + 16 <= head_dim; d += 16) {
    store(out + d, load<Lanes>(in + d) * factor * (load<Lanes>(weight + d) + weight_offset));
  }
  for (; d < head_dim; ++d) out[d] = in[d] * factor * (weight[d] + weight_offset);
}

// The RMS norm without a weight.
template <class Lanes>
[[gnu::always_inline]] inline void norm_head_unweighted(const float* in, float eps, float* out,
                                                        int32_t head_dim) {
  const float factor = inverse_rms<Lanes>(in, eps, head_dim);
  int32_t d = 0;
  for (; d + 16 <= head_dim; d += 16) store(out + d, load<Lanes>(in + d) * factor);
  for (; d < head_dim; ++d) out[d] = in[d] * factor;
}

// Split halves: element d is paired with d + head_dim / 2.
template <class Lanes>
[[gnu::always_inline]] inline void rotate_head(const float* cos, const float* sin, float* head,
                                               int32_t head_dim) {
  const int32_t half = head_dim / 2;
  int32_t d = 0;
  for (; d + 16 <= half; d += 16) {
    const Lanes a = load<Lanes>(head + d);
    const Lanes b = load<Lanes>(head + half + d);
    const Lanes c = load<Lanes>(cos + d);
    const Lanes s = load<Lanes>(sin + d);
    store(head + d, a * c - b * s);
    store(head + half + d, b * c + a * s);
  }
  if (d < half) {
    const int32_t count = half - d;
    const Lanes a = load_first<Lanes>(head + d, count);
    const Lanes b = load_first<Lanes>(head + half + d, count);
    const Lanes c = load_first<Lanes>(cos + d, count);
    const Lanes s = load_first<Lanes>(sin + d, count);
    store_first(head + d, a * c - b * s, count);
    store_first(head + half + d, b * c + a * s, count);
  }
}

// Interleaved: elements 2i and 2i + 1 are a pair.
[[gnu::always_inline]] inline void rotate_head_interleaved(const float* cos, const float* sin,
                                                           float* head, int32_t head_dim) {
  for (int32_t i = 0; i < head_dim / 2; ++i) {
    const float a = head[2 * i];
    const float b = head[2 * i + 1];
    head[2 * i] = a * cos[i] - b * sin[i];
    head[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// Rotates a head by the angles of `position`, a position of a row.
template <class Lanes>
[[gnu::always_inline]] inline void rotate_to(const LatentRope& rope, int64_t position, float* head,
                                             int32_t head_dim) {
  const int64_t at = (position + rope.position_offset) * (head_dim / 2);
  if (rope.is_interleaved) {
    rotate_head_interleaved(rope.cos + at, rope.sin + at, head, head_dim);
  } else {
    rotate_head<Lanes>(rope.cos + at, rope.sin + at, head, head_dim);
  }
}

// Writes a head to the KV cache.
[[gnu::always_inline]] inline void append_head(const float* head, DType dtype, std::byte* to,
                                               int32_t head_dim) {
  if (dtype == DType::kFloat32) {
    std::copy_n(head, head_dim, reinterpret_cast<float*>(to));
  } else {
    std::transform(head, head + head_dim, reinterpret_cast<uint16_t*>(to),
                   [](float value) { return float_to_bf16(value); });
  }
}

}  // namespace paceline
