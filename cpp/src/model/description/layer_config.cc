// SPDX-License-Identifier: Apache-2.0

// The key "layers" of a decoder description.

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "model/description/config_reading.h"

namespace paceline {
namespace {

// The kinds of attention one after the other: the first that has the name reads the layer.
template <class Kind, class... Others>
[[nodiscard]] AttentionConfig read_kind(const Json& json, const DecoderConfig& config,
                                        std::string names, std::variant<Kind, Others...>*) {
  const Json name = json.at("kind");
  if (std::ranges::find(Kind::kNames, name.as_string()) != Kind::kNames.end()) {
    return Kind::read(json, config);
  }
  for (const std::string_view own : Kind::kNames) {
    names += concat(names.empty() ? "'" : ", '", own, "'");
  }
  if constexpr (sizeof...(Others) == 0) {
    name.refuse(names);
  } else {
    return read_kind(json, config, std::move(names),
                     static_cast<std::variant<Others...>*>(nullptr));
  }
}

[[nodiscard]] AttentionConfig read_attention(const Json& json, const DecoderConfig& config) {
  return read_kind(json, config, {}, static_cast<AttentionConfig*>(nullptr));
}

[[nodiscard]] MlpConfig read_mlp(const Json& json, const DecoderConfig& config) {
  if (json.find("mixture")) return read_parallel(json, config);
  if (json.find("num_experts") || json.find("top_k")) return read_mixture(json, config.hidden);
  return read_dense(json, config.hidden);
}

}  // namespace

int32_t read_rope_index(const Json& json, const std::vector<RopeConfig>& ropes, int32_t width,
                        std::string_view name, bool allows_interleaved) {
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
