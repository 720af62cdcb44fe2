// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "model/forward/layer_pass.h"
#include "model/layers/toy/config.h"
#include "model/layers/toy/weights.h"

namespace paceline {

template <class Ctx>
void run_attention(Ctx& ctx, const ToyAttention& attention, const WeightsOf<ToyAttention>& weights,
                   const AttentionPass& pass);

}  // namespace paceline
