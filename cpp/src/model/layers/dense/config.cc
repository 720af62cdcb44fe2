// SPDX-License-Identifier: Apache-2.0
#include "model/layers/dense/config.h"

#include <array>
#include <optional>

#include "model/description/config_reading.h"

namespace paceline {

DenseMlp read_gated_unit(const Json& json, int32_t hidden, bool is_joined) {
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
  mlp.gate_up = read_format(json, "gate_up", {"hidden_size", hidden}, is_joined);
  mlp.down = read_format(json, "down", {"intermediate", mlp.intermediate}, is_joined);
  return mlp;
}

DenseMlp read_dense(const Json& json, int32_t hidden) {
  constexpr std::array<std::string_view, 3> kKeys = {"intermediate", "activation", "has_bias"};
  constexpr std::array<std::string_view, 4> kOptional = {"alpha", "limit", "gate_up", "down"};
  json.check_keys(kKeys, kOptional);
  return read_gated_unit(json, hidden, /*is_joined=*/false);
}

}  // namespace paceline
