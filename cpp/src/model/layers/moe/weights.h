// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/layers/dense/weights.h"
#include "model/layers/moe/config.h"
#include "model/weights/linear.h"
#include "model/weights/rank_split.h"
#include "model/weights/weight_parts.h"

namespace paceline {

struct MoeMlpWeights {
  // To the experts' logits. With MoeMlp::has_shared_gate its last row is that gate: one product has
  // both.
  Linear router;
  const float* correction = nullptr;       // [num_experts], of router rules with scores; or null
  const int32_t* token_experts = nullptr;  // [vocab_size, top_k], or null
  const float* expert_scales = nullptr;    // [num_experts], or null
  ExpertLinears gate_up;  // gate rows, then up rows; or in turn (MoeMlp::is_interleaved)
  ExpertLinears down;
  // Absent without MoeMlp::shared. With MoeMlp::joins_shared they are matrix num_experts of gate_up
  // and down, too.
  DenseMlpWeights shared;
};

template <>
struct KindWeights<MoeMlp> {
  using Type = MoeMlpWeights;
};

template <class Weights, class Visitor>
void visit_kind_weights(const MoeMlp& mlp, const WeightSizes& sizes, Weights& weights,
                        const LayerVisitor<Visitor>& layer) {
  const std::string name = layer.name + "mlp.";
  const int64_t hidden = sizes.hidden;
  Visitor& visit = layer.visit;
  std::vector<WeightPart> router = {{name + "router", mlp.num_experts}};
  if (mlp.has_shared_gate) router.push_back({name + "shared_gate", 1});
  const DenseMlp& expert = mlp.expert;
  const int64_t intermediate = expert.intermediate;
  std::vector<WeightPart> gate_up = {{name + "experts.gate_up", 2 * intermediate, mlp.num_experts}};
  if (mlp.is_per_expert) {
    gate_up = {{name + "experts.gate", intermediate, mlp.num_experts},
               {name + "experts.up", intermediate, mlp.num_experts}};
  }
  const std::vector<WeightPart> down = {{name + "experts.down", hidden, mlp.num_experts}};
  visit.linear(
      weights.router,
      {.name = name + "router", .parts = router, .cols = hidden, .has_float_output = true});
  if (mlp.has_router_bias) visit.vector(weights.router.bias, VectorKind::kBias, router);
  if (mlp.has_token_experts) {
    visit.experts_of_tokens(weights.token_experts,
                            {name + "router.token_experts", sizes.vocab_size}, mlp.top_k,
                            mlp.num_experts);
  } else if (!has_softmax(mlp.router)) {
    visit.vector(weights.correction, VectorKind::kBias,
                 {{name + "router.correction", mlp.num_experts}});
  }
  if (mlp.has_expert_scales) {
    visit.vector(weights.expert_scales, VectorKind::kScale,
                 {{name + "router.expert_scales", mlp.num_experts}});
  }
  visit.experts(weights.gate_up, {.name = name + "experts.gate_up",
                                  .parts = gate_up,
                                  .cols = hidden,
                                  .shard = ShardAxis::kRows,
                                  .format = expert.gate_up,
                                  .top_k = mlp.top_k,
                                  .is_transposed = mlp.is_transposed,
                                  .is_per_expert = mlp.is_per_expert,
                                  .has_room = mlp.joins_shared()});
  visit.experts(weights.down, {.name = name + "experts.down",
                               .parts = down,
                               .cols = expert.intermediate,
                               .shard = ShardAxis::kRows,
                               .format = expert.down,
                               .top_k = mlp.top_k,
                               .is_transposed = mlp.is_transposed,
                               .is_per_expert = mlp.is_per_expert,
                               .has_room = mlp.joins_shared()});
  if (expert.has_bias) {
    visit.vector(weights.gate_up.bias, VectorKind::kBias, gate_up);
    visit.vector(weights.down.bias, VectorKind::kBias, down);
  }
  if (mlp.shared) {
    visit_gated_unit(*mlp.shared, name + "shared.", mlp.joins_shared() ? name + "experts." : "",
                     hidden, weights.shared, visit);
  }
}

// Ranks share the rows of every expert, so that they have the same work whichever experts are
// chosen. Each computes the whole router.
[[nodiscard]] inline std::string split_refusal(const MoeMlp& mlp, const MoeMlpWeights& weights,
                                               int32_t num_ranks) {
  const WeightMatrix& gate_up = weights.gate_up.weight.first;
  const WeightMatrix& down = weights.down.weight.first;
  if (gate_up.zeros != nullptr || down.zeros != nullptr) return "experts with zero points";
  std::string why = rows_refusal("mlp.experts.gate_up", gate_up, mlp.expert.intermediate, num_ranks,
                                 rows_a_scale(gate_up));
  if (why.empty()) {
    why = rows_refusal("mlp.experts.down", down, down.n, num_ranks, rows_a_scale(down));
  }
  if (why.empty() && mlp.shared) why = split_refusal(*mlp.shared, weights.shared, num_ranks);
  return why;
}

inline int64_t split_layer(MoeMlp& mlp, MoeMlpWeights& weights, const RankShare& share) {
  // Those of all places of a row, and of a shared expert beside them.
  const int64_t places = mlp.top_k + (mlp.shared ? 1 : 0);
  const int64_t widest =
      places * std::max(mlp.expert.intermediate, mlp.shared ? mlp.shared->intermediate : 0);
  ExpertLinears& gate_up = weights.gate_up;
  const int32_t all = mlp.expert.intermediate;
  const int32_t step = share.output_step(all, rows_a_scale(gate_up.weight.first));
  const RankColumns columns = share.columns(all, step);
  const LinearRange own = columns.of(share.rank);
  gate_up.bias_stride = gate_up.weight.first.n;
  weights.down.bias_stride = weights.down.weight.first.n;
  if (mlp.is_interleaved) {
    gate_up.rows = {{.first = 2 * own.first, .count = 2 * own.count}};
  } else {
    gate_up.rows = {own, {.first = all + own.first, .count = own.count}};
  }
  gate_up.weight.first.n = 2 * own.count;
  ExpertLinears& down = weights.down;
  const int32_t all_outputs = down.weight.first.n;
  down.inputs = columns;
  down.outputs =
      share.columns(all_outputs, share.output_step(all_outputs, rows_a_scale(down.weight.first)));
  down = rows_of(down, down.outputs.of(share.rank));
  mlp.expert.intermediate = own.count;
  if (mlp.shared) static_cast<void>(split_layer(*mlp.shared, weights.shared, share));
  return widest;
}

}  // namespace paceline
