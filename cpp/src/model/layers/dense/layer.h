// SPDX-License-Identifier: Apache-2.0
#pragma once

// The forward pass of a dense MLP.

#include <optional>

#include "model/forward/layer_pass.h"
#include "model/layers/dense/config.h"
#include "model/layers/dense/weights.h"
#include "ops/moe.h"

namespace paceline {

// Returns nothing: only a mixture leaves an op to the caller.
template <class Ctx>
[[nodiscard]] std::optional<CombineExpertsParams> run_mlp(Ctx& ctx, const DenseMlp& mlp,
                                                          const WeightsOf<DenseMlp>& weights,
                                                          const MlpPass& pass);

}  // namespace paceline
