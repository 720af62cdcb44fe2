// SPDX-License-Identifier: Apache-2.0
#include "model/activations.h"

#include <algorithm>
#include <variant>

#include "base/overloaded.h"

namespace paceline {
namespace {

[[nodiscard]] ExpertActivations allocate_expert_activations(DeviceArena& arena, int64_t rows,
                                                            const ActivationWidths& widths,
                                                            DType dtype) {
  if (widths.top_k == 0) return {};
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "activations"); };
  const auto floats = [&](int64_t count) { return arena.allocate<float>(count, "activations"); };
  return {.logits = floats(rows * widths.num_experts),
          .experts = ints(rows * widths.top_k),
          .weights = floats(rows * widths.top_k),
          .expert_begin = ints(widths.num_experts + 1),
          .source_row = ints(rows * widths.top_k),
          .expert_row = ints(rows * widths.top_k),
          .output = arena.allocate<std::byte>(rows * widths.expert_output * dtype_bytes(dtype),
                                              "activations")};
}

}  // namespace

void ActivationWidths::merge(const DecoderConfig& config) {
  hidden = std::max<int64_t>(hidden, config.hidden);
  // A draft head concatenates an embedding and a hidden state there, of its own width or that of
  // its target.
  const int64_t joined =
      config.drafter ? 2 * int64_t{std::max(config.hidden, config.embed_width())} : config.hidden;
  normed = std::max(normed, joined);
  for (const LayerConfig& layer : config.layers) {
    const AttentionConfig& a = layer.attention;
    const int64_t head_dim = a.head_dim;
    qkv = std::max<int64_t>(qkv, qkv_rows(a));
    attention = std::max(attention, a.num_qo_heads * head_dim);
    std::visit(Overloaded{[&](const DenseMlp& mlp) {
                            gate_up = std::max(gate_up, 2 * int64_t{mlp.intermediate});
                          },
                          [&](const MoeMlp& mlp) {
                            const int64_t places = mlp.top_k;
                            gate_up = std::max(gate_up, places * 2 * mlp.expert.intermediate);
                            num_experts = std::max<int64_t>(num_experts, mlp.num_experts);
                            top_k = std::max(top_k, places);
                            expert_output = std::max(expert_output, places * config.hidden);
                          }},
               layer.mlp);
  }
  // The gates of per-layer inputs use the buffers of the MLP.
  const int64_t size = config.per_layer_inputs.size;
  gate_up = std::max(gate_up, 2 * size);
  per_layer = std::max(per_layer, size * static_cast<int64_t>(config.layers.size()));
}

Activations allocate_activations(DeviceArena& arena, int64_t rows, const ActivationWidths& widths,
                                 DType dtype) {
  const auto buffer = [&](int64_t width) -> void* {
    return arena.allocate<std::byte>(rows * width * dtype_bytes(dtype), "activations");
  };
  return {.residual = arena.allocate<float>(rows * widths.hidden, "activations"),
          .normed = buffer(widths.normed),
          .qkv = buffer(widths.qkv),
          .attention = buffer(widths.attention),
          .branch = buffer(widths.hidden),
          .gate_up = buffer(widths.gate_up),
          .activated = buffer(widths.gate_up / 2),
          .per_layer = widths.per_layer > 0 ? buffer(widths.per_layer) : nullptr,
          .experts = allocate_expert_activations(arena, rows, widths, dtype),
          .dtype = dtype};
}

}  // namespace paceline
