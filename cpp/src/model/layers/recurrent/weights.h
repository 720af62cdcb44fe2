// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/layers/recurrent/config.h"
#include "model/weights/linear.h"
#include "model/weights/rank_split.h"
#include "model/weights/weight_parts.h"

namespace paceline {

struct RecurrentAttentionWeights {
  Linear in;                       // q, k, v and z rows; then b and a rows where those are joined
  Linear ba;                       // b and a rows; absent where they are joined
  const float* conv = nullptr;     // [num_channels, num_taps]
  const float* a_log = nullptr;    // [num_value_heads]
  const float* dt_bias = nullptr;  // [num_value_heads]
  const float* norm = nullptr;     // [value_dim]
  Linear o;
};

template <>
struct KindWeights<RecurrentAttention> {
  using Type = RecurrentAttentionWeights;
};

template <class Weights, class Visitor>
void visit_kind_weights(const RecurrentAttention& attention, const WeightSizes& sizes,
                        Weights& weights, const LayerVisitor<Visitor>& layer) {
  const RecurrentShape& shape = attention.shape;
  const std::string name = layer.name + "attn.";
  const int64_t heads = shape.num_value_heads;
  std::vector<WeightPart> in = {{name + "q", shape.keys_width()},
                                {name + "k", shape.keys_width()},
                                {name + "v", shape.values_width()},
                                {name + "z", shape.values_width()}};
  const std::vector<WeightPart> ba = {{name + "b", heads}, {name + "a", heads}};
  if (attention.joins_ba()) in.insert(in.end(), ba.begin(), ba.end());
  layer.linear(weights.in, "attn.in", std::move(in), sizes.inputs, ShardAxis::kRows, attention.in);
  if (!attention.joins_ba()) {
    layer.linear(weights.ba, "attn.ba", ba, sizes.inputs, ShardAxis::kNone, /*format=*/{});
  }
  layer.visit.floats(weights.conv, {name + "conv", shape.num_channels()}, shape.num_taps);
  layer.visit.floats(weights.a_log, {.name = name + "a_log", .rows = heads, .needs_finite = true},
                     1);
  layer.visit.floats(weights.dt_bias,
                     {.name = name + "dt_bias", .rows = heads, .needs_finite = true}, 1);
  layer.visit.floats(weights.norm, {name + "norm", shape.value_dim}, 1);
  layer.linear(weights.o, "attn.o", {{name + "o", sizes.hidden}}, attention.output_width(),
               ShardAxis::kRows, attention.o);
}

// Ranks share the products. Each has all states, and computes the whole recurrence.
[[nodiscard]] inline std::string split_refusal(const RecurrentAttention&,
                                               const RecurrentAttentionWeights& weights,
                                               int32_t num_ranks) {
  const std::string why =
      rows_refusal("attn.in", weights.in.weight, weights.in.weight.n, num_ranks);
  if (!why.empty()) return why;
  return rows_refusal("attn.o", weights.o.weight, weights.o.weight.n, num_ranks);
}

inline int64_t split_layer(RecurrentAttention&, RecurrentAttentionWeights& weights,
                           const RankShare& share) {
  const int64_t all_outputs = weights.in.weight.n;
  split_outputs(weights.in, share);
  split_outputs(weights.o, share);
  return all_outputs;
}

}  // namespace paceline
