// SPDX-License-Identifier: Apache-2.0
#include "model/decoder.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/overloaded.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "device/device_memory.h"
#include "metadata/pass_rows.h"
#include "model/layer_ops.h"
#include "ops/moe.h"

namespace paceline {
namespace {

// Copies the residual stream of the rows of all captures that have `layer`.
template <class Ctx>
void capture_layer(Ctx& ctx, std::span<const HiddenCapture> captures, int32_t layer,
                   const float* residual, int64_t hidden) {
  for (const HiddenCapture& capture : captures) {
    for (size_t i = 0; i < capture.layers.size(); ++i) {
      if (capture.layers[i] != layer) continue;
      copy_on_device(ctx, capture.to + static_cast<int64_t>(i) * capture.layer_stride,
                     residual + capture.first_row * hidden,
                     capture.num_rows * hidden * static_cast<int64_t>(sizeof(float)));
    }
  }
}

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

std::vector<KvLayerShape> kv_layer_shapes(const DecoderConfig& config) {
  std::vector<KvLayerShape> shapes;
  for (const LayerConfig& layer : config.layers) {
    shapes.push_back({.kind = layer.attention.kind,
                      .num_kv_heads = layer.attention.num_kv_heads,
                      .head_dim = layer.attention.head_dim,
                      .source = layer.attention.kv_source});
  }
  return shapes;
}

std::vector<KvLayerShape> draft_kv_layer_shapes(const DecoderConfig& draft,
                                                const DecoderConfig& target) {
  std::vector<KvLayerShape> shapes = kv_layer_shapes(draft);
  for (size_t layer = 0; layer < shapes.size(); ++layer) {
    KvLayerShape& reader = shapes[layer];
    if (!draft.layers[layer].attention.reads_target) continue;
    for (size_t source = target.layers.size(); source-- > 0;) {
      const AttentionConfig& owner = target.layers[source].attention;
      if (owner.kind.index() != reader.kind.index() || owner.kv_source >= 0) continue;
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
    const AttentionConfig& owner = target.layers[static_cast<size_t>(reader.source)].attention;
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

Decoder::Decoder(std::shared_ptr<const Model> model, const KvLayout& layout, KvOwner role,
                 std::byte* kv_pool, int32_t max_positions, DeviceArena& arena,
                 const SharedWeights& shared, int32_t rope_offset)
    : model_(std::move(model)),
      layer_to_group_(layout.layer_to_group(role)),
      rope_offset_(rope_offset),
      embed_(weights().embed != nullptr ? weights().embed : shared.embed),
      lm_head_(weights().lm_head.is_present() ? weights().lm_head : shared.lm_head) {
  const DecoderConfig& c = config();
  PACELINE_CHECK(embed_ != nullptr && lm_head_.is_present(), c.name,
                 " needs the embedding or lm_head of a target");
  PACELINE_CHECK(layer_to_group_.size() == c.layers.size());
  for (size_t layer = 0; layer < c.layers.size(); ++layer) {
    const KvGroup& group = layout.groups[layer_to_group_[layer]];
    const int64_t k_offset = layout.layer_index(role)[layer] * group.layer_bytes;
    kv_.push_back({.base = kv_pool,
                   .block_bytes = group.block_bytes,
                   .k_offset = k_offset,
                   .v_offset = k_offset + group.layer_bytes / 2,
                   .block_size = group.block_size,
                   .dtype = group.dtype});
  }
  const bool has_mixture = std::any_of(c.layers.begin(), c.layers.end(), [](const auto& layer) {
    return std::holds_alternative<MoeMlp>(layer.mlp);
  });
  if (has_mixture) expert_counters_ = arena.allocate<int64_t>(2, "expert counters");
  const int64_t num_positions = int64_t{max_positions} + rope_offset;
  for (const RopeConfig& rope : c.ropes) {
    const auto half = static_cast<int64_t>(rope.inv_freq.size());
    std::vector<float> cos(static_cast<size_t>(num_positions * half));
    std::vector<float> sin(cos.size());
    for (int64_t position = 0; position < num_positions; ++position) {
      for (int64_t i = 0; i < half; ++i) {
        // The angle is rounded to float32 first, as every reference implementation does.
        const float angle = static_cast<float>(position) * rope.inv_freq[i];
        cos[position * half + i] = std::cos(angle) * rope.scale;
        sin[position * half + i] = std::sin(angle) * rope.scale;
      }
    }
    ropes_.push_back({arena.allocate_copy<float>(cos, "rotary tables"),
                      arena.allocate_copy<float>(sin, "rotary tables")});
  }
}

template <class Ctx>
void Decoder::attention(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                        std::span<const GroupMetadata> groups,
                        const Activations& activations) const {
  const DecoderConfig& c = config();
  const AttentionConfig& a = c.layers[layer].attention;
  const LayerWeights& lw = weights().layers[layer];
  const GroupMetadata& metadata = groups[layer_to_group_[layer]];

  project(ctx, row_count(rows), lw.qkv,
          {.x = input,
           .y = activations.qkv,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
  ctx.run(qk_norm_rope_append, QkNormRopeAppendParams{.num_rows = rows.num_rows,
                                                      .max_rows = rows.capacity,
                                                      .qkv = activations.qkv,
                                                      .positions = rows.positions,
                                                      .slot_mapping = slot_mapping(metadata),
                                                      .q_norm = lw.q_norm,
                                                      .k_norm = lw.k_norm,
                                                      .norm_weight_offset = c.norm_weight_offset,
                                                      .norm_eps = c.norm_eps,
                                                      .rope_cos = ropes_[a.rope].cos,
                                                      .rope_sin = ropes_[a.rope].sin,
                                                      .kv = kv_[layer],
                                                      .num_qo_heads = a.num_qo_heads,
                                                      .num_kv_heads = a.num_kv_heads,
                                                      .head_dim = a.head_dim,
                                                      .qkv_dtype = activations.dtype,
                                                      .kv_inputs = kv_inputs(a),
                                                      .has_v_norm = a.has_v_norm,
                                                      .position_offset = rope_offset_});
  const auto attend = [&](const int32_t* kv_begin, const int32_t* kv_end, const BlockTable& table) {
    ctx.run(paged_attention, PagedAttentionParams{.num_rows = rows.num_rows,
                                                  .max_rows = rows.capacity,
                                                  .qkv = activations.qkv,
                                                  .seq_slot = rows.seq_slot,
                                                  .kv_begin = kv_begin,
                                                  .kv_end = kv_end,
                                                  .block_table = table.blocks,
                                                  .block_table_stride = table.stride,
                                                  .kv = kv_[layer],
                                                  .scale = a.scale,
                                                  .soft_cap = a.soft_cap,
                                                  .sinks = lw.sinks,
                                                  .y = activations.attention,
                                                  .num_qo_heads = a.num_qo_heads,
                                                  .num_kv_heads = a.num_kv_heads,
                                                  .head_dim = a.head_dim,
                                                  .dtype = activations.dtype,
                                                  .num_seqs = rows.num_seqs,
                                                  .row_indptr = rows.row_indptr,
                                                  .max_seqs = rows.max_seqs,
                                                  .max_rows_per_seq = rows.max_rows_per_seq,
                                                  .kv_inputs = kv_inputs(a)});
  };
  std::visit(Overloaded{[&](const FullMetadata& full) { attend(nullptr, full.kv_end, full.table); },
                        [&](const SlidingMetadata& sliding) {
                          attend(sliding.kv_begin, sliding.kv_end, sliding.table);
                        },
                        [&](const WindowListMetadata& list) {
                          ctx.run(list_attention,
                                  ListAttentionParams{.num_rows = rows.num_rows,
                                                      .max_rows = rows.capacity,
                                                      .qkv = activations.qkv,
                                                      .window_slots = list.window_slots,
                                                      .window_count = list.window_count,
                                                      .window = list.window,
                                                      .kv = kv_[layer],
                                                      .scale = a.scale,
                                                      .sinks = lw.sinks,
                                                      .y = activations.attention,
                                                      .num_qo_heads = a.num_qo_heads,
                                                      .num_kv_heads = a.num_kv_heads,
                                                      .head_dim = a.head_dim,
                                                      .dtype = activations.dtype,
                                                      .kv_inputs = kv_inputs(a)});
                        }},
             metadata);
  project(ctx, row_count(rows), lw.o,
          {.x = activations.attention,
           .y = activations.branch,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
}

template <class Ctx>
void Decoder::mlp(Ctx& ctx, int32_t layer, const PassRows& rows,
                  const Activations& activations) const {
  const LayerWeights& lw = weights().layers[layer];
  std::visit(Overloaded{[&](const DenseMlp& m) {
                          dense_mlp(ctx, m, std::get<DenseMlpWeights>(lw.mlp), rows, activations);
                        },
                        [&](const MoeMlp& m) {
                          mixture(ctx, m, std::get<MoeMlpWeights>(lw.mlp), rows, activations);
                        }},
             config().layers[layer].mlp);
}

template <class Ctx>
void Decoder::dense_mlp(Ctx& ctx, const DenseMlp& m, const DenseMlpWeights& w, const PassRows& rows,
                        const Activations& activations) const {
  project(ctx, row_count(rows), w.gate_up,
          {.x = activations.normed,
           .y = activations.gate_up,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
  ctx.run(gated_activation, GatedActivationParams{.num_rows = rows.num_rows,
                                                  .max_rows = rows.capacity,
                                                  .x = activations.gate_up,
                                                  .y = activations.activated,
                                                  .intermediate = m.intermediate,
                                                  .activation = m.activation,
                                                  .dtype = activations.dtype,
                                                  .alpha = m.alpha,
                                                  .limit = m.limit});
  project(ctx, row_count(rows), w.down,
          {.x = activations.activated,
           .y = activations.branch,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
}

template <class Ctx>
void Decoder::mixture(Ctx& ctx, const MoeMlp& m, const MoeMlpWeights& w, const PassRows& rows,
                      const Activations& activations) const {
  const ExpertActivations& a = activations.experts;
  const DType dtype = activations.dtype;
  const int32_t max_expert_rows = rows.capacity * m.top_k;
  project(ctx, row_count(rows), w.router,
          {.x = activations.normed, .y = a.logits, .x_dtype = dtype, .y_dtype = DType::kFloat32});
  ctx.run(route_and_sort, RouteAndSortParams{.route = {.num_rows = rows.num_rows,
                                                       .max_rows = rows.capacity,
                                                       .logits = a.logits,
                                                       .num_experts = m.num_experts,
                                                       .top_k = m.top_k,
                                                       .rule = m.router,
                                                       .experts = a.experts,
                                                       .weights = a.weights},
                                             .sort = {.num_rows = rows.num_rows,
                                                      .max_rows = rows.capacity,
                                                      .experts = a.experts,
                                                      .num_experts = m.num_experts,
                                                      .top_k = m.top_k,
                                                      .expert_begin = a.expert_begin,
                                                      .source_row = a.source_row,
                                                      .expert_row = a.expert_row,
                                                      .counters = expert_counters_}});
  const auto multiply = [&](const ExpertLinears& linears, const void* x, const int32_t* x_rows,
                            int32_t num_x_rows, void* y) {
    const WeightMatrix& first = linears.weight.first;
    ctx.run(expert_gemm, ExpertGemmParams{.expert_begin = a.expert_begin,
                                          .max_rows = max_expert_rows,
                                          .x = x,
                                          .x_stride = first.k,
                                          .x_rows = x_rows,
                                          .num_x_rows = num_x_rows,
                                          .weight = linears.weight,
                                          .bias = linears.bias,
                                          .y = y,
                                          .y_stride = first.n,
                                          .x_dtype = dtype,
                                          .y_dtype = dtype});
  };
  multiply(w.gate_up, activations.normed, a.source_row, rows.capacity, activations.gate_up);
  ctx.run(gated_activation, GatedActivationParams{.num_rows = a.expert_begin + m.num_experts,
                                                  .max_rows = max_expert_rows,
                                                  .x = activations.gate_up,
                                                  .y = activations.activated,
                                                  .intermediate = m.expert.intermediate,
                                                  .activation = m.expert.activation,
                                                  .dtype = dtype,
                                                  .alpha = m.expert.alpha,
                                                  .limit = m.expert.limit,
                                                  .is_interleaved = m.is_interleaved});
  multiply(w.down, activations.activated, /*x_rows=*/nullptr, max_expert_rows, a.output);
  ctx.run(combine_experts, CombineExpertsParams{.num_rows = rows.num_rows,
                                                .max_rows = rows.capacity,
                                                .top_k = m.top_k,
                                                .x = a.output,
                                                .expert_row = a.expert_row,
                                                .weights = a.weights,
                                                .y = activations.branch,
                                                .hidden = config().hidden,
                                                .dtype = dtype});
}

template <class Ctx>
void Decoder::make_per_layer_inputs(Ctx& ctx, const PassRows& rows,
                                    const Activations& activations) const {
  const DecoderConfig& c = config();
  const PerLayerInputsConfig& inputs = c.per_layer_inputs;
  const DecoderWeights& w = model_->weights;
  const auto num_layers = static_cast<int32_t>(c.layers.size());
  // Converts the embeddings to the dtype of activations, without a norm.
  ctx.run(rms_norm, RmsNormParams{.num_rows = rows.num_rows,
                                  .max_rows = rows.capacity,
                                  .x = activations.residual,
                                  .x_stride = c.hidden,
                                  .residual = nullptr,
                                  .weight = nullptr,
                                  .weight_offset = 0,
                                  .eps = c.norm_eps,
                                  .y = activations.normed,
                                  .y_stride = c.hidden,
                                  .hidden = c.hidden,
                                  .y_dtype = activations.dtype});
  project(ctx, row_count(rows), w.per_layer_proj,
          {.x = activations.normed,
           .y = activations.per_layer,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
  ctx.run(per_layer_inputs, PerLayerInputsParams{.num_rows = rows.num_rows,
                                                 .max_rows = rows.capacity,
                                                 .x = activations.per_layer,
                                                 .token_ids = rows.token_ids,
                                                 .table = w.per_layer_embed,
                                                 .table_dtype = w.dtype,
                                                 .vocab_size = inputs.vocab_size,
                                                 .weight = w.per_layer_norm,
                                                 .weight_offset = c.norm_weight_offset,
                                                 .eps = c.norm_eps,
                                                 .x_scale = inputs.proj_scale,
                                                 .table_scale = inputs.embed_scale,
                                                 .scale = inputs.scale,
                                                 .num_layers = num_layers,
                                                 .size = inputs.size,
                                                 .dtype = activations.dtype});
}

template <class Ctx>
void Decoder::per_layer_branch(Ctx& ctx, int32_t layer, const PassRows& rows,
                               const Activations& activations) const {
  const DecoderConfig& c = config();
  const PerLayerInputsConfig& inputs = c.per_layer_inputs;
  const LayerWeights& lw = weights().layers[layer];
  const auto num_layers = static_cast<int64_t>(c.layers.size());
  project(ctx, row_count(rows), lw.per_layer_gate,
          {.x = activations.normed,
           .y = activations.gate_up,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
  const int64_t offset = int64_t{layer} * inputs.size * dtype_bytes(activations.dtype);
  ctx.run(gated_activation,
          GatedActivationParams{.num_rows = rows.num_rows,
                                .max_rows = rows.capacity,
                                .x = activations.gate_up,
                                .y = activations.activated,
                                .intermediate = inputs.size,
                                .activation = inputs.activation,
                                .dtype = activations.dtype,
                                .up = static_cast<const std::byte*>(activations.per_layer) + offset,
                                .up_stride = num_layers * inputs.size});
  project(ctx, row_count(rows), lw.per_layer_proj,
          {.x = activations.activated,
           .y = activations.branch,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
}

template <class Ctx>
void Decoder::embed_tokens(Ctx& ctx, const PassRows& rows, const Activations& activations) const {
  const DecoderConfig& c = config();
  ctx.run(embed, EmbedParams{.num_rows = rows.num_rows,
                             .max_rows = rows.capacity,
                             .token_ids = rows.token_ids,
                             .table = embed_,
                             .table_dtype = weights().dtype,
                             .scale = c.embed_scale,
                             .y = activations.residual,
                             .vocab_size = c.vocab_size,
                             .hidden = c.embed_width()});
}

template <class Ctx>
void Decoder::forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                      const Activations& activations, const HiddenTaps& taps) const {
  embed_tokens(ctx, rows, activations);
  if (config().per_layer_inputs.size > 0) make_per_layer_inputs(ctx, rows, activations);
  run_layers(ctx, rows, groups, activations, /*first_input=*/nullptr, taps);
}

template <class Ctx>
void Decoder::run_layers(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                         const Activations& activations, const void* first_input,
                         const HiddenTaps& taps) const {
  const DecoderConfig& c = config();
  const DecoderWeights& w = model_->weights;
  const bool has_per_layer = c.per_layer_inputs.size > 0;
  const bool taps_layers = taps.data != nullptr && !taps.aux_layers.empty();
  void* const last_tap = taps.aux_layers.empty() ? taps.data : nullptr;
  // Each norm first adds the output of the previous branch to the residual: normalised if the model
  // has norms after its branches, and with the residual scaled at the end of a layer. The first
  // norm has no branch to add. The last one only adds, unless its output is tapped. Without a
  // weight, y is a copy.
  struct Branch {
    const float* norm;   // norm after the branch, or null
    const float* scale;  // scale of the residual after the branch is added, or null
  };
  const auto add = [&](const Branch* branch, const float* weight, void* y) {
    const bool has_branch = branch != nullptr;
    ctx.run(rms_norm, RmsNormParams{.num_rows = rows.num_rows,
                                    .max_rows = rows.capacity,
                                    .x = has_branch ? activations.branch : activations.residual,
                                    .x_stride = c.hidden,
                                    .residual = has_branch ? activations.residual : nullptr,
                                    .weight = weight,
                                    .weight_offset = c.norm_weight_offset,
                                    .eps = c.norm_eps,
                                    .y = y,
                                    .y_stride = c.hidden,
                                    .hidden = c.hidden,
                                    .x_weight = has_branch ? branch->norm : nullptr,
                                    .residual_scale = has_branch ? branch->scale : nullptr,
                                    .x_dtype = has_branch ? activations.dtype : DType::kFloat32,
                                    .y_dtype = activations.dtype});
  };
  // At this point the residual stream is the input of the layer.
  const auto tap_layer = [&](int32_t layer) {
    const auto found = std::find(taps.aux_layers.begin(), taps.aux_layers.end(), layer);
    if (found == taps.aux_layers.end()) return;
    const int64_t offset = (found - taps.aux_layers.begin()) * int64_t{c.hidden};
    ctx.run(copy_rows, CopyRowsParams{.num_rows = rows.num_rows,
                                      .max_rows = rows.capacity,
                                      .row_index = nullptr,
                                      .x = activations.residual,
                                      .x_stride = c.hidden,
                                      .y = static_cast<std::byte*>(taps.data) +
                                           offset * dtype_bytes(activations.dtype),
                                      .y_stride = taps.width,
                                      .width = c.hidden,
                                      .y_dtype = activations.dtype});
  };
  Branch last = {};
  for (int32_t layer = 0; layer < static_cast<int32_t>(c.layers.size()); ++layer) {
    const LayerWeights& lw = w.layers[layer];
    const bool has_input = layer == 0 && first_input != nullptr;
    if (!has_input) add(layer > 0 ? &last : nullptr, lw.attn_norm, activations.normed);
    if (taps_layers) tap_layer(layer);
    capture_layer(ctx, taps.captures, layer, activations.residual, c.hidden);
    attention(ctx, layer, has_input ? first_input : activations.normed, rows, groups, activations);
    const Branch attended = {.norm = lw.attn_post_norm, .scale = nullptr};
    add(&attended, lw.mlp_norm, activations.normed);
    mlp(ctx, layer, rows, activations);
    last = {.norm = lw.mlp_post_norm, .scale = nullptr};
    if (has_per_layer) {
      add(&last, /*weight=*/nullptr, activations.normed);
      per_layer_branch(ctx, layer, rows, activations);
      last = {.norm = lw.per_layer_norm, .scale = nullptr};
    }
    last.scale = lw.scale;
  }
  add(&last, last_tap != nullptr ? w.final_norm : nullptr, last_tap);
}

template <class Ctx>
void Decoder::capture_output(Ctx& ctx, const PassRows& rows, const Activations& activations,
                             std::span<const HiddenCapture> captures) const {
  const DecoderConfig& c = config();
  const auto last = static_cast<int32_t>(c.layers.size());
  const bool is_wanted = std::any_of(captures.begin(), captures.end(), [&](const auto& capture) {
    return std::find(capture.layers.begin(), capture.layers.end(), last) != capture.layers.end();
  });
  if (!is_wanted) return;
  normalise(ctx, row_count(rows), c,
            {.x = activations.residual,
             .x_stride = c.hidden,
             .weight = weights().final_norm,
             .y = activations.residual,
             .y_stride = c.hidden,
             .hidden = c.hidden});
  capture_layer(ctx, captures, last, activations.residual, c.hidden);
}

template <class Ctx>
void Decoder::output_rows(Ctx& ctx, const int32_t* num_logit_rows, int32_t max_logit_rows,
                          const int32_t* row_index, const Activations& activations,
                          float* gathered) const {
  const DecoderConfig& c = config();
  const DecoderWeights& w = model_->weights;
  ctx.run(gather_rows, GatherRowsParams{.num_rows = num_logit_rows,
                                        .max_rows = max_logit_rows,
                                        .row_index = row_index,
                                        .x = activations.residual,
                                        .y = gathered,
                                        .hidden = c.hidden});
  if (w.final_norm != nullptr) {
    normalise(ctx, {.num_rows = num_logit_rows, .max_rows = max_logit_rows}, c,
              {.x = gathered,
               .x_stride = c.hidden,
               .weight = w.final_norm,
               .y = activations.normed,
               .y_stride = c.hidden,
               .hidden = c.hidden,
               .y_dtype = activations.dtype});
  } else {
    ctx.run(copy_rows, CopyRowsParams{.num_rows = num_logit_rows,
                                      .max_rows = max_logit_rows,
                                      .row_index = nullptr,
                                      .x = gathered,
                                      .x_stride = c.hidden,
                                      .y = activations.normed,
                                      .y_stride = c.hidden,
                                      .width = c.hidden,
                                      .y_dtype = activations.dtype});
  }
}

template <class Ctx>
void Decoder::logits(Ctx& ctx, const int32_t* num_logit_rows, int32_t max_logit_rows,
                     const int32_t* row_index, const Activations& activations, float* gathered,
                     float* logits) const {
  const DecoderConfig& c = config();
  output_rows(ctx, num_logit_rows, max_logit_rows, row_index, activations, gathered);
  project(ctx, {.num_rows = num_logit_rows, .max_rows = max_logit_rows}, lm_head_,
          {.x = activations.normed,
           .y = logits,
           .x_dtype = activations.dtype,
           .y_dtype = DType::kFloat32});
  cap_logits(ctx, {.num_rows = num_logit_rows, .max_rows = max_logit_rows}, c, logits);
}

// Instantiates every member template for one context.
#define PACELINE_INSTANTIATE_DECODER(Ctx)                                                       \
  template void Decoder::embed_tokens<Ctx>(Ctx&, const PassRows&, const Activations&) const;    \
  template void Decoder::run_layers<Ctx>(Ctx&, const PassRows&, std::span<const GroupMetadata>, \
                                         const Activations&, const void*, const HiddenTaps&)    \
      const;                                                                                    \
  template void Decoder::forward<Ctx>(Ctx&, const PassRows&, std::span<const GroupMetadata>,    \
                                      const Activations&, const HiddenTaps&) const;             \
  template void Decoder::capture_output<Ctx>(Ctx&, const PassRows&, const Activations&,         \
                                             std::span<const HiddenCapture>) const;             \
  template void Decoder::output_rows<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,        \
                                          const Activations&, float*) const;                    \
  template void Decoder::logits<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,             \
                                     const Activations&, float*, float*) const;
PACELINE_INSTANTIATE_DECODER(CpuContext)
#ifdef PACELINE_CUDA
PACELINE_INSTANTIATE_DECODER(CudaContext)
#endif
#undef PACELINE_INSTANTIATE_DECODER

}  // namespace paceline
