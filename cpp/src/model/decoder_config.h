// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decoder as data: what the forward pass needs to know, and nothing of where it came from.
// Families (Llama 3, Qwen3, Gemma 3, ...) exist only in the Python loader, which writes this as
// JSON; docs/model-format.md describes every key.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kv/kv_layout.h"
#include "ops/ops.h"

namespace paceline {

// Rotary embedding, split-half: angle = position * inv_freq[i]; cos and sin times `scale`.
struct RopeConfig {
  std::vector<float> inv_freq;  // [head_dim / 2]
  float scale = 1.0f;
};

struct AttentionConfig {
  KvKind kind = KvKind::kFull;
  int32_t window = 0;         // kSliding only: keys visible to a query, itself included
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;   // divides num_qo_heads
  int32_t head_dim = 0;       // even
  float scale = 0;            // of the scores
  float soft_cap = 0;         // 0: none
  int32_t rope = 0;           // index into DecoderConfig::ropes
  bool has_qk_norm = false;
  bool has_qkv_bias = false;
  bool has_o_bias = false;
};

struct MlpConfig {
  int32_t intermediate = 0;
  Activation activation = Activation::kSilu;
  bool has_bias = false;      // gate, up and down
};

struct LayerConfig {
  AttentionConfig attention;
  MlpConfig mlp;
};

struct DecoderConfig {
  std::string name;               // for messages and reports, e.g. "gemma3"
  int32_t vocab_size = 0;
  int32_t hidden = 0;
  int32_t max_position = 0;       // positions the model was made for
  float norm_eps = 0;
  float norm_weight_offset = 0;   // 0, or 1 where norms multiply by (1 + w)
  float embed_scale = 1;
  float logit_soft_cap = 0;       // 0: none
  bool ties_lm_head = false;      // the embedding table is the lm_head
  bool has_post_norms = false;    // Gemma's sandwich: norms after attention and after the MLP
  std::vector<RopeConfig> ropes;
  std::vector<LayerConfig> layers;
};

// Parses and checks the canonical JSON. Throws InvalidArgument naming the key, the value seen and
// the values allowed; unknown keys are refused.
[[nodiscard]] DecoderConfig parse_decoder_config(std::string_view json);

}  // namespace paceline
