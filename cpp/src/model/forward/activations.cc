// SPDX-License-Identifier: Apache-2.0
#include "model/forward/activations.h"

#include <algorithm>
#include <variant>

#include "base/overloaded.h"
#include "ops/streams.h"

namespace paceline {
namespace {

[[nodiscard]] ExpertActivations allocate_expert_activations(DeviceArena& arena, int64_t rows,
                                                            const ActivationWidths& widths,
                                                            DType dtype) {
  if (widths.top_k == 0) return {};
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "activations"); };
  const auto floats = [&](int64_t count) { return arena.allocate<float>(count, "activations"); };
  const int64_t joined_rows = widths.shared > 0 ? std::min<int64_t>(rows, kMaxJoinedRows) : 0;
  const int64_t outputs = rows * widths.expert_output + joined_rows * widths.hidden;
  return {.logits = floats(rows * widths.num_experts),
          .experts = ints(rows * widths.top_k),
          .weights = floats(rows * widths.top_k),
          .expert_begin = ints(widths.num_experts + 2),
          .source_row = ints(rows * widths.top_k + joined_rows),
          .expert_row = ints(rows * widths.top_k),
          .output = arena.allocate<std::byte>(outputs * dtype_bytes(dtype), "activations")};
}

[[nodiscard]] CompressedActivations allocate_compressed_activations(DeviceArena& arena,
                                                                    int64_t rows,
                                                                    const ActivationWidths& widths,
                                                                    DType dtype) {
  if (widths.compressed_q == 0) return {};
  const auto buffer = [&](int64_t width) -> void* {
    if (width == 0) return nullptr;
    return arena.allocate<std::byte>(rows * width * dtype_bytes(dtype), "activations");
  };
  const auto numbers = [&]<class T>(T, int64_t width) -> T* {
    return width == 0 ? nullptr : arena.allocate<T>(rows * width, "activations");
  };
  const int64_t top_k = widths.index_top_k;
  // At least one entry, so that there is an address.
  const int64_t stride = top_k > 0 ? std::max<int64_t>(widths.index_entries, 1) : 0;
  return {.q = buffer(widths.compressed_q),
          .groups = buffer(widths.o_groups),
          .inputs = numbers(float{}, widths.compress_inputs),
          .index_q = buffer(widths.index_q),
          .scores = numbers(float{}, stride),
          .scores_stride = stride,
          .chosen = numbers(int32_t{}, top_k),
          .num_chosen = numbers(int32_t{}, top_k > 0 ? 1 : 0)};
}

}  // namespace

void ActivationWidths::merge(const DecoderConfig& config, int64_t max_tokens) {
  hidden = std::max<int64_t>(hidden, config.hidden);
  // A draft head concatenates an embedding and a hidden state there, of its own width or that of
  // its target.
  const int64_t joined =
      config.drafter ? 2 * int64_t{std::max(config.hidden, config.embed_width())} : config.hidden;
  normed = std::max(normed, joined);
  residual = std::max(residual, config.residual_width());
  if (config.streams.count > 1) {
    mix = std::max<int64_t>(mix, mix_width(config.streams.count, /*is_end=*/false));
    // A draft head norms all streams before it multiplies them.
    if (config.drafter) normed = std::max(normed, config.residual_width());
  }
  for (const LayerConfig& layer : config.layers) {
    std::visit(Overloaded{[&](const MultiHeadAttention& a) {
                            qkv = std::max<int64_t>(qkv, qkv_rows(a));
                            attention = std::max(attention, a.num_qo_heads * int64_t{a.head_dim});
                          },
                          [&](const LatentAttention& a) {
                            const int64_t heads = a.num_qo_heads;
                            qkv = std::max(qkv, a.qkv_a_rows());
                            attention = std::max(attention, heads * a.v_head_dim);
                            latent_q = std::max(latent_q, a.q_lora_rank > 0 ? a.q_rows() : 0);
                            absorbed_q = std::max(absorbed_q, heads * a.entry_width());
                            mean_latents = std::max(mean_latents, heads * a.kv_lora_rank);
                          },
                          [&](const CompressedAttention& a) {
                            qkv = std::max(qkv, a.qkv_a_rows());
                            attention = std::max(attention, a.q_rows());
                            compressed_q = std::max(compressed_q, a.q_rows());
                            o_groups = std::max(o_groups, a.o_a_rows());
                            compress_inputs = std::max<int64_t>(compress_inputs, a.compress_rows());
                            if (!a.indexer) return;
                            index_q = std::max(index_q, a.index_q_rows());
                            index_entries = std::max(index_entries,
                                                     max_tokens / a.compressor->tokens_per_entry);
                            index_top_k = std::max<int64_t>(index_top_k, a.indexer->top_k);
                          }},
               layer.attention);
    std::visit(Overloaded{[&](const DenseMlp& mlp) {
                            gate_up = std::max(gate_up, 2 * int64_t{mlp.intermediate});
                          },
                          [&](const MoeMlp& mlp) {
                            const int64_t places = mlp.top_k;
                            gate_up = std::max(gate_up, places * 2 * mlp.expert.intermediate);
                            if (mlp.shared) {
                              gate_up = std::max(gate_up, 2 * int64_t{mlp.shared->intermediate});
                            }
                            if (mlp.joins_shared()) {
                              shared = std::max<int64_t>(shared, mlp.shared->intermediate);
                            }
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
          .gate_up = of_mlp(widths.gate_up, 2 * widths.shared),
          .activated = of_mlp(widths.gate_up / 2, widths.shared),
          .latent_q = optional(widths.latent_q),
          .absorbed_q = optional(widths.absorbed_q),
          .mean_latents = optional(widths.mean_latents),
          .per_layer = optional(widths.per_layer),
          .experts = allocate_expert_activations(arena, rows, widths, dtype),
          .compressed = allocate_compressed_activations(arena, rows, widths, dtype),
          .dtype = dtype};
}

}  // namespace paceline
