// SPDX-License-Identifier: Apache-2.0
#pragma once

// The weights of one decoder in one arena, in the form that the forward pass reads: q, k and v rows
// in one matrix, gate and up rows in one matrix, norms and biases in float32. Once finished,
// only update_models writes to it.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <paceline/dtype.h>

#include "device/device_memory.h"
#include "model/decoder_config.h"

namespace paceline {

// All pointers are 64 B aligned and point into DecoderWeights::arena.
struct LayerWeights {
  const float* attn_norm = nullptr;  // [hidden], or null in some draft heads
  const std::byte* qkv = nullptr;    // [qkv_rows(attention), DecoderConfig::qkv_inputs]: q rows,
                                     // k rows, v rows
  const float* qkv_bias = nullptr;   // [same rows], or null
  const float* q_norm = nullptr;     // [head_dim], or null
  const float* k_norm = nullptr;     // [head_dim], or null; always null in a layer that reads KV
  const std::byte* o = nullptr;      // [hidden, num_qo_heads * head_dim]
  const float* o_bias = nullptr;     // [hidden], or null
  const float* attn_post_norm = nullptr;  // [hidden], or null
  const float* mlp_norm = nullptr;        // [hidden]
  const std::byte* gate_up = nullptr;     // [2 * intermediate, hidden]: gate rows, then up rows
  const float* gate_up_bias = nullptr;    // [2 * intermediate], or null
  const std::byte* down = nullptr;        // [hidden, intermediate]
  const float* down_bias = nullptr;       // [hidden], or null
  const float* mlp_post_norm = nullptr;   // [hidden], or null
  // In models with per-layer inputs, else null.
  const std::byte* per_layer_gate = nullptr;  // [per_layer_inputs.size, hidden]
  const std::byte* per_layer_proj = nullptr;  // [hidden, per_layer_inputs.size]
  const float* per_layer_norm = nullptr;      // [hidden]
  const float* scale = nullptr;               // [1] scale of the residual stream, or null
};

// The weights of a draft head (DrafterConfig) besides its layers.
struct DraftHeadWeights {
  const std::byte* fc = nullptr;         // [hidden, DrafterConfig::fc_width]
  const std::byte* feedback = nullptr;   // [target_hidden, hidden], or null
  const float* fc_bias = nullptr;        // [hidden], or null
  const float* fc_input_norm = nullptr;  // [fc_width], or null
  std::vector<const float*> fc_norms;    // one norm [target_hidden] per aux layer, or empty
  const float* hidden_norm = nullptr;    // [hidden], or null
  // [draft_vocab_size] target token of each row of the lm_head; null: row and token are equal.
  const int32_t* draft_to_target = nullptr;
  // With centroids, else null.
  const std::byte* centroids = nullptr;     // [centroids.count, hidden]
  const int32_t* token_ordering = nullptr;  // [draft_vocab_size] tokens in order of clusters
};

struct DecoderWeights {
  DType dtype = DType::kFloat32;  // dtype of the matrices
  DeviceBuffer arena;
  // [vocab_size, hidden]; null in a draft head that uses the target's.
  const std::byte* embed = nullptr;
  const std::byte* lm_head = nullptr;  // [num_logits, hidden]; the embedding when tied; null in a
                                       // draft head that uses the target's
  const float* final_norm = nullptr;   // [hidden], or null in some draft heads
  // In models with per-layer inputs, else null; width = layers * per_layer_inputs.size.
  const std::byte* per_layer_embed = nullptr;  // [per_layer_inputs.vocab_size, width]
  const std::byte* per_layer_proj = nullptr;   // [width, hidden]
  const float* per_layer_norm = nullptr;       // [per_layer_inputs.size]
  std::vector<LayerWeights> layers;
  DraftHeadWeights head;
};

}  // namespace paceline
