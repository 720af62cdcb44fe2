// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "model/layers/dense/weights.h"
#include "model/layers/moe/weights.h"
#include "model/layers/parallel/config.h"
#include "model/weights/weight_parts.h"

namespace paceline {

struct ParallelMlpWeights {
  DenseMlpWeights dense;
  MoeMlpWeights mixture;
  // [hidden] each
  const float* dense_norm = nullptr;    // of the dense branch's output
  const float* router_norm = nullptr;   // of the router's input
  const float* expert_norm = nullptr;   // of the experts' input
  const float* mixture_norm = nullptr;  // of the mixture's output
};

template <>
struct KindWeights<ParallelMlp> {
  using Type = ParallelMlpWeights;
};

template <class Weights, class Visitor>
void visit_kind_weights(const ParallelMlp& mlp, const WeightSizes& sizes, Weights& weights,
                        const LayerVisitor<Visitor>& layer) {
  visit_kind_weights(mlp.dense, sizes, weights.dense, layer);
  visit_kind_weights(mlp.mixture, sizes, weights.mixture, layer);
  layer.norm(weights.dense_norm, "mlp.dense_norm", sizes.hidden);
  layer.norm(weights.router_norm, "mlp.router_norm", sizes.hidden);
  layer.norm(weights.expert_norm, "mlp.expert_norm", sizes.hidden);
  layer.norm(weights.mixture_norm, "mlp.mixture_norm", sizes.hidden);
}

}  // namespace paceline
