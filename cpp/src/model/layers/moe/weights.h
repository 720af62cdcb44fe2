// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/layers/dense/weights.h"
#include "model/layers/moe/config.h"
#include "model/weights/linear.h"
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
                               .shard = ShardAxis::kColumns,
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

}  // namespace paceline
