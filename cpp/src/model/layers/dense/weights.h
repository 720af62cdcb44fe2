// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/layers/dense/config.h"
#include "model/weights/linear.h"
#include "model/weights/rank_split.h"
#include "model/weights/weight_parts.h"

namespace paceline {

struct DenseMlpWeights {
  Linear gate_up;  // gate rows, then up rows
  Linear down;
};

template <>
struct KindWeights<DenseMlp> {
  using Type = DenseMlpWeights;
};

// `name` ends with "mlp." or "mlp.shared.". `experts`: the prefix of the experts' names if the
// matrices are in the room after those experts; else "".
template <class Weights, class Visitor>
void visit_gated_unit(const DenseMlp& mlp, const std::string& name, const std::string& experts,
                      int64_t hidden, Weights& weights, Visitor& visit) {
  const auto room = [&](const char* which) { return experts.empty() ? "" : experts + which; };
  const std::vector<WeightPart> gate_up = {{name + "gate", mlp.intermediate},
                                           {name + "up", mlp.intermediate}};
  const std::vector<WeightPart> down = {{name + "down", hidden}};
  visit.linear(weights.gate_up, {.name = name + "gate_up",
                                 .parts = gate_up,
                                 .cols = hidden,
                                 .shard = ShardAxis::kRows,
                                 .format = mlp.gate_up,
                                 .room_of = room("gate_up")});
  visit.linear(weights.down, {.name = name + "down",
                              .parts = down,
                              .cols = mlp.intermediate,
                              .shard = ShardAxis::kRows,
                              .format = mlp.down,
                              .room_of = room("down")});
  if (mlp.has_bias) {
    visit.vector(weights.gate_up.bias, VectorKind::kBias, gate_up);
    visit.vector(weights.down.bias, VectorKind::kBias, down);
  }
}

template <class Weights, class Visitor>
void visit_kind_weights(const DenseMlp& mlp, const WeightSizes& sizes, Weights& weights,
                        const LayerVisitor<Visitor>& layer) {
  visit_gated_unit(mlp, layer.name + "mlp.", /*experts=*/"", sizes.hidden, weights, layer.visit);
}

// Ranks share the rows of gate and up, each with the same rows of both.
[[nodiscard]] inline std::string split_refusal(const DenseMlp& mlp, const DenseMlpWeights& weights,
                                               int32_t num_ranks) {
  const std::string why =
      rows_refusal("mlp.gate_up", weights.gate_up.weight, mlp.intermediate, num_ranks);
  if (!why.empty()) return why;
  return rows_refusal("mlp.down", weights.down.weight, weights.down.weight.n, num_ranks);
}

inline int64_t split_layer(DenseMlp& mlp, DenseMlpWeights& weights, const RankShare& share) {
  const int32_t all = mlp.intermediate;
  const RankColumns columns =
      share.columns(all, share.output_step(all, rows_a_scale(weights.gate_up.weight)));
  const LinearRange own = columns.of(share.rank);
  keep_rows(weights.gate_up, {own, {.first = all + own.first, .count = own.count}});
  split_outputs(weights.down, share, columns);
  mlp.intermediate = own.count;
  return all;
}

}  // namespace paceline
