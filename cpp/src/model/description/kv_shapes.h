// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kv/kv_layout.h"
#include "model/description/decoder_config.h"

namespace paceline {

// What a decoder's layers store. A layer has one store, or with compressed attention up to three:
// the entries of its window, and with a compressor also its tail and the compressed entries.
struct KvStores {
  std::vector<KvLayerShape> shapes;  // of all layers in order
  std::vector<int32_t> first;        // by layer: the index of its first store
};
[[nodiscard]] KvStores kv_stores(const DecoderConfig& config);

// Their shapes alone, as plan_kv_layout takes them.
[[nodiscard]] std::vector<KvLayerShape> kv_layer_shapes(const DecoderConfig& config);

// The same of a drafter, whose layers may read the target's KV. Throws InvalidArgument, naming
// the layer, if a layer finds no KV to read.
[[nodiscard]] std::vector<KvLayerShape> draft_kv_layer_shapes(const DecoderConfig& draft,
                                                              const DecoderConfig& target);

}  // namespace paceline
