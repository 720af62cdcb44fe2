// SPDX-License-Identifier: Apache-2.0
#include "model/description/kv_shapes.h"

#include <utility>
#include <variant>

#include "base/check.h"

namespace paceline {

KvStores kv_stores(const DecoderConfig& config) {
  KvStores stores;
  for (const LayerConfig& layer : config.layers) {
    stores.first.push_back(static_cast<int32_t>(stores.shapes.size()));
    std::visit([&](const auto& attention) { attention.append_stores(stores.shapes); },
               layer.attention);
    // append_stores has set `source` to a layer; from here on it is a store.
    KvLayerShape& shape = stores.shapes.back();
    if (shape.source >= 0) shape.source = stores.first[static_cast<size_t>(shape.source)];
  }
  return stores;
}

std::vector<KvLayerShape> kv_layer_shapes(const DecoderConfig& config) {
  return kv_stores(config).shapes;
}

std::vector<KvLayerShape> draft_kv_layer_shapes(const DecoderConfig& draft,
                                                const DecoderConfig& target) {
  KvStores stores = kv_stores(draft);
  const KvStores owners = kv_stores(target);
  for (size_t layer = 0; layer < draft.layers.size(); ++layer) {
    KvLayerShape& reader = stores.shapes[static_cast<size_t>(stores.first[layer])];
    const bool reads_target =
        std::visit([](const auto& attention) { return attention.reads_target; },
                   draft.layers[layer].attention);
    if (!reads_target) continue;
    size_t source = owners.first.size();
    while (source-- > 0) {
      const KvLayerShape& owner = owners.shapes[static_cast<size_t>(owners.first[source])];
      if (owner.kind.index() != reader.kind.index() || owner.source >= 0) continue;
      reader.source = owners.first[source];
      reader.reads_target = true;
      break;
    }
    const auto refuse = [&](const auto&... reason) {
      throw InvalidArgument(concat("layer ", layer, " of the drafter ", draft.name, ", of kind '",
                                   kv_kind_name(reader.kind), "', reads the KV of the target ",
                                   target.name, ", ", reason...,
                                   "; use the target that the drafter was trained for"));
    };
    if (reader.source < 0) refuse("which has no layer of that kind with KV of its own");
    const KvLayerShape& owner = owners.shapes[static_cast<size_t>(reader.source)];
    const auto check = [&](const char* name, int32_t expected, int32_t actual) {
      if (expected != actual) {
        refuse("whose layer ", source, " has ", name, " ", actual, " and not ", expected);
      }
    };
    check("window", kv_window(reader.kind), kv_window(owner.kind));
    check("num_kv_heads", reader.num_kv_heads, owner.num_kv_heads);
    check("head_dim", reader.head_dim, owner.head_dim);
  }
  return std::move(stores.shapes);
}

}  // namespace paceline
