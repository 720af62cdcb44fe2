// SPDX-License-Identifier: Apache-2.0

// The key "layers" of a decoder description: attention, MLPs and the formats of their matrices.

#include <algorithm>
#include <array>
#include <optional>

#include "model/description/config_reading.h"
#include "ops/compressed.h"
#include "ops/latent.h"

namespace paceline {
namespace {

// Rows of experts' matrices then begin at 16 bytes and matrices at 64 bytes, without padding.
constexpr int32_t kExpertAlignment = 8;

// The index of an earlier layer that has KV of its own, of the same shape.
[[nodiscard]] int32_t read_kv_source(const Json& source, const MultiHeadAttention& reader,
                                     const std::vector<LayerConfig>& earlier) {
  const auto num_earlier = static_cast<int64_t>(earlier.size());
  if (num_earlier == 0) source.refuse("no such key in the first layer");
  const auto index = static_cast<int32_t>(source.as_int(0, num_earlier - 1));
  const MultiHeadAttention* const found =
      std::get_if<MultiHeadAttention>(&earlier[static_cast<size_t>(index)].attention);
  if (found == nullptr) {
    const bool is_latent =
        std::holds_alternative<LatentAttention>(earlier[static_cast<size_t>(index)].attention);
    source.refuse(concat("a layer of the same kind; layer ", index, " has ",
                         is_latent ? "latent" : "compressed", " attention"));
  }
  const MultiHeadAttention& owner = *found;
  if (owner.kv_source >= 0) {
    source.refuse(concat("a layer with KV of its own; layer ", index, " reads that of layer ",
                         owner.kv_source));
  }
  if (reader.kind != owner.kind || reader.num_kv_heads != owner.num_kv_heads ||
      reader.head_dim != owner.head_dim) {
    source.refuse(concat("a layer of the same kind, window, num_kv_heads and head_dim; layer ",
                         index, " has '", kv_kind_name(owner.kind), "', ", kv_window(owner.kind),
                         ", ", owner.num_kv_heads, " and ", owner.head_dim, ", this one '",
                         kv_kind_name(reader.kind), "', ", kv_window(reader.kind), ", ",
                         reader.num_kv_heads, " and ", reader.head_dim));
  }
  return index;
}

// The "kind" and the "window" of a layer's multi-head attention.
[[nodiscard]] KvKind read_kv_kind(const Json& json) {
  const Json kind = json.at("kind");
  if (kind.as_string() == "sliding") return SlidingKv{read_int(json, "window", 1, kMaxPosition)};
  static_cast<void>(read_int(json, "window", 0, 0));
  return FullKv{};
}

// The index of a rope with a frequency for each pair of `width` elements; `name` is that of the
// width.
[[nodiscard]] int32_t read_rope_index(const Json& json, const std::vector<RopeConfig>& ropes,
                                      int32_t width, std::string_view name,
                                      bool allows_interleaved) {
  const int32_t index = read_int(json, "rope", 0, static_cast<int64_t>(ropes.size()) - 1);
  const RopeConfig& rope = ropes[static_cast<size_t>(index)];
  if (rope.inv_freq.size() != static_cast<size_t>(width / 2)) {
    json.at("rope").refuse(concat("a rope with ", width / 2, " inv_freq, ", name,
                                  " / 2; this one has ", rope.inv_freq.size()));
  }
  if (rope.is_interleaved && !allows_interleaved) {
    json.at("rope").refuse(
        "a rope that is not interleaved, unless kind is 'latent' or 'compressed'");
  }
  return index;
}

[[nodiscard]] LatentAttention read_latent_attention(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 9> kKeys = {
      "kind",       "num_qo_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
      "v_head_dim", "scale",        "rope",         "latent_norm_eps"};
  constexpr std::array<std::string_view, 4> kOptional = {"q_lora_rank", "qkv_a", "q_b", "o"};
  if (config.drafter && config.drafter->kind == DrafterKind::kGemma4Mtp) {
    json.at("kind").refuse("'full', 'sliding' in a drafter of kind 'gemma4_mtp'");
  }
  json.check_keys(kKeys, kOptional);
  LatentAttention attention;
  attention.num_qo_heads = read_int(json, "num_qo_heads", 1, kMaxHeads);
  if (json.find("q_lora_rank")) {
    attention.q_lora_rank = read_int(json, "q_lora_rank", 1, kMaxHidden);
  }
  attention.kv_lora_rank = read_int(json, "kv_lora_rank", 1, kMaxLatentRank);
  attention.qk_nope_head_dim = read_int(json, "qk_nope_head_dim", 1, kMaxHeadDim);
  attention.qk_rope_head_dim = read_int(json, "qk_rope_head_dim", 2, kMaxHeadDim);
  if (attention.qk_rope_head_dim % 2 != 0) {
    json.at("qk_rope_head_dim").refuse("an even number");
  }
  attention.v_head_dim = read_int(json, "v_head_dim", 1, kMaxHeadDim);
  attention.scale = read_positive(json.at("scale"));
  attention.norm_eps = read_positive(json.at("latent_norm_eps"));
  attention.rope = read_rope_index(json, config.ropes, attention.qk_rope_head_dim,
                                   "qk_rope_head_dim", /*allows_interleaved=*/true);
  attention.qkv_a =
      read_format(json, "qkv_a", {"hidden_size", config.qkv_inputs(config.layers.size())},
                  /*is_of_experts=*/false);
  if (attention.q_lora_rank == 0 && json.find("q_b")) {
    json.at("q_b").refuse("no such key without a q_lora_rank");
  }
  attention.q_b = read_format(json, "q_b", {"q_lora_rank", attention.q_lora_rank},
                              /*is_of_experts=*/false);
  attention.o = read_format(
      json, "o",
      {"num_qo_heads * v_head_dim", int64_t{attention.num_qo_heads} * attention.v_head_dim},
      /*is_of_experts=*/false);
  return attention;
}

[[nodiscard]] CompressorConfig read_compressor(const Json& json) {
  constexpr std::array<std::string_view, 2> kKeys = {"tokens_per_entry", "overlaps"};
  json.check_keys(kKeys);
  return {.tokens_per_entry = read_int(json, "tokens_per_entry", 2, kMaxTokensPerEntry),
          .overlaps = json.at("overlaps").as_bool()};
}

[[nodiscard]] IndexerConfig read_indexer(const Json& json, const CompressedAttention& attention,
                                         int32_t max_position) {
  constexpr std::array<std::string_view, 3> kKeys = {"num_heads", "head_dim", "top_k"};
  constexpr std::array<std::string_view, 1> kOptional = {"q"};
  json.check_keys(kKeys, kOptional);
  IndexerConfig indexer;
  indexer.num_heads = read_int(json, "num_heads", 1, kMaxHeads);
  // Rows of projections then begin at 16 bytes.
  if (indexer.num_heads % 4 != 0) json.at("num_heads").refuse("a multiple of 4");
  indexer.head_dim = read_int(json, "head_dim", attention.rope_head_dim, kMaxCompressedHeadDim);
  if (indexer.head_dim % 2 != 0) json.at("head_dim").refuse("an even number");
  indexer.top_k = read_int(json, "top_k", 1, kMaxIndexTopK);
  const int32_t num_entries = max_position / attention.compressor->tokens_per_entry;
  if (indexer.top_k > num_entries) {
    json.at("top_k").refuse(
        concat("1 to ", num_entries, ", the entries of max_position (", max_position, ") tokens"));
  }
  indexer.q = read_format(json, "q", {"q_lora_rank", attention.q_lora_rank},
                          /*is_of_experts=*/false);
  return indexer;
}

[[nodiscard]] CompressedAttention read_compressed_attention(const Json& json,
                                                            const DecoderConfig& config) {
  constexpr std::array<std::string_view, 10> kKeys = {
      "kind",   "num_qo_heads", "head_dim",    "rope_head_dim", "q_lora_rank",
      "window", "o_groups",     "o_lora_rank", "scale",         "rope"};
  constexpr std::array<std::string_view, 6> kOptional = {"compressor", "indexer", "qkv_a",
                                                         "q_b",        "o_a",     "o_b"};
  if (config.drafter && config.drafter->kind == DrafterKind::kGemma4Mtp) {
    json.at("kind").refuse("'full', 'sliding' in a drafter of kind 'gemma4_mtp'");
  }
  json.check_keys(kKeys, kOptional);
  CompressedAttention attention;
  attention.num_qo_heads = read_int(json, "num_qo_heads", 1, kMaxHeads);
  attention.head_dim = read_int(json, "head_dim", 2, kMaxCompressedHeadDim);
  attention.rope_head_dim = read_int(json, "rope_head_dim", 2, attention.head_dim);
  for (const char* const key : {"head_dim", "rope_head_dim"}) {
    if (json.at(key).as_int(2, kMaxHeadDim) % 2 != 0) json.at(key).refuse("an even number");
  }
  attention.q_lora_rank = read_int(json, "q_lora_rank", 1, kMaxHidden);
  attention.window = read_int(json, "window", 1, kMaxPosition);
  attention.o_groups = read_int(json, "o_groups", 1, attention.num_qo_heads);
  if (attention.num_qo_heads % attention.o_groups != 0) {
    json.at("o_groups").refuse(concat("divisors of num_qo_heads, ", attention.num_qo_heads));
  }
  attention.o_lora_rank = read_int(json, "o_lora_rank", 1, kMaxHidden);
  attention.scale = read_positive(json.at("scale"));
  attention.rope = read_rope_index(json, config.ropes, attention.rope_head_dim, "rope_head_dim",
                                   /*allows_interleaved=*/true);
  const auto format = [&](std::string_view key, const char* width, int64_t columns) {
    return read_format(json, key, {width, columns}, /*is_of_experts=*/false);
  };
  attention.qkv_a = format("qkv_a", "hidden_size", config.hidden);
  attention.q_b = format("q_b", "q_lora_rank", attention.q_lora_rank);
  attention.o_a = format("o_a", "num_qo_heads * head_dim / o_groups", attention.o_group_width());
  attention.o_b = format("o_b", "o_groups * o_lora_rank", attention.o_a_rows());
  if (const std::optional<Json> compressor = json.find("compressor")) {
    attention.compressor = read_compressor(*compressor);
  }
  if (const std::optional<Json> indexer = json.find("indexer")) {
    if (!attention.compressor) indexer->refuse("no such key without a compressor");
    attention.indexer = read_indexer(*indexer, attention, config.max_position);
  }
  return attention;
}

[[nodiscard]] MultiHeadAttention read_multi_head_attention(const Json& json,
                                                           const DecoderConfig& config) {
  constexpr std::array<std::string_view, 11> kKeys = {
      "kind",     "window", "num_qo_heads", "num_kv_heads", "head_dim",  "scale",
      "soft_cap", "rope",   "has_qk_norm",  "has_qkv_bias", "has_o_bias"};
  constexpr std::array<std::string_view, 7> kOptional = {
      "has_v_norm", "k_eq_v", "kv_source", "reads_target", "has_sinks", "qkv", "o"};
  const bool reads_target = config.drafter && config.drafter->kind == DrafterKind::kGemma4Mtp;
  json.check_keys(kKeys, kOptional);
  MultiHeadAttention attention;
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
  attention.rope = read_rope_index(json, config.ropes, attention.head_dim, "head_dim",
                                   /*allows_interleaved=*/false);
  attention.has_qk_norm = json.at("has_qk_norm").as_bool();
  attention.has_qkv_bias = json.at("has_qkv_bias").as_bool();
  attention.has_o_bias = json.at("has_o_bias").as_bool();
  attention.has_v_norm = read_switch(json, "has_v_norm");
  attention.k_eq_v = read_switch(json, "k_eq_v");
  if (const std::optional<Json> source = json.find("kv_source")) {
    attention.kv_source = read_kv_source(*source, attention, config.layers);
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
  attention.has_sinks = read_switch(json, "has_sinks");
  const size_t index = config.layers.size();
  attention.qkv = read_format(json, "qkv", {"hidden_size", config.qkv_inputs(index)},
                              /*is_of_experts=*/false);
  attention.o = read_format(
      json, "o", {"num_qo_heads * head_dim", int64_t{attention.num_qo_heads} * attention.head_dim},
      /*is_of_experts=*/false);
  return attention;
}

[[nodiscard]] AttentionConfig read_attention(const Json& json, const DecoderConfig& config) {
  const Json kind = json.at("kind");
  if (kind.as_string() == "latent") return read_latent_attention(json, config);
  if (kind.as_string() == "compressed") return read_compressed_attention(json, config);
  if (kind.as_string() == "full" || kind.as_string() == "sliding") {
    return read_multi_head_attention(json, config);
  }
  kind.refuse("'full', 'sliding', 'latent', 'compressed'");
}

// The keys that a dense MLP and an expert share.
[[nodiscard]] DenseMlp read_gated_unit(const Json& json, int32_t hidden, bool is_expert) {
  DenseMlp mlp;
  mlp.intermediate = read_int(json, "intermediate", 1, kMaxIntermediate);
  const Json activation = json.at("activation");
  mlp.activation = read_activation(activation, /*allows_limits=*/true);
  const auto read_of = [&](bool is_used, const char* key) {
    if (is_used) return read_positive(json.at(key));
    if (const std::optional<Json> number = json.find(key)) {
      number->refuse(concat("no such key where activation is ", quoted(activation.as_string())));
    }
    return 0.0f;
  };
  const bool is_oai = mlp.activation == Activation::kSwigluOai;
  mlp.alpha = read_of(is_oai, "alpha");
  mlp.limit = read_of(is_oai || mlp.activation == Activation::kClampedSilu, "limit");
  mlp.has_bias = json.at("has_bias").as_bool();
  mlp.gate_up = read_format(json, "gate_up", {"hidden_size", hidden}, is_expert);
  mlp.down = read_format(json, "down", {"intermediate", mlp.intermediate}, is_expert);
  return mlp;
}

[[nodiscard]] DenseMlp read_dense(const Json& json, int32_t hidden) {
  constexpr std::array<std::string_view, 3> kKeys = {"intermediate", "activation", "has_bias"};
  constexpr std::array<std::string_view, 4> kOptional = {"alpha", "limit", "gate_up", "down"};
  json.check_keys(kKeys, kOptional);
  return read_gated_unit(json, hidden, /*is_expert=*/false);
}

[[nodiscard]] RouterRule read_router(const Json& router) {
  if (router.as_string() == "softmax_of_chosen") return RouterRule::kSoftmaxOfChosen;
  if (router.as_string() == "sigmoid") return RouterRule::kSigmoid;
  if (router.as_string() == "sqrt_softplus") return RouterRule::kSqrtSoftplus;
  router.refuse("'softmax_of_chosen', 'sigmoid', 'sqrt_softplus'");
}

[[nodiscard]] ScoreRouting read_score_routing(const Json& json, const MoeMlp& mlp) {
  ScoreRouting routing;
  if (json.find("num_groups") || json.find("top_groups")) {
    routing.num_groups = read_int(json, "num_groups", 1, kMaxExpertGroups);
    const int32_t size = mlp.num_experts / routing.num_groups;
    if (size * routing.num_groups != mlp.num_experts || (size < 2 && routing.num_groups > 1)) {
      json.at("num_groups")
          .refuse(concat("divisors of num_experts, ", mlp.num_experts,
                         ", with at least two experts to a group"));
    }
    routing.top_groups = read_int(json, "top_groups", 1, routing.num_groups);
    if (routing.top_groups * size < mlp.top_k) {
      json.at("top_groups")
          .refuse(concat("groups that together have top_k experts, ", mlp.top_k, "; a group has ",
                         size));
    }
  }
  routing.normalises = read_switch(json, "normalises_weights");
  if (const std::optional<Json> scale = json.find("weight_scale")) {
    routing.scale = read_positive(*scale);
  }
  return routing;
}

[[nodiscard]] MoeMlp read_mixture(const Json& json, int32_t hidden) {
  constexpr std::array<std::string_view, 7> kKeys = {"num_experts",    "top_k",    "intermediate",
                                                     "activation",     "has_bias", "router",
                                                     "has_router_bias"};
  constexpr std::array<std::string_view, 5> kOfScores = {
      "num_groups", "top_groups", "normalises_weights", "weight_scale", "has_token_experts"};
  constexpr std::array<std::string_view, 13> kOptional = {
      "alpha",      "limit",      "interleaved", "transposed", "gate_up",    "down",  "per_expert",
      kOfScores[0], kOfScores[1], kOfScores[2],  kOfScores[3], kOfScores[4], "shared"};
  json.check_keys(kKeys, kOptional);
  MoeMlp mlp;
  mlp.num_experts = read_int(json, "num_experts", 1, kMaxExperts);
  mlp.top_k = read_int(json, "top_k", 1, std::min(mlp.num_experts, kMaxTopK));
  if (hidden % kExpertAlignment != 0) {
    json.at("num_experts")
        .refuse(concat("no such key unless hidden_size is a multiple of ", kExpertAlignment,
                       "; it is ", hidden));
  }
  mlp.expert = read_gated_unit(json, hidden, /*is_expert=*/true);
  if (mlp.expert.intermediate % kExpertAlignment != 0) {
    json.at("intermediate").refuse(concat("a multiple of ", kExpertAlignment));
  }
  mlp.router = read_router(json.at("router"));
  switch (mlp.router) {
    case RouterRule::kSoftmaxOfChosen:
      for (const std::string_view key : kOfScores) {
        if (const std::optional<Json> value = json.find(key)) {
          value->refuse("no such key where router is 'softmax_of_chosen'");
        }
      }
      break;
    case RouterRule::kSigmoid:
    case RouterRule::kSqrtSoftplus:
      mlp.scoring = read_score_routing(json, mlp);
      mlp.has_token_experts = read_switch(json, "has_token_experts");
      break;
  }
  if (mlp.has_token_experts &&
      (mlp.router != RouterRule::kSqrtSoftplus || mlp.scoring.num_groups > 1)) {
    json.at("has_token_experts")
        .refuse("true only where router is 'sqrt_softplus', without groups");
  }
  mlp.has_router_bias = json.at("has_router_bias").as_bool();
  mlp.is_interleaved = read_switch(json, "interleaved");
  mlp.is_transposed = read_switch(json, "transposed");
  mlp.is_per_expert = read_switch(json, "per_expert");
  for (const std::string_view key : {"gate_up", "down"}) {
    if (mlp.is_transposed && json.find(key)) {
      json.at(key).refuse("no such key with transposed, which is for plain tensors");
    }
  }
  for (const std::string_view key : {"interleaved", "transposed", "has_bias"}) {
    if (mlp.is_per_expert && read_switch(json, key)) json.at(key).refuse("false with per_expert");
  }
  if (const std::optional<Json> shared = json.find("shared")) {
    mlp.shared = read_dense(*shared, hidden);
  }
  return mlp;
}

[[nodiscard]] MlpConfig read_mlp(const Json& json, const DecoderConfig& config) {
  if (json.find("num_experts") || json.find("top_k")) return read_mixture(json, config.hidden);
  return read_dense(json, config.hidden);
}

}  // namespace

Activation read_activation(const Json& activation, bool allows_limits) {
  const std::string_view name = activation.as_string();
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "swiglu_oai" && allows_limits) return Activation::kSwigluOai;
  if (name == "clamped_silu" && allows_limits) return Activation::kClampedSilu;
  activation.refuse(allows_limits ? "'silu', 'gelu_tanh', 'swiglu_oai', 'clamped_silu'"
                                  : "'silu', 'gelu_tanh'");
}

LayerConfig read_layer(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 2> kKeys = {"attention", "mlp"};
  json.check_keys(kKeys);
  return {.attention = read_attention(json.at("attention"), config),
          .mlp = read_mlp(json.at("mlp"), config)};
}

}  // namespace paceline
