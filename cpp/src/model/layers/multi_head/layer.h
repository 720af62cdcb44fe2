// SPDX-License-Identifier: Apache-2.0
#pragma once

// The forward pass of multi-head attention.

#include <cstdint>

#include "model/forward/layer_pass.h"
#include "model/layers/multi_head/config.h"
#include "model/layers/multi_head/weights.h"

namespace paceline {

// Scratch of layers with an output gate; null in models without one.
struct MultiHeadScratch {
  void* gate;  // [rows, num_qo_heads * head_dim] dtype of the activations
};
struct MultiHeadWidths {
  using Scratch = MultiHeadScratch;
  int64_t gate = 0;

  void merge(const MultiHeadAttention& attention, const ScratchSizes& sizes);
  [[nodiscard]] MultiHeadScratch allocate(DeviceArena& arena, int64_t rows, DType dtype) const;
};
template <>
struct KindWidths<MultiHeadAttention> {
  using Type = MultiHeadWidths;
};

[[nodiscard]] inline bool takes_norm(const MultiHeadAttention& attention,
                                     const MultiHeadAttentionWeights& weights) {
  // A gate and the parts of a rank's matrix read the input, too.
  return !attention.has_output_gate && weights.qkv.rows.empty();
}
[[nodiscard]] inline const Linear* last_product(const MultiHeadAttention&,
                                                const MultiHeadAttentionWeights& weights) {
  return weights.o.is_gathered() ? nullptr : &weights.o;
}

template <class Ctx>
void run_attention(Ctx& ctx, const MultiHeadAttention& attention,
                   const WeightsOf<MultiHeadAttention>& weights, const AttentionPass& pass);

// Writes keys and values of the rows to the cache, computed from pass.input; no query attends. The
// layer writes_context().
template <class Ctx>
void write_keys_values(Ctx& ctx, const MultiHeadAttention& attention,
                       const WeightsOf<MultiHeadAttention>& weights, const AttentionPass& pass);

}  // namespace paceline
