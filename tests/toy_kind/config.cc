// SPDX-License-Identifier: Apache-2.0
#include "model/layers/toy/config.h"

#include "model/description/config_reading.h"

namespace paceline {

ToyAttention ToyAttention::read(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 3> kKeys = {"kind", "num_heads", "rope"};
  constexpr std::array<std::string_view, 1> kOptional = {"m"};
  json.check_keys(kKeys, kOptional);
  ToyAttention attention;
  attention.num_heads = read_int(json, "num_heads", 1, kMaxHeads);
  if (config.hidden % (2 * attention.num_heads) != 0) {
    json.at("num_heads").refuse(concat("divisors of half of hidden_size, ", config.hidden / 2));
  }
  attention.head_dim = config.hidden / attention.num_heads;
  attention.rope = read_rope_index(json, config.ropes, attention.head_dim, "head_dim",
                                   /*allows_interleaved=*/false);
  attention.m = read_format(json, "m", {"hidden_size", config.qkv_inputs(config.layers.size())},
                            /*is_of_experts=*/false);
  return attention;
}

void ToyAttention::append_stores(std::vector<KvLayerShape>& shapes) const {
  shapes.push_back({.kind = FullKv{}, .num_kv_heads = num_heads, .head_dim = head_dim});
}

}  // namespace paceline
