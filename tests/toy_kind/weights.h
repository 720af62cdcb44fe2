// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "model/layers/toy/config.h"
#include "model/weights/linear.h"
#include "model/weights/weight_parts.h"

namespace paceline {

struct ToyAttentionWeights {
  Linear m;  // rows of q, of k and of v
};

template <>
struct KindWeights<ToyAttention> {
  using Type = ToyAttentionWeights;
};

template <class Weights, class Visitor>
void visit_kind_weights(const ToyAttention& attention, const WeightSizes& sizes, Weights& weights,
                        const LayerVisitor<Visitor>& layer) {
  layer.linear(weights.m, "attn.m", {{layer.name + "attn.m", attention.projected_width()}},
               sizes.inputs, ShardAxis::kRows, attention.m);
}

}  // namespace paceline
