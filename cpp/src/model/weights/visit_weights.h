// SPDX-License-Identifier: Apache-2.0
#pragma once

// The weights that a decoder has, in the order of their arena. Every shape is stated here and only
// here: the layout, the limit on bytes, the plans of products and the cost table visit this list.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "model/description/decoder_config.h"
#include "model/weights/linear.h"
#include "model/weights/weight_parts.h"
#include "model/weights/weights.h"
#include "ops/streams.h"

namespace paceline {

// Nothing with one residual stream. `name` ends with "mix".
template <class Weights, class Visitor>
void visit_stream_mix(const DecoderConfig& config, const std::string& name, bool is_end,
                      Weights& weights, Visitor& visit) {
  if (config.streams.count == 1) return;
  const int32_t width = mix_width(config.streams.count, is_end);
  visit.floats(weights.weight, {name + ".matrix", width}, config.residual_width());
  visit.vector(weights.base, VectorKind::kBias, {{name, width}});
  visit.vector(weights.scale, VectorKind::kScale, {{name + ".scale", is_end ? 1 : 3}});
}

// Nothing without convolutions. `name` ends with "conv".
template <class Weights, class Visitor>
void visit_block_conv(const DecoderConfig& config, const std::string& name, Weights& weights,
                      Visitor& visit) {
  if (!config.drafter || !config.drafter->block.conv.is_used()) return;
  const BlockConvConfig& conv = config.drafter->block.conv;
  visit.floats(weights.base, {.name = name + ".base", .rows = conv.taps, .num_experts = 2},
               config.hidden);
  const std::string kernel = name + ".kernel";
  visit.linear(weights.kernel, {.name = kernel,
                                .parts = {{kernel, conv.outputs(config.hidden)}},
                                .cols = config.hidden,
                                .has_float_output = true});
}

template <class Layer, class Visitor>
void visit_layer_weights(const DecoderConfig& config, size_t index, Layer& weights,
                         Visitor& visit) {
  const LayerConfig& layer = config.layers[index];
  const int64_t hidden = config.hidden;
  const LayerVisitor<Visitor> its = {.name = concat("layers.", index, "."), .visit = visit};

  const bool has_attn_norm = index > 0 || !config.drafter || config.drafter->has_attn_norm;
  if (has_attn_norm) its.norm(weights.attn_norm, "attn_norm", hidden);
  const int64_t inputs = config.qkv_inputs(index);
  std::visit(
      [&]<class Kind>(const Kind& kind) {
        visit_kind_weights(kind, {.hidden = hidden, .inputs = inputs},
                           std::get<WeightsOf<Kind>>(weights.attention), its);
      },
      layer.attention);
  if (config.has_post_norms) its.norm(weights.attn_post_norm, "attn_post_norm", hidden);

  its.norm(weights.mlp_norm, "mlp_norm", hidden);
  std::visit(
      [&]<class Kind>(const Kind& kind) {
        visit_kind_weights(kind, {.hidden = hidden, .vocab_size = config.vocab_size},
                           std::get<WeightsOf<Kind>>(weights.mlp), its);
      },
      layer.mlp);
  if (config.has_post_norms) its.norm(weights.mlp_post_norm, "mlp_post_norm", hidden);

  if (const int64_t size = config.per_layer_inputs.size; size > 0) {
    its.linear(weights.per_layer_gate, "per_layer.gate", {{its.name + "per_layer.gate", size}},
               hidden, ShardAxis::kNone, {});
    its.linear(weights.per_layer_proj, "per_layer.proj", {{its.name + "per_layer.proj", hidden}},
               size, ShardAxis::kNone, {});
    its.norm(weights.per_layer_norm, "per_layer.norm", hidden);
  }
  if (config.has_layer_scale) {
    visit.vector(weights.scale, VectorKind::kScale, {{its.name + "scale", 1}});
  }
  visit_stream_mix(config, its.name + "attn_mix", /*is_end=*/false, weights.attn_mix, visit);
  visit_stream_mix(config, its.name + "mlp_mix", /*is_end=*/false, weights.mlp_mix, visit);
  visit_block_conv(config, its.name + "attn_conv", weights.attn_conv, visit);
  visit_block_conv(config, its.name + "mlp_conv", weights.mlp_conv, visit);
}

// The weights of a draft head besides its layers.
template <class Head, class Visitor>
void visit_head_weights(const DecoderConfig& config, Head& weights, Visitor& visit) {
  const DrafterConfig& drafter = *config.drafter;
  const auto norm = [&](auto& vector, std::string name, int64_t size) {
    visit.vector(vector, VectorKind::kNorm, {{std::move(name), size}});
  };
  // fc and fc_hidden multiply embeddings and streams, which other kinds concatenate.
  const bool has_fc_hidden = config.streams.count > 1 && !drafter.averages_streams();
  const int64_t fc_width = has_fc_hidden ? config.hidden : drafter.fc_width();
  const std::vector<WeightPart> fc = {{"fc", config.hidden}};
  visit.linear(weights.fc, {.name = "fc",
                            .parts = fc,
                            .cols = fc_width,
                            .shard = ShardAxis::kRows,
                            .has_float_output = true,
                            .format = drafter.fc});
  if (has_fc_hidden) {
    visit.linear(weights.fc_hidden, {.name = "fc_hidden",
                                     .parts = {{"fc_hidden", config.hidden}},
                                     .cols = config.hidden,
                                     .shard = ShardAxis::kRows,
                                     .rows = LinearRows::kStreams,
                                     .has_float_output = true,
                                     .format = drafter.fc});
  }
  if (drafter.has_fc_bias) visit.vector(weights.fc.bias, VectorKind::kBias, fc);
  if (drafter.norm_before_fc) norm(weights.fc_input_norm, "fc_input_norm", fc_width);
  for (size_t i = 0; i < weights.fc_norms.size(); ++i) {
    norm(weights.fc_norms[i], concat("fc_norm.", i), drafter.target_hidden);
  }
  if (drafter.kind == DrafterKind::kEagle3) {
    norm(weights.hidden_norm, "layers.0.hidden_norm", config.hidden);
  }
  if (drafter.kind == DrafterKind::kBlock) norm(weights.hidden_norm, "hidden_norm", config.hidden);
  const BlockConfig& block = drafter.block;
  if (block.markov != MarkovHead::kNone) {
    visit.table(weights.markov_table, {"markov.table", config.vocab_size}, block.markov_rank);
    visit.linear(weights.markov, {.name = "markov",
                                  .parts = {{"markov", drafter.draft_vocab_size}},
                                  .cols = block.markov_rank,
                                  .rows = LinearRows::kLogits,
                                  .has_float_output = true});
  }
  if (block.has_markov_mix()) {
    const std::vector<WeightPart> mix = {{"markov.mix", block.markov_outputs()}};
    visit.linear(weights.markov_mix, {.name = "markov.mix",
                                      .parts = mix,
                                      .cols = block.markov_inputs(config.hidden),
                                      .rows = LinearRows::kLogits,
                                      .has_float_output = true});
    visit.vector(weights.markov_mix.bias, VectorKind::kBias, mix);
  }
  if (const SelectorConfig& selector = block.selector; selector.top > 0) {
    visit.table(weights.predecessors, {"selector.predecessors", config.vocab_size}, selector.rank);
    visit.table(weights.successors, {"selector.successors", config.vocab_size}, selector.rank);
    visit.linear(weights.selector, {.name = "selector",
                                    .parts = {{"selector", selector.rank}},
                                    .cols = config.hidden,
                                    .rows = LinearRows::kLogits,
                                    .has_float_output = true});
  }
  if (block.confidence != ConfidenceHead::kNone) {
    visit.floats(weights.confidence, {"confidence.weight", 1},
                 block.confidence_inputs(config.hidden));
    if (block.has_confidence_bias) {
      visit.vector(weights.confidence_bias, VectorKind::kBias, {{"confidence", 1}});
    }
  }
  if (drafter.kind == DrafterKind::kGemma4Mtp) {
    visit.linear(weights.feedback, {.name = "feedback",
                                    .parts = {{"feedback", drafter.target_hidden}},
                                    .cols = config.hidden,
                                    .rows = LinearRows::kLogits,
                                    .has_float_output = true});
  }
  if (const CentroidsConfig& centroids = drafter.centroids; centroids.count > 0) {
    visit.linear(weights.centroids, {.name = "centroids",
                                     .parts = {{"centroids", centroids.count}},
                                     .cols = config.hidden,
                                     .rows = LinearRows::kLogits,
                                     .has_float_output = true});
    visit.tokens(weights.token_ordering, {"token_ordering", drafter.draft_vocab_size},
                 /*is_optional=*/false);
  } else if (drafter.owns_lm_head) {
    // Without this table, row i of an LM head over the whole vocabulary is that of token i.
    visit.tokens(weights.draft_to_target, {"draft_to_target", drafter.draft_vocab_size},
                 /*is_optional=*/drafter.draft_vocab_size == config.vocab_size);
  }
}

// `weights`: DecoderWeights, const or not, after size_weights.
template <class Weights, class Visitor>
void visit_weights(const DecoderConfig& config, Weights& weights, Visitor& visit) {
  const DrafterConfig* drafter = config.drafter ? &*config.drafter : nullptr;
  if (drafter == nullptr || drafter->owns_embedding) {
    visit.table(weights.embed, {"embed", config.vocab_size}, config.hidden);
  }
  visit.linear(weights.lm_head,
               {.name = "lm_head",
                .parts = {{"lm_head", config.lm_head_rows()}},
                .cols = config.hidden,
                .shard = ShardAxis::kRows,
                .rows = LinearRows::kLogits,
                .has_float_output = true,
                .is_owned = drafter != nullptr ? drafter->owns_lm_head : !config.ties_lm_head});
  if (drafter == nullptr || drafter->has_final_norm) {
    visit.vector(weights.final_norm, VectorKind::kNorm, {{"final_norm", config.hidden}});
  }
  visit_stream_mix(config, "end_mix", /*is_end=*/true, weights.end_mix, visit);
  if (const PerLayerInputsConfig& inputs = config.per_layer_inputs; inputs.size > 0) {
    const int64_t width = inputs.size * static_cast<int64_t>(config.layers.size());
    visit.table(weights.per_layer_embed, {"per_layer.embed", inputs.vocab_size}, width);
    visit.linear(
        weights.per_layer_proj,
        {.name = "per_layer.proj", .parts = {{"per_layer.proj", width}}, .cols = config.hidden});
    visit.vector(weights.per_layer_norm, VectorKind::kNorm, {{"per_layer.norm", inputs.size}});
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    visit_layer_weights(config, i, weights.layers[i], visit);
  }
  if (drafter != nullptr) visit_head_weights(config, weights.head, visit);
}

// The visitor that sees matrices of products only.
template <class Function>
struct LinearVisitor {
  const Function& f;
  void linear(auto& linear, const LinearShape& shape) { f(linear, shape); }
  void experts(auto& experts, const LinearShape& shape) { f(experts, shape); }
  void vector(const auto&, VectorKind, const std::vector<WeightPart>&) {}
  void table(const auto&, const WeightPart&, int64_t) {}
  void floats(const auto&, const WeightPart&, int64_t) {}
  void experts_of_tokens(const auto&, const WeightPart&, int32_t, int32_t) {}
  void tokens(const auto&, const WeightPart&, bool) {}
};

// Calls f(linear, shape) for every Linear and every ExpertLinears. An lm_head that the target owns
// has no data.
template <class Weights, class Function>
void for_each_linear(const DecoderConfig& config, Weights& weights, const Function& f) {
  LinearVisitor<Function> visitor{f};
  visit_weights(config, weights, visitor);
}

// Gives the vectors of `weights` the sizes, and attention and MLPs the kinds, that `config` asks
// for.
void size_weights(const DecoderConfig& config, DecoderWeights& weights);

}  // namespace paceline
