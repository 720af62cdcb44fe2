// SPDX-License-Identifier: Apache-2.0
#include "model/kv_shapes.h"

#include <variant>

#include "base/check.h"
#include "base/overloaded.h"

namespace paceline {

std::vector<KvLayerShape> kv_layer_shapes(const DecoderConfig& config) {
  std::vector<KvLayerShape> shapes;
  for (const LayerConfig& layer : config.layers) {
    shapes.push_back(std::visit(Overloaded{[](const MultiHeadAttention& attention) -> KvLayerShape {
                                             return {.kind = attention.kind,
                                                     .num_kv_heads = attention.num_kv_heads,
                                                     .head_dim = attention.head_dim,
                                                     .source = attention.kv_source};
                                           },
                                           [](const LatentAttention& attention) -> KvLayerShape {
                                             return {.kind = LatentKv{attention.kv_lora_rank},
                                                     .num_kv_heads = 1,
                                                     .head_dim = attention.entry_width()};
                                           },
                                           [&](const CompressedAttention&) -> KvLayerShape {
                                             throw Unsupported(
                                                 concat(config.name, " has compressed attention"));
                                           }},
                                layer.attention));
  }
  return shapes;
}

std::vector<KvLayerShape> draft_kv_layer_shapes(const DecoderConfig& draft,
                                                const DecoderConfig& target) {
  std::vector<KvLayerShape> shapes = kv_layer_shapes(draft);
  const std::vector<KvLayerShape> owners = kv_layer_shapes(target);
  for (size_t layer = 0; layer < shapes.size(); ++layer) {
    KvLayerShape& reader = shapes[layer];
    const bool reads_target = std::visit(
        Overloaded{[](const MultiHeadAttention& attention) { return attention.reads_target; },
                   [](const LatentAttention&) { return false; },
                   [](const CompressedAttention&) { return false; }},
        draft.layers[layer].attention);
    if (!reads_target) continue;
    for (size_t source = owners.size(); source-- > 0;) {
      const KvLayerShape& owner = owners[source];
      if (owner.kind.index() != reader.kind.index() || owner.source >= 0) continue;
      reader.source = static_cast<int32_t>(source);
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
    const KvLayerShape& owner = owners[static_cast<size_t>(reader.source)];
    const auto check = [&](const char* name, int32_t expected, int32_t actual) {
      if (expected != actual) {
        refuse("whose layer ", reader.source, " has ", name, " ", actual, " and not ", expected);
      }
    };
    check("window", reported_window(reader.kind), reported_window(owner.kind));
    check("num_kv_heads", reader.num_kv_heads, owner.num_kv_heads);
    check("head_dim", reader.head_dim, owner.head_dim);
  }
  return shapes;
}

}  // namespace paceline
