// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scratch and the forward pass of a recurrent layer.

#include <cstdint>

#include "model/forward/layer_pass.h"
#include "model/layers/recurrent/config.h"
#include "model/layers/recurrent/weights.h"

namespace paceline {

// Scratch buffers; null in models that need none.
struct RecurrentScratch {
  void* ba;  // [rows, 2 * num_value_heads] dtype of the activations, where b and a are not joined
};
struct RecurrentWidths {
  using Scratch = RecurrentScratch;
  int64_t ba = 0;

  void merge(const RecurrentAttention& attention, const ScratchSizes& sizes);
  [[nodiscard]] RecurrentScratch allocate(DeviceArena& arena, int64_t rows, DType dtype) const;
};
template <>
struct KindWidths<RecurrentAttention> {
  using Type = RecurrentWidths;
};

[[nodiscard]] inline bool takes_norm(const RecurrentAttention& attention,
                                     const RecurrentAttentionWeights& weights) {
  // Else b and a are a second product, and a rank has some of the outputs only.
  return attention.joins_ba() && !weights.in.is_gathered();
}
[[nodiscard]] inline const Linear* last_product(const RecurrentAttention&,
                                                const RecurrentAttentionWeights& weights) {
  return weights.o.is_gathered() ? nullptr : &weights.o;
}

template <class Ctx>
void run_attention(Ctx& ctx, const RecurrentAttention& attention,
                   const WeightsOf<RecurrentAttention>& weights, const AttentionPass& pass);

}  // namespace paceline
