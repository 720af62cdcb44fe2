// SPDX-License-Identifier: Apache-2.0
#include "model/weight_layout.h"

#include "base/check.h"

namespace paceline {
namespace {

void lay_out_layer(const DecoderConfig& config, size_t index, Carver& carver,
                   LayerWeights& weights) {
  const LayerConfig& layer = config.layers[index];
  const std::string name = concat("layers.", index, ".");
  const AttentionConfig& attention = layer.attention;
  const int64_t hidden = config.hidden;
  const int64_t head_dim = attention.head_dim;
  const int64_t q_size = attention.num_qo_heads * head_dim;
  const int64_t kv_size = attention.num_kv_heads * head_dim;
  const int64_t intermediate = layer.mlp.intermediate;
  const auto norm = [&](const char* which, int64_t size) {
    return carver.vector({{name + which, size}}, DummyKind::kNeutralNorm);
  };

  const bool has_attn_norm = index > 0 || !config.drafter || config.drafter->has_attn_norm;
  if (has_attn_norm) weights.attn_norm = norm("attn_norm.weight", hidden);
  const KvInputs inputs = kv_inputs(attention);
  const auto qkv_parts = [&](const char* which) {
    std::vector<WeightPart> parts = {{name + "attn.q" + which, q_size}};
    if (inputs != KvInputs::kNone) parts.push_back({name + "attn.k" + which, kv_size});
    if (inputs == KvInputs::kKeysAndValues) parts.push_back({name + "attn.v" + which, kv_size});
    return parts;
  };
  weights.qkv = carver.matrix(qkv_parts(".weight"), config.qkv_inputs(index));
  if (attention.has_qkv_bias)
    weights.qkv_bias = carver.vector(qkv_parts(".bias"), DummyKind::kZero);
  if (attention.has_qk_norm) {
    weights.q_norm = norm("attn.q_norm.weight", head_dim);
    if (inputs != KvInputs::kNone) weights.k_norm = norm("attn.k_norm.weight", head_dim);
  }
  weights.o = carver.matrix({{name + "attn.o.weight", hidden}}, q_size);
  if (attention.has_o_bias) {
    weights.o_bias = carver.vector({{name + "attn.o.bias", hidden}}, DummyKind::kZero);
  }
  if (config.has_post_norms) weights.attn_post_norm = norm("attn_post_norm.weight", hidden);

  weights.mlp_norm = norm("mlp_norm.weight", hidden);
  weights.gate_up = carver.matrix(
      {{name + "mlp.gate.weight", intermediate}, {name + "mlp.up.weight", intermediate}}, hidden);
  weights.down = carver.matrix({{name + "mlp.down.weight", hidden}}, intermediate);
  if (layer.mlp.has_bias) {
    weights.gate_up_bias = carver.vector(
        {{name + "mlp.gate.bias", intermediate}, {name + "mlp.up.bias", intermediate}},
        DummyKind::kZero);
    weights.down_bias = carver.vector({{name + "mlp.down.bias", hidden}}, DummyKind::kZero);
  }
  if (config.has_post_norms) weights.mlp_post_norm = norm("mlp_post_norm.weight", hidden);

  if (const int64_t size = config.per_layer_inputs.size; size > 0) {
    weights.per_layer_gate = carver.matrix({{name + "per_layer.gate.weight", size}}, hidden);
    weights.per_layer_proj = carver.matrix({{name + "per_layer.proj.weight", hidden}}, size);
    weights.per_layer_norm = norm("per_layer.norm.weight", hidden);
  }
  if (config.has_layer_scale) weights.scale = carver.vector({{name + "scale", 1}}, DummyKind::kOne);
}

void lay_out_head(const DecoderConfig& config, Carver& carver, DraftHeadWeights& weights) {
  const DrafterConfig& drafter = *config.drafter;
  const auto norm = [&](const std::string& name, int64_t size) {
    return carver.vector({{name, size}}, DummyKind::kNeutralNorm);
  };
  const int64_t fc_width = drafter.fc_width();
  weights.fc = carver.matrix({{"fc.weight", config.hidden}}, fc_width);
  if (drafter.has_fc_bias) {
    weights.fc_bias = carver.vector({{"fc.bias", config.hidden}}, DummyKind::kZero);
  }
  if (drafter.norm_before_fc) weights.fc_input_norm = norm("fc_input_norm.weight", fc_width);
  weights.fc_norms.clear();
  for (size_t i = 0; drafter.has_fc_norm && i < drafter.aux_layers.size(); ++i) {
    weights.fc_norms.push_back(norm(concat("fc_norm.", i, ".weight"), drafter.target_hidden));
  }
  if (drafter.kind == DrafterKind::kEagle3) {
    weights.hidden_norm = norm("layers.0.hidden_norm.weight", config.hidden);
  }
  if (drafter.kind == DrafterKind::kGemma4Mtp) {
    weights.feedback = carver.matrix({{"feedback.weight", drafter.target_hidden}}, config.hidden);
  }
  if (const CentroidsConfig& centroids = drafter.centroids; centroids.count > 0) {
    weights.centroids = carver.matrix({{"centroids.weight", centroids.count}}, config.hidden);
    weights.token_ordering =
        carver.tokens("token_ordering", drafter.draft_vocab_size, /*is_optional=*/false);
  } else if (drafter.owns_lm_head) {
    // Without this table, row i of an LM head over the whole vocabulary is that of token i.
    weights.draft_to_target =
        carver.tokens("draft_to_target", drafter.draft_vocab_size,
                      /*is_optional=*/drafter.draft_vocab_size == config.vocab_size);
  }
}

}  // namespace

void lay_out(const DecoderConfig& config, Carver& carver, DecoderWeights& weights) {
  const DrafterConfig* drafter = config.drafter ? &*config.drafter : nullptr;
  if (drafter == nullptr || drafter->owns_embedding) {
    weights.embed = carver.matrix({{"embed.weight", config.vocab_size}}, config.hidden);
  }
  if (config.ties_lm_head) {
    weights.lm_head = weights.embed;
  } else if (drafter == nullptr || drafter->owns_lm_head) {
    weights.lm_head = carver.matrix({{"lm_head.weight", config.lm_head_rows()}}, config.hidden);
  }
  if (drafter == nullptr || drafter->has_final_norm) {
    weights.final_norm =
        carver.vector({{"final_norm.weight", config.hidden}}, DummyKind::kNeutralNorm);
  }
  if (const PerLayerInputsConfig& inputs = config.per_layer_inputs; inputs.size > 0) {
    const int64_t width = inputs.size * static_cast<int64_t>(config.layers.size());
    weights.per_layer_embed = carver.matrix({{"per_layer.embed.weight", inputs.vocab_size}}, width);
    weights.per_layer_proj = carver.matrix({{"per_layer.proj.weight", width}}, config.hidden);
    weights.per_layer_norm =
        carver.vector({{"per_layer.norm.weight", inputs.size}}, DummyKind::kNeutralNorm);
  }
  weights.layers.resize(config.layers.size());
  for (size_t i = 0; i < config.layers.size(); ++i) {
    lay_out_layer(config, i, carver, weights.layers[i]);
  }
  if (drafter != nullptr) lay_out_head(config, carver, weights.head);
}

}  // namespace paceline
