// SPDX-License-Identifier: Apache-2.0
#include "model/linear_costs.h"

#include "base/overloaded.h"
#include "model/visit_weights.h"
#include "model/weight_layout.h"

namespace paceline {

std::vector<LinearCost> linear_costs(const DecoderConfig& config, DType dtype, Device device) {
  DecoderWeights weights;
  Carver shapes(dtype, device, /*base=*/nullptr);
  lay_out(config, shapes, weights);
  std::vector<LinearCost> costs;
  const auto add = [&](WeightMatrix matrix, const LinearShape& shape) {
    // With centroids, a product reads the rows of the chosen clusters only.
    if (shape.name == "lm_head") matrix.n = config.num_logits();
    costs.push_back({.name = shape.name,
                     .rows = matrix.n,
                     .cols = matrix.k,
                     .bytes = matrix.bytes(),
                     .is_for_logits = shape.rows == LinearRows::kLogits,
                     .shard = shape.shard,
                     .num_experts = shape.num_experts(),
                     .top_k = shape.top_k});
  };
  const auto add_linear = [&](const Linear& linear, const LinearShape& shape) {
    add(linear.weight, shape);
  };
  const auto add_experts = [&](const ExpertLinears& experts, const LinearShape& shape) {
    add(experts.weight.first, shape);
  };
  for_each_linear(config, weights, Overloaded{add_linear, add_experts});
  return costs;
}

}  // namespace paceline
