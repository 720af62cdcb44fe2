// SPDX-License-Identifier: Apache-2.0
#include "model/decoder_config.h"

#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/json.h"
#include "model/visit_weights.h"

namespace paceline {
namespace {

// Larger than those of any known model, and small enough that row counts and products of two sizes
// fit the int32 or int64 that holds them.
constexpr int64_t kMaxVocab = int64_t{1} << 23;  // sample/logits.h: kMaxTruncatedVocab
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr int64_t kMaxIntermediate = int64_t{1} << 24;
constexpr int64_t kMaxPosition = int64_t{1} << 30;
constexpr int64_t kMaxHeads = int64_t{1} << 12;
constexpr int64_t kMaxHeadDim = int64_t{1} << 12;
constexpr int64_t kMaxPerLayerSize = int64_t{1} << 14;  // times kMaxLayers it fits an int32
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxRopes = 256;
constexpr int64_t kMaxAuxLayers = 16;
constexpr size_t kMaxNameBytes = 256;
constexpr double kMaxFrequency = 1e6;  // times kMaxPosition it is far below FLT_MAX

[[nodiscard]] int32_t read_int(const Json& object, std::string_view key, int64_t low,
                               int64_t high) {
  return static_cast<int32_t>(object.at(key).as_int(low, high));
}

[[nodiscard]] float read_float(const Json& number, double low, double high) {
  const double value = number.as_double();
  if (!(value >= low && value <= high)) number.refuse(concat("a number from ", low, " to ", high));
  return static_cast<float>(value);
}

[[nodiscard]] float read_finite(const Json& number) {
  constexpr double kMax = std::numeric_limits<float>::max();
  return read_float(number, -kMax, kMax);
}

[[nodiscard]] float read_positive(const Json& number) {
  const float value = read_finite(number);
  if (!(value > 0)) number.refuse("a number above 0 that a float32 holds");
  return value;
}

[[nodiscard]] float read_cap(const Json& number) {
  const float value = read_finite(number);
  if (value < 0) number.refuse("0 for no cap, or a number above 0");
  return value;
}

[[nodiscard]] RopeConfig read_rope(const Json& json) {
  constexpr std::array<std::string_view, 2> kKeys = {"inv_freq", "scale"};
  json.check_keys(kKeys);
  RopeConfig rope;
  const Json frequencies = json.at("inv_freq");
  if (frequencies.kind() != JsonKind::kList || frequencies.size() < 1 ||
      frequencies.size() > kMaxHeadDim / 2) {
    frequencies.refuse(concat("a list of 1 to ", kMaxHeadDim / 2, " numbers, head_dim / 2"));
  }
  for (const Json& frequency : frequencies.elements()) {
    rope.inv_freq.push_back(read_float(frequency, 0, kMaxFrequency));
  }
  rope.scale = read_positive(json.at("scale"));
  return rope;
}

[[nodiscard]] bool read_switch(const Json& object, std::string_view key) {
  const std::optional<Json> value = object.find(key);
  return value && value->as_bool();
}

// The index of an earlier layer that has KV of its own, of the same shape.
[[nodiscard]] int32_t read_kv_source(const Json& source, const AttentionConfig& reader,
                                     const std::vector<LayerConfig>& earlier) {
  const auto num_earlier = static_cast<int64_t>(earlier.size());
  if (num_earlier == 0) source.refuse("no such key in the first layer");
  const auto index = static_cast<int32_t>(source.as_int(0, num_earlier - 1));
  const AttentionConfig& owner = earlier[static_cast<size_t>(index)].attention;
  if (owner.kv_source >= 0) {
    source.refuse(concat("a layer with KV of its own; layer ", index, " reads that of layer ",
                         owner.kv_source));
  }
  if (reader.kind != owner.kind || reader.num_kv_heads != owner.num_kv_heads ||
      reader.head_dim != owner.head_dim) {
    source.refuse(concat(
        "a layer of the same kind, window, num_kv_heads and head_dim; layer ", index, " has '",
        kv_kind_name(owner.kind), "', ", reported_window(owner.kind), ", ", owner.num_kv_heads,
        " and ", owner.head_dim, ", this one '", kv_kind_name(reader.kind), "', ",
        reported_window(reader.kind), ", ", reader.num_kv_heads, " and ", reader.head_dim));
  }
  return index;
}

// The "kind" and the "window" of a layer's attention.
[[nodiscard]] KvKind read_kv_kind(const Json& json) {
  const Json kind = json.at("kind");
  if (kind.as_string() == "sliding") return SlidingKv{read_int(json, "window", 1, kMaxPosition)};
  if (kind.as_string() != "full") kind.refuse("'full', 'sliding'");
  static_cast<void>(read_int(json, "window", 0, 0));
  return FullKv{};
}

[[nodiscard]] AttentionConfig read_attention(const Json& json, const std::vector<RopeConfig>& ropes,
                                             const std::vector<LayerConfig>& earlier,
                                             bool reads_target) {
  constexpr std::array<std::string_view, 11> kKeys = {
      "kind",     "window", "num_qo_heads", "num_kv_heads", "head_dim",  "scale",
      "soft_cap", "rope",   "has_qk_norm",  "has_qkv_bias", "has_o_bias"};
  constexpr std::array<std::string_view, 4> kOptional = {"has_v_norm", "k_eq_v", "kv_source",
                                                         "reads_target"};
  json.check_keys(kKeys, kOptional);
  AttentionConfig attention;
  attention.kind = read_kv_kind(json);
  attention.num_qo_heads = read_int(json, "num_qo_heads", 1, kMaxHeads);
  attention.num_kv_heads = read_int(json, "num_kv_heads", 1, attention.num_qo_heads);
  if (attention.num_qo_heads % attention.num_kv_heads != 0) {
    json.at("num_kv_heads").refuse(concat("divisors of num_qo_heads, ", attention.num_qo_heads));
  }
  attention.head_dim = read_int(json, "head_dim", 2, kMaxHeadDim);
  if (attention.head_dim % 2 != 0) json.at("head_dim").refuse("an even number");
  attention.scale = read_positive(json.at("scale"));
  attention.soft_cap = read_cap(json.at("soft_cap"));
  attention.rope = read_int(json, "rope", 0, static_cast<int64_t>(ropes.size()) - 1);
  const size_t num_frequencies = ropes[static_cast<size_t>(attention.rope)].inv_freq.size();
  if (num_frequencies != static_cast<size_t>(attention.head_dim / 2)) {
    json.at("rope").refuse(concat("a rope with ", attention.head_dim / 2,
                                  " inv_freq, head_dim / 2;"
                                  " this one has ",
                                  num_frequencies));
  }
  attention.has_qk_norm = json.at("has_qk_norm").as_bool();
  attention.has_qkv_bias = json.at("has_qkv_bias").as_bool();
  attention.has_o_bias = json.at("has_o_bias").as_bool();
  attention.has_v_norm = read_switch(json, "has_v_norm");
  attention.k_eq_v = read_switch(json, "k_eq_v");
  if (const std::optional<Json> source = json.find("kv_source")) {
    attention.kv_source = read_kv_source(*source, attention, earlier);
    // These keys describe a layer's own KV, so with a kv_source they can only be a mistake.
    for (const std::string_view key : {"has_v_norm", "k_eq_v"}) {
      if (read_switch(json, key)) json.at(key).refuse("false where there is a kv_source");
    }
  }
  attention.reads_target = read_switch(json, "reads_target");
  if (attention.reads_target != reads_target) {
    const Json where = attention.reads_target ? json.at("reads_target") : json;
    where.refuse(reads_target ? "reads_target true in every layer of a drafter of kind "
                                "'gemma4_mtp'"
                              : "false outside of a drafter of kind 'gemma4_mtp'");
  }
  for (const std::string_view key : {"has_v_norm", "k_eq_v"}) {
    if (reads_target && read_switch(json, key)) json.at(key).refuse("false with reads_target");
  }
  if (reads_target && attention.kv_source >= 0) {
    json.at("kv_source").refuse("no such key with reads_target");
  }
  return attention;
}

[[nodiscard]] Activation read_activation(const Json& activation) {
  if (activation.as_string() == "gelu_tanh") return Activation::kGeluTanh;
  if (activation.as_string() != "silu") activation.refuse("'silu', 'gelu_tanh'");
  return Activation::kSilu;
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
  inputs.activation = read_activation(json.at("activation"));
  return inputs;
}

[[nodiscard]] MlpConfig read_mlp(const Json& json) {
  constexpr std::array<std::string_view, 3> kKeys = {"intermediate", "activation", "has_bias"};
  json.check_keys(kKeys);
  MlpConfig mlp;
  mlp.intermediate = read_int(json, "intermediate", 1, kMaxIntermediate);
  mlp.activation = read_activation(json.at("activation"));
  mlp.has_bias = json.at("has_bias").as_bool();
  return mlp;
}

[[nodiscard]] std::vector<int32_t> read_aux_layers(const Json& json) {
  if (json.kind() != JsonKind::kList || json.size() < 1 || json.size() > kMaxAuxLayers) {
    json.refuse(concat("a list of 1 to ", kMaxAuxLayers, " layers of the target"));
  }
  std::vector<int32_t> layers;
  for (const Json& layer : json.elements()) {
    layers.push_back(static_cast<int32_t>(layer.as_int(0, kMaxLayers - 1)));
    if (layers.size() > 1 && layers.back() <= layers[layers.size() - 2]) {
      layer.refuse("layers in ascending order");
    }
  }
  return layers;
}

[[nodiscard]] CentroidsConfig read_centroids(const Json& json, int32_t num_tokens) {
  constexpr std::array<std::string_view, 2> kKeys = {"count", "top"};
  json.check_keys(kKeys);
  CentroidsConfig centroids;
  centroids.count = read_int(json, "count", 1, num_tokens);
  if (num_tokens % centroids.count != 0) {
    json.at("count").refuse(concat("divisors of draft_vocab_size, ", num_tokens));
  }
  centroids.top = read_int(json, "top", 1, centroids.count);
  return centroids;
}

// `hidden` and `vocab_size` are those of the draft head.
[[nodiscard]] DrafterConfig read_drafter(const Json& json, int32_t hidden, int32_t vocab_size) {
  constexpr std::array<std::string_view, 12> kKeys = {
      "kind",           "target_hidden_size", "norm_before_residual", "norm_before_fc",
      "fc_norm",        "norm_output",        "has_fc_bias",          "has_attn_norm",
      "has_final_norm", "owns_embedding",     "owns_lm_head",         "draft_vocab_size"};
  constexpr std::array<std::string_view, 1> kEagle3Keys = {"aux_layers"};
  constexpr std::array<std::string_view, 1> kGemma4MtpKeys = {"centroids"};
  DrafterConfig drafter;
  const Json kind = json.at("kind");
  std::span<const std::string_view> optional;
  if (kind.as_string() == "eagle3") {
    drafter.kind = DrafterKind::kEagle3;
    optional = kEagle3Keys;
  } else if (kind.as_string() == "gemma4_mtp") {
    drafter.kind = DrafterKind::kGemma4Mtp;
    optional = kGemma4MtpKeys;
  } else if (kind.as_string() != "eagle") {
    kind.refuse("'eagle', 'eagle3', 'gemma4_mtp'");
  }
  const bool is_eagle3 = drafter.kind == DrafterKind::kEagle3;
  const bool is_gemma4_mtp = drafter.kind == DrafterKind::kGemma4Mtp;
  json.check_keys(kKeys, optional);
  drafter.target_hidden = read_int(json, "target_hidden_size", 1, kMaxHidden);
  if (drafter.kind == DrafterKind::kEagle && drafter.target_hidden != hidden) {
    json.at("target_hidden_size")
        .refuse(concat(hidden,
                       ", the hidden_size of this draft head: kind 'eagle' feeds its own "
                       "output back instead of the target's"));
  }
  if (is_eagle3) drafter.aux_layers = read_aux_layers(json.at("aux_layers"));
  // For keys that only EAGLE-3 may set.
  const auto read_eagle3_bool = [&](const char* key) {
    const bool value = json.at(key).as_bool();
    if (value && !is_eagle3) {
      json.at(key).refuse(concat("false where kind is '", kind.as_string(), "'"));
    }
    return value;
  };
  drafter.norm_before_residual = read_eagle3_bool("norm_before_residual");
  drafter.norm_before_fc = read_eagle3_bool("norm_before_fc");
  drafter.has_fc_norm = read_eagle3_bool("fc_norm");
  if (drafter.has_fc_norm && drafter.norm_before_fc) {
    json.at("fc_norm").refuse("false where norm_before_fc is true");
  }
  drafter.norm_output = read_eagle3_bool("norm_output");
  drafter.has_fc_bias = json.at("has_fc_bias").as_bool();
  // For keys that only EAGLE may leave false.
  const auto read_needed_bool = [&](const char* key) {
    const bool value = json.at(key).as_bool();
    if (!value && drafter.kind != DrafterKind::kEagle) {
      json.at(key).refuse(concat("true where kind is '", kind.as_string(), "'"));
    }
    return value;
  };
  drafter.has_attn_norm = read_needed_bool("has_attn_norm");
  drafter.has_final_norm = read_needed_bool("has_final_norm");
  drafter.owns_embedding = json.at("owns_embedding").as_bool();
  drafter.owns_lm_head = json.at("owns_lm_head").as_bool();
  drafter.draft_vocab_size = read_int(json, "draft_vocab_size", 1, kMaxVocab);
  if (!drafter.owns_lm_head && drafter.draft_vocab_size != vocab_size) {
    json.at("draft_vocab_size")
        .refuse(concat(vocab_size, ", the vocab_size, where owns_lm_head is false"));
  }
  if (is_gemma4_mtp) {
    // It uses the target's embeddings, in the target's width.
    if (drafter.owns_embedding)
      json.at("owns_embedding").refuse("false where kind is 'gemma4_mtp'");
    if (!drafter.owns_lm_head) json.at("owns_lm_head").refuse("true where kind is 'gemma4_mtp'");
    if (const std::optional<Json> centroids = json.find("centroids")) {
      drafter.centroids = read_centroids(*centroids, drafter.draft_vocab_size);
    }
  }
  return drafter;
}

// Counts weights in float32, and refuses so many that code which adds the sizes of regions could
// overflow: 2^60 bytes leave room for alignment.
class ByteLimit {
 public:
  explicit ByteLimit(const DecoderConfig& config) : config_(config) {}

  void linear(const Linear&, const LinearShape& shape) {
    if (shape.is_owned) add(shape.num_rows(), shape.cols);
  }
  void vector(const float*, VectorKind, const std::vector<WeightPart>& parts) {
    for (const WeightPart& part : parts) add(part.rows, 1);
  }
  void table(const std::byte*, const WeightPart& part, int64_t cols) { add(part.rows, cols); }
  void tokens(const int32_t*, const WeightPart& part, bool) { add(part.rows, 1); }

 private:
  void add(int64_t rows, int64_t cols) {
    constexpr int64_t kMaxBytes = int64_t{1} << 60;
    const int64_t bytes = checked_mul(checked_mul(rows, cols), 4);
    if (bytes > kMaxBytes - total_) {
      throw InvalidArgument(concat("decoder config: layers is a list of ", config_.layers.size(),
                                   ", hidden_size is ", config_.hidden, " and vocab_size is ",
                                   config_.vocab_size, ": the weights take more than ", kMaxBytes,
                                   " bytes; allowed: smaller sizes or fewer layers"));
    }
    total_ += bytes;
  }

  const DecoderConfig& config_;
  int64_t total_ = 0;
};

void check_weight_bytes(const DecoderConfig& config) {
  DecoderWeights no_weights;
  size_weights(config, no_weights);
  ByteLimit limit(config);
  visit_weights(config, no_weights, limit);
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
  constexpr std::array<std::string_view, 3> kOptional = {"has_layer_scale", "per_layer_inputs",
                                                         "drafter"};
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

  const Json ropes = root.at("ropes");
  if (ropes.kind() != JsonKind::kList || ropes.size() < 1 || ropes.size() > kMaxRopes) {
    ropes.refuse(concat("a list of 1 to ", kMaxRopes));
  }
  for (const Json& rope : ropes.elements()) config.ropes.push_back(read_rope(rope));

  const Json layers = root.at("layers");
  if (layers.kind() != JsonKind::kList || layers.size() < 1 || layers.size() > kMaxLayers) {
    layers.refuse(concat("a list of 1 to ", kMaxLayers));
  }
  constexpr std::array<std::string_view, 2> kLayerKeys = {"attention", "mlp"};
  const bool reads_target = config.drafter && config.drafter->kind == DrafterKind::kGemma4Mtp;
  for (const Json& layer : layers.elements()) {
    layer.check_keys(kLayerKeys);
    config.layers.push_back(
        {read_attention(layer.at("attention"), config.ropes, config.layers, reads_target),
         read_mlp(layer.at("mlp"))});
  }
  check_weight_bytes(config);
  return config;
}

}  // namespace paceline
