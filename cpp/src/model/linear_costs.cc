// SPDX-License-Identifier: Apache-2.0
#include "model/linear_costs.h"

#include "model/visit_weights.h"

namespace paceline {

std::vector<LinearCost> linear_costs(const DecoderConfig& config, DType dtype) {
  DecoderWeights weights;
  size_weights(config, weights);
  std::vector<LinearCost> costs;
  for_each_linear(config, weights, [&](const Linear&, const LinearShape& shape) {
    // With centroids, a product reads the rows of the chosen clusters only.
    const bool is_lm_head = shape.name == "lm_head";
    const int64_t rows = is_lm_head ? config.num_logits() : shape.num_rows();
    costs.push_back({.name = shape.name,
                     .rows = rows,
                     .cols = shape.cols,
                     .bytes = rows * shape.cols * dtype_bytes(dtype),
                     .is_for_logits = shape.rows == LinearRows::kLogits,
                     .shard = shape.shard});
  });
  return costs;
}

}  // namespace paceline
