// SPDX-License-Identifier: Apache-2.0
#include "model/forward/activations.h"

#include <algorithm>
#include <tuple>
#include <variant>

#include "ops/streams.h"

namespace paceline {
void ActivationWidths::merge(const DecoderConfig& config, int64_t max_tokens) {
  hidden = std::max<int64_t>(hidden, config.hidden);
  // A draft head concatenates an embedding and a hidden state there, of its own width or that of
  // its target.
  const int64_t concatenated =
      config.drafter ? 2 * int64_t{std::max(config.hidden, config.embed_width())} : config.hidden;
  normed = std::max(normed, concatenated);
  residual = std::max(residual, config.residual_width());
  if (config.streams.count > 1) {
    mix = std::max<int64_t>(mix, mix_width(config.streams.count, /*is_end=*/false));
    // A draft head norms all streams before it multiplies them.
    if (config.drafter) normed = std::max(normed, config.residual_width());
  }
  for (const LayerConfig& layer : config.layers) {
    const ScratchSizes sizes = {.hidden = config.hidden, .max_tokens = max_tokens};
    std::visit(
        [&]<class Kind>(const Kind& kind) {
          qkv = std::max(qkv, kind.projected_width());
          attention = std::max(attention, kind.output_width());
          std::get<WidthsOf<Kind>>(kinds).merge(kind, sizes);
        },
        layer.attention);
    std::visit(
        [&]<class Kind>(const Kind& kind) {
          gate_up = std::max(gate_up, kind.projected_width());
          joined = std::max(joined, kind.joined_width());
          std::get<WidthsOf<Kind>>(kinds).merge(kind, sizes);
        },
        layer.mlp);
  }
  gathered = std::max(gathered, config.gathered_width);
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
  const auto optional = [&](int64_t width) { return width > 0 ? buffer(width) : nullptr; };
  const auto floats = [&](int64_t width) {
    return arena.allocate<float>(rows * width, "activations");
  };
  const auto of_mlp = [&](int64_t width, int64_t joined) -> void* {
    const int64_t elements = rows * width + std::min<int64_t>(rows, kMaxJoinedRows) * joined;
    return arena.allocate<std::byte>(elements * dtype_bytes(dtype), "activations");
  };
  const bool has_streams = widths.mix > 0;
  return {.residual = floats(widths.residual),
          .embedded = has_streams ? floats(widths.hidden) : nullptr,
          .mix = has_streams ? floats(widths.mix) : nullptr,
          .num_stream_rows = has_streams ? arena.allocate<int32_t>(1, "activations") : nullptr,
          .normed = buffer(widths.normed),
          .qkv = buffer(widths.qkv),
          .attention = buffer(widths.attention),
          .branch = buffer(widths.hidden),
          .gate_up = of_mlp(widths.gate_up, 2 * widths.joined),
          .activated = of_mlp(widths.gate_up / 2, widths.joined),
          .per_layer = optional(widths.per_layer),
          .kinds = std::apply(
              [&](const auto&... of_kind) {
                return AllKinds::Scratch(of_kind.allocate(arena, rows, dtype)...);
              },
              widths.kinds),
          .dtype = dtype,
          .gathered = optional(widths.gathered)};
}

}  // namespace paceline
