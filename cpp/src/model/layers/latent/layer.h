// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scratch and the forward pass of latent attention.

#include <cstdint>

#include "model/forward/layer_pass.h"
#include "model/layers/latent/config.h"
#include "model/layers/latent/weights.h"

namespace paceline {

// Scratch buffers; null in models without latent attention. Of the dtype of the activations.
struct LatentScratch {
  void* q;           // [rows, num_qo_heads, qk_nope_head_dim + qk_rope_head_dim], before absorption
  void* absorbed_q;  // [rows, num_qo_heads, kv_lora_rank + qk_rope_head_dim]
  void* mean_latents;  // [rows, num_qo_heads, kv_lora_rank] output of attention before V_h
};
struct LatentWidths {
  using Scratch = LatentScratch;
  int64_t q = 0;
  int64_t absorbed_q = 0;
  int64_t mean_latents = 0;

  void merge(const LatentAttention& attention, const ScratchSizes& sizes);
  [[nodiscard]] LatentScratch allocate(DeviceArena& arena, int64_t rows, DType dtype) const;
};
template <>
struct KindWidths<LatentAttention> {
  using Type = LatentWidths;
};

template <class Ctx>
void run_attention(Ctx& ctx, const LatentAttention& attention,
                   const WeightsOf<LatentAttention>& weights, const AttentionPass& pass);

}  // namespace paceline
