// SPDX-License-Identifier: Apache-2.0
#pragma once

// The forward pass of multi-head attention.

#include "model/forward/layer_pass.h"
#include "model/layers/multi_head/config.h"
#include "model/layers/multi_head/weights.h"

namespace paceline {

template <class Ctx>
void run_attention(Ctx& ctx, const MultiHeadAttention& attention,
                   const WeightsOf<MultiHeadAttention>& weights, const AttentionPass& pass);

// Writes keys and values of the rows to the cache, computed from pass.input; no query attends. The
// layer writes_context().
template <class Ctx>
void write_keys_values(Ctx& ctx, const MultiHeadAttention& attention,
                       const WeightsOf<MultiHeadAttention>& weights, const AttentionPass& pass);

}  // namespace paceline
