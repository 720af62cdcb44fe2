// SPDX-License-Identifier: Apache-2.0
#include "model/description/decoder_config.h"

#include <array>
#include <optional>

#include "model/description/config_reading.h"
#include "ops/streams.h"

namespace paceline {
namespace {

[[nodiscard]] RopeConfig read_rope(const Json& json) {
  constexpr std::array<std::string_view, 2> kKeys = {"inv_freq", "scale"};
  constexpr std::array<std::string_view, 1> kOptional = {"interleaved"};
  json.check_keys(kKeys, kOptional);
  RopeConfig rope;
  const Json frequencies = json.at("inv_freq");
  if (frequencies.kind() != JsonKind::kList || frequencies.size() < 1 ||
      frequencies.size() > kMaxHeadDim / 2) {
    frequencies.refuse(
        concat("a list of 1 to ", kMaxHeadDim / 2, " numbers, one for each pair of elements"));
  }
  for (const Json& frequency : frequencies.elements()) {
    rope.inv_freq.push_back(read_float(frequency, 0, kMaxFrequency));
  }
  rope.scale = read_positive(json.at("scale"));
  rope.is_interleaved = read_switch(json, "interleaved");
  return rope;
}

[[nodiscard]] PerLayerInputsConfig read_per_layer_inputs(const Json& json) {
  constexpr std::array<std::string_view, 6> kKeys = {"size",       "vocab_size", "embed_scale",
                                                     "proj_scale", "scale",      "activation"};
  json.check_keys(kKeys);
  PerLayerInputsConfig inputs;
  inputs.size = read_int(json, "size", 1, kMaxPerLayerSize);
  inputs.vocab_size = read_int(json, "vocab_size", 1, kMaxVocab);
  inputs.embed_scale = read_positive(json.at("embed_scale"));
  inputs.proj_scale = read_positive(json.at("proj_scale"));
  inputs.scale = read_positive(json.at("scale"));
  inputs.activation = read_activation(json.at("activation"), /*allows_limits=*/false);
  return inputs;
}

[[nodiscard]] StreamsConfig read_streams_config(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 3> kKeys = {"count", "sinkhorn_iterations", "eps"};
  json.check_keys(kKeys);
  StreamsConfig streams;
  streams.count = read_int(json, "count", 2, kMaxStreams);
  streams.sinkhorn_iterations = read_int(json, "sinkhorn_iterations", 1, kMaxSinkhornIterations);
  streams.eps = read_positive(json.at("eps"));
  // The ops that read and write streams support none of these.
  const auto refuse = [&](const char* key) { json.refuse(concat("no such key with ", key)); };
  if (config.has_post_norms) refuse("has_post_norms");
  if (config.has_layer_scale) refuse("has_layer_scale");
  if (config.per_layer_inputs.size > 0) refuse("per_layer_inputs");
  if (config.norm_weight_offset != 0) refuse("a norm_weight_offset other than 0");
  const bool may_draft = !config.drafter || config.drafter->kind == DrafterKind::kMtp ||
                         config.drafter->kind == DrafterKind::kBlock;
  if (!may_draft) refuse("a drafter of another kind than 'mtp', 'dflash' and 'dspark'");
  if (config.drafter && config.drafter->block.conv.is_used()) refuse("a convolution");
  if (config.drafter && config.drafter->norm_output) refuse("norm_output in the drafter");
  if (config.drafter && config.drafter->has_fc_bias) refuse("has_fc_bias in the drafter");
  return streams;
}

// The convolution of a block drafter is between norms, branches and one residual stream.
void check_convolved(const DecoderConfig& config, const Json& root) {
  const auto refuse = [&](const char* key) {
    root.at(key).refuse("no such value in a drafter of kind 'dflash2'");
  };
  if (config.has_post_norms) refuse("has_post_norms");
  if (config.has_layer_scale) refuse("has_layer_scale");
  if (config.per_layer_inputs.size > 0) refuse("per_layer_inputs");
  size_t index = 0;
  for (const Json& layer : root.at("layers").elements()) {
    const LayerConfig& read = config.layers[index++];
    // Its last op is joined with the norm that follows.
    if (std::visit([](const auto& mlp) { return mlp.has_experts(); }, read.mlp)) {
      layer.at("mlp").refuse("no mixture of experts in a drafter of kind 'dflash2'");
    }
  }
}

// The context of a block drafter is keys and values of plain weights.
void check_block_layers(const DecoderConfig& config, const Json& layers) {
  size_t index = 0;
  for (const Json& layer : layers.elements()) {
    const LayerConfig& read = config.layers[index++];
    const bool writes_context = std::visit(
        [](const auto& attention) { return attention.writes_context(); }, read.attention);
    if (writes_context) continue;
    layer.at("attention")
        .refuse(
            "multi-head attention with keys and values of its own and qkv in plain format, or "
            "compressed attention without a compressor, in a drafter of kind 'dflash', 'dflash2' "
            "or "
            "'dspark'");
  }
}

}  // namespace

DecoderConfig parse_decoder_config(std::string_view json) {
  const JsonDocument document(json, "decoder config");
  const Json root = document.root();
  constexpr std::array<std::string_view, 13> kKeys = {
      "format",         "name",         "vocab_size",         "hidden_size",
      "max_position",   "norm_eps",     "norm_weight_offset", "embed_scale",
      "logit_soft_cap", "ties_lm_head", "has_post_norms",     "ropes",
      "layers"};
  constexpr std::array<std::string_view, 5> kOptional = {"has_layer_scale", "per_layer_inputs",
                                                         "drafter", "streams", "logit_scale"};
  root.check_keys(kKeys, kOptional);
  if (root.at("format").as_string() != "paceline-decoder-1") {
    root.at("format").refuse("'paceline-decoder-1'");
  }

  DecoderConfig config;
  config.name = root.at("name").as_string();
  if (config.name.empty() || config.name.size() > kMaxNameBytes) {
    root.at("name").refuse(concat("1 to ", kMaxNameBytes, " bytes"));
  }
  config.vocab_size = read_int(root, "vocab_size", 1, kMaxVocab);
  config.hidden = read_int(root, "hidden_size", 1, kMaxHidden);
  config.max_position = read_int(root, "max_position", 1, kMaxPosition);
  config.norm_eps = read_positive(root.at("norm_eps"));
  config.norm_weight_offset = read_finite(root.at("norm_weight_offset"));
  if (config.norm_weight_offset != 0 && config.norm_weight_offset != 1) {
    root.at("norm_weight_offset").refuse("0, 1");
  }
  config.embed_scale = read_positive(root.at("embed_scale"));
  if (const std::optional<Json> scale = root.find("logit_scale")) {
    config.logit_scale = read_positive(*scale);
  }
  config.logit_soft_cap = read_cap(root.at("logit_soft_cap"));
  config.ties_lm_head = root.at("ties_lm_head").as_bool();
  config.has_post_norms = root.at("has_post_norms").as_bool();
  config.has_layer_scale = read_switch(root, "has_layer_scale");
  if (const std::optional<Json> inputs = root.find("per_layer_inputs")) {
    config.per_layer_inputs = read_per_layer_inputs(*inputs);
  }
  if (const std::optional<Json> drafter = root.find("drafter")) {
    config.drafter = read_drafter(*drafter, config.hidden, config.vocab_size);
    if (config.ties_lm_head) {
      root.at("ties_lm_head").refuse("false with a drafter, whose owns_lm_head says whose it is");
    }
  }

  if (const std::optional<Json> streams = root.find("streams")) {
    config.streams = read_streams_config(*streams, config);
  }
  if (config.streams.count == 1 && config.drafter) {
    const Json drafter = root.at("drafter");
    if (config.drafter->fc.format != WeightFormat::kPlain) {
      drafter.at("fc").refuse("no such key without streams");
    }
    if (config.drafter->block.confidence_before_norm) {
      drafter.at("block").at("confidence").at("before_norm").refuse("false without streams");
    }
  }

  const Json ropes = root.at("ropes");
  if (ropes.kind() != JsonKind::kList || ropes.size() < 1 || ropes.size() > kMaxRopes) {
    ropes.refuse(concat("a list of 1 to ", kMaxRopes));
  }
  for (const Json& rope : ropes.elements()) config.ropes.push_back(read_rope(rope));

  const Json layers = root.at("layers");
  if (layers.kind() != JsonKind::kList || layers.size() < 1 || layers.size() > kMaxLayers) {
    layers.refuse(concat("a list of 1 to ", kMaxLayers));
  }
  for (const Json& layer : layers.elements()) config.layers.push_back(read_layer(layer, config));
  if (config.drafter && config.drafter->kind == DrafterKind::kBlock) {
    check_block_layers(config, layers);
    if (config.drafter->block.conv.is_used()) check_convolved(config, root);
  }
  return config;
}

}  // namespace paceline
