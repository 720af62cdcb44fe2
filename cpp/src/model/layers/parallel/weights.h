// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

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

[[nodiscard]] inline std::string split_refusal(const ParallelMlp& mlp,
                                               const ParallelMlpWeights& weights,
                                               int32_t num_ranks) {
  const std::string why = split_refusal(mlp.dense, weights.dense, num_ranks);
  return why.empty() ? split_refusal(mlp.mixture, weights.mixture, num_ranks) : why;
}

inline int64_t split_layer(ParallelMlp& mlp, ParallelMlpWeights& weights, const RankShare& share) {
  const int64_t of_dense = split_layer(mlp.dense, weights.dense, share);
  return std::max(of_dense, split_layer(mlp.mixture, weights.mixture, share));
}

}  // namespace paceline
