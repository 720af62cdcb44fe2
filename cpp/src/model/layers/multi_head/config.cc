// SPDX-License-Identifier: Apache-2.0
#include "model/layers/multi_head/config.h"

#include <array>
#include <optional>
#include <variant>

#include "model/description/config_reading.h"
#include "ops/ops.h"

namespace paceline {
namespace {

// The index of an earlier layer that has KV of its own, of the same shape.
[[nodiscard]] int32_t read_kv_source(const Json& source, const MultiHeadAttention& reader,
                                     const std::vector<LayerConfig>& earlier) {
  const auto num_earlier = static_cast<int64_t>(earlier.size());
  if (num_earlier == 0) source.refuse("no such key in the first layer");
  const auto index = static_cast<int32_t>(source.as_int(0, num_earlier - 1));
  const MultiHeadAttention* const found =
      std::get_if<MultiHeadAttention>(&earlier[static_cast<size_t>(index)].attention);
  if (found == nullptr) {
    const std::string_view kind =
        std::visit([](const auto& attention) { return attention.kNames.front(); },
                   earlier[static_cast<size_t>(index)].attention);
    source.refuse(concat("a layer of the same kind; layer ", index, " has ", kind, " attention"));
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

}  // namespace

MultiHeadAttention MultiHeadAttention::read(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 11> kKeys = {
      "kind",     "window", "num_qo_heads", "num_kv_heads", "head_dim",  "scale",
      "soft_cap", "rope",   "has_qk_norm",  "has_qkv_bias", "has_o_bias"};
  constexpr std::array<std::string_view, 9> kOptional = {
      "has_v_norm",      "k_eq_v",        "kv_source", "reads_target", "has_sinks", "qkv",
      "has_output_gate", "rope_head_dim", "o"};
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
  attention.rope_head_dim = attention.head_dim;
  const std::optional<Json> rope_head_dim = json.find("rope_head_dim");
  if (rope_head_dim) {
    attention.rope_head_dim = read_int(json, "rope_head_dim", 2, attention.head_dim);
    if (attention.rope_head_dim % 2 != 0) rope_head_dim->refuse("an even number");
  }
  attention.rope = read_rope_index(json, config.ropes, attention.rope_head_dim,
                                   rope_head_dim ? "rope_head_dim" : "head_dim",
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
  attention.has_output_gate = read_switch(json, "has_output_gate");
  if (attention.has_output_gate && config.qkv_inputs(index) != config.hidden) {
    json.at("has_output_gate").refuse("false in the first layer of a drafter of kind 'eagle3'");
  }
  attention.qkv = read_format(json, "qkv", {"hidden_size", config.qkv_inputs(index)},
                              /*is_of_experts=*/false);
  attention.o = read_format(
      json, "o", {"num_qo_heads * head_dim", int64_t{attention.num_qo_heads} * attention.head_dim},
      /*is_of_experts=*/false);
  return attention;
}

void MultiHeadAttention::append_stores(std::vector<KvLayerShape>& shapes) const {
  shapes.push_back(
      {.kind = kind, .num_kv_heads = num_kv_heads, .head_dim = head_dim, .source = kv_source});
}

}  // namespace paceline
