// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scratch buffers of a forward pass.

#include <cstdint>

#include <paceline/dtype.h>

#include "device/device_arena.h"
#include "model/description/decoder_config.h"

namespace paceline {

// Scratch buffers of a mixture of experts; null in models without one. Expert rows are those of
// ops/moe.h, and in mixtures with MoeMlp::joins_shared one for each of up to kMaxJoinedRows rows.
struct ExpertActivations {
  float* logits;          // [rows, num_experts] of the router
  int32_t* experts;       // [rows, top_k]
  float* weights;         // [rows, top_k]
  int32_t* expert_begin;  // [num_experts + 2]
  int32_t* source_row;    // [expert rows]
  int32_t* expert_row;    // [rows, top_k]
  void* output;           // [expert rows, hidden] dtype of the activations
};

// Scratch buffers of compressed attention; null in models without it.
struct CompressedActivations {
  void* q;        // [rows, num_qo_heads, head_dim] dtype of the activations
  void* groups;   // [rows, o_a_rows] dtype: the output of o_a
  float* inputs;  // [rows, compress_rows]; null without a compressor
  // Null without an indexer.
  void* index_q;          // [rows, heads of the indexer, its head_dim] dtype
  float* scores;          // [rows, scores_stride] of the visible entries
  int64_t scores_stride;  // entries of the longest sequence
  int32_t* chosen;        // [rows, top_k] entries
  int32_t* num_chosen;    // [rows]
};

// Scratch buffers of one forward pass, shared by all passes and models and sized for the largest.
struct Activations {
  float* residual;  // [rows, residual_width]
  // In models with several residual streams, else null.
  float* embedded;           // [rows, hidden]
  float* mix;                // [rows, mix_width]
  int32_t* num_stream_rows;  // [1] rows of products with every stream
  void* normed;  // [rows, normed] dtype, as all below: output of a norm, or the concatenated input
                 // of a draft head's fc or attention
  void* qkv;     // [rows, qkv_rows(attention)], or as many as LatentAttention::qkv_a has rows
  void*
      attention;  // [rows, num_qo_heads * head_dim], of latent attention num_qo_heads * v_head_dim
  void* branch;   // [rows, hidden] output of a branch before it joins the residual
  void* gate_up;  // [rows, 2 * intermediate], or as many for each expert row
  void* activated;  // [rows, intermediate], or as many for each expert row
  // In models with latent attention, else null.
  void* latent_q;    // [rows, num_qo_heads, qk_nope_head_dim + qk_rope_head_dim] before absorption
  void* absorbed_q;  // [rows, num_qo_heads, kv_lora_rank + qk_rope_head_dim]
  void* mean_latents;  // [rows, num_qo_heads, kv_lora_rank] output of attention before V_h
  void* per_layer;     // [rows, layers * per_layer_inputs.size], valid for the whole pass; or null
  ExpertActivations experts;
  CompressedActivations compressed;
  DType dtype;
};

// Widths of the Activations buffers: maxima over layers and, after merge, over models.
struct ActivationWidths {
  int64_t hidden = 0;
  int64_t residual = 0;
  int64_t mix = 0;  // 0: no model has several residual streams
  int64_t normed = 0;
  int64_t qkv = 0;
  int64_t attention = 0;
  int64_t latent_q = 0;
  int64_t absorbed_q = 0;
  int64_t mean_latents = 0;
  int64_t gate_up = 0;  // of all places of a row
  int64_t per_layer = 0;
  // Of mixtures of experts, else 0.
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t expert_output = 0;  // of all places of a row
  int64_t shared = 0;         // intermediate size of shared experts with expert rows
  // 0 without compressed attention.
  int64_t compressed_q = 0;
  int64_t o_groups = 0;
  int64_t compress_inputs = 0;
  int64_t index_q = 0;
  int64_t index_entries = 0;  // that a row can see where an indexer chooses
  int64_t index_top_k = 0;

  // `max_tokens`: of a sequence.
  void merge(const DecoderConfig& config, int64_t max_tokens);
};

[[nodiscard]] Activations allocate_activations(DeviceArena& arena, int64_t rows,
                                               const ActivationWidths& widths, DType dtype);

}  // namespace paceline
