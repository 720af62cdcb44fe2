// SPDX-License-Identifier: Apache-2.0
#pragma once

// The forward pass of a dense MLP.

#include <optional>

#include "model/forward/layer_pass.h"
#include "model/layers/dense/config.h"
#include "model/layers/dense/weights.h"
#include "ops/moe.h"

namespace paceline {

[[nodiscard]] inline bool takes_norm(const DenseMlp&, const DenseMlpWeights& weights) {
  return weights.gate_up.rows.empty();  // the parts of a rank's matrix are several products
}
[[nodiscard]] inline const Linear* last_product(const DenseMlp&, const DenseMlpWeights& weights) {
  return weights.down.is_gathered() ? nullptr : &weights.down;
}

// Returns nothing: only a mixture leaves an op to the caller.
template <class Ctx>
[[nodiscard]] std::optional<CombineExpertsParams> run_mlp(Ctx& ctx, const DenseMlp& mlp,
                                                          const WeightsOf<DenseMlp>& weights,
                                                          const MlpPass& pass);

}  // namespace paceline
