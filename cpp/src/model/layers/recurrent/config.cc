// SPDX-License-Identifier: Apache-2.0
#include "model/layers/recurrent/config.h"

#include <array>

#include "model/description/config_reading.h"

namespace paceline {

RecurrentAttention RecurrentAttention::read(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 7> kKeys = {
      "kind",           "num_key_heads", "num_value_heads", "key_head_dim",
      "value_head_dim", "conv_size",     "norm_eps"};
  constexpr std::array<std::string_view, 2> kOptional = {"in", "o"};
  if (config.drafter) {
    json.at("kind").refuse("an attention layer in a draft head; a draft model may be recurrent");
  }
  json.check_keys(kKeys, kOptional);
  RecurrentAttention attention;
  RecurrentShape& shape = attention.shape;
  shape.num_key_heads = read_int(json, "num_key_heads", 1, kMaxHeads);
  shape.num_value_heads = read_int(json, "num_value_heads", shape.num_key_heads, kMaxHeads);
  if (shape.num_value_heads % shape.num_key_heads != 0) {
    json.at("num_value_heads")
        .refuse(concat("multiples of num_key_heads, ", shape.num_key_heads));
  }
  shape.key_dim = read_int(json, "key_head_dim", 1, kMaxRecurrentHeadDim);
  shape.value_dim = read_int(json, "value_head_dim", 1, kMaxRecurrentHeadDim);
  shape.num_taps = read_int(json, "conv_size", 2, kMaxConvTaps);
  attention.norm_eps = read_positive(json.at("norm_eps"));
  attention.in = read_format(json, "in", {"hidden_size", config.qkv_inputs(config.layers.size())},
                             /*is_of_experts=*/false);
  attention.o = read_format(
      json, "o", {"num_value_heads * value_head_dim", attention.output_width()},
      /*is_of_experts=*/false);
  return attention;
}

void RecurrentAttention::append_stores(std::vector<KvLayerShape>& shapes) const {
  shapes.push_back({.kind = StateKv{},
                    .num_kv_heads = shape.num_value_heads,
                    .head_dim = shape.key_dim * shape.value_dim});
  shapes.push_back({.kind = RecordKv{.num_taps = shape.num_taps},
                    .num_kv_heads = 1,
                    .head_dim = shape.record_width()});
}

}  // namespace paceline
