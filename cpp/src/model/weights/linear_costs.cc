// SPDX-License-Identifier: Apache-2.0
#include "model/weights/linear_costs.h"

#include "base/overloaded.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weight_layout.h"

namespace paceline {

namespace {

// Calls f(name, rows, cols) for the float32 matrices that mix residual streams.
template <class Function>
struct MixVisitor {
  const Function& f;
  void linear(const Linear&, const LinearShape&) {}
  void experts(const ExpertLinears&, const LinearShape&) {}
  void vector(const float*, VectorKind, const std::vector<WeightPart>&) {}
  void table(const std::byte*, const WeightPart&, int64_t) {}
  void floats(const float*, const WeightPart& part, int64_t cols) {
    if (part.name.ends_with("mix.matrix")) f(part.name, part.rows, cols);
  }
  void tokens(const int32_t*, const WeightPart&, bool) {}
  void experts_of_tokens(const int32_t*, const WeightPart&, int32_t, int32_t) {}
};

}  // namespace

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
  const auto add_mix = [&](const std::string& name, int64_t rows, int64_t cols) {
    costs.push_back({.name = name,
                     .rows = static_cast<int32_t>(rows),
                     .cols = static_cast<int32_t>(cols),
                     .bytes = rows * cols * int64_t{sizeof(float)},
                     .is_for_logits = name == "end_mix.matrix"});
  };
  MixVisitor visitor{add_mix};
  visit_weights(config, weights, visitor);
  return costs;
}

}  // namespace paceline
