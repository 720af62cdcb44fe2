// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "kv/kv_layout.h"
#include "model/decoder_config.h"

namespace paceline {

// The KV shapes of a decoder's layers, as plan_kv_layout takes them.
[[nodiscard]] std::vector<KvLayerShape> kv_layer_shapes(const DecoderConfig& config);

// The KV shapes of a drafter, whose layers may read the target's KV. Throws InvalidArgument, naming
// the layer, if a layer finds no KV to read.
[[nodiscard]] std::vector<KvLayerShape> draft_kv_layer_shapes(const DecoderConfig& draft,
                                                              const DecoderConfig& target);

}  // namespace paceline
