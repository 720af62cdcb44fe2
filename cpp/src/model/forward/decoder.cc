// SPDX-License-Identifier: Apache-2.0
#include "model/forward/decoder.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <variant>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "device/device_memory.h"
#include "metadata/pass_rows.h"
#include "model/description/kv_shapes.h"
#include "model/forward/layer_ops.h"
#include "model/forward/residual.h"
#include "ops/block_conv.h"
#include "ops/streams.h"

namespace paceline {
namespace {

// The convolution of x [rows, hidden], of a branch's input or of its output.
ConvolveBlocksParams convolution(const DecoderConfig& config, const BlockConvWeights& weights,
                                 const PassRows& rows, const Activations& activations, void* x,
                                 bool is_output) {
  const BlockConvConfig& conv = config.drafter->block.conv;
  const int64_t outputs = conv.outputs(config.hidden);
  return {.num_seqs = rows.num_seqs,
          .max_seqs = rows.max_seqs,
          .row_indptr = rows.row_indptr,
          .max_rows_per_seq = rows.max_rows_per_seq,
          .x = x,
          .base = weights.base + (is_output ? int64_t{conv.taps} * config.hidden : 0),
          .delta = activations.conv_delta + (is_output ? outputs / 2 : 0),
          .delta_stride = outputs,
          .num_taps = conv.taps,
          .group = conv.group,
          .hidden = config.hidden,
          .dtype = activations.dtype};
}

// Copies the residual stream of the rows of all captures that have `layer`.
template <class Ctx>
void capture_layer(Ctx& ctx, std::span<const HiddenCapture> captures, int32_t layer,
                   const float* residual, int64_t hidden) {
  for (const HiddenCapture& capture : captures) {
    if (capture.to == nullptr) continue;
    for (size_t i = 0; i < capture.layers.size(); ++i) {
      if (capture.layers[i] != layer) continue;
      copy_on_device(ctx, capture.to + static_cast<int64_t>(i) * capture.layer_stride,
                     residual + capture.first_row * hidden,
                     capture.num_rows * hidden * static_cast<int64_t>(sizeof(float)));
    }
  }
}

// What the walk over layers asks of the kind of a branch.
struct BranchTraits {
  bool takes_norm;
  const Linear* last;
};
template <class Config, class Weights>
BranchTraits branch_traits(const Config& config, const Weights& weights) {
  return std::visit(
      [&]<class Kind>(const Kind& kind) -> BranchTraits {
        const auto& of_kind = std::get<WeightsOf<Kind>>(weights);
        return {.takes_norm = takes_norm(kind, of_kind), .last = last_product(kind, of_kind)};
      },
      config);
}

}  // namespace

Decoder::Decoder(std::shared_ptr<const Model> model, const KvLayout& layout, KvOwner role,
                 std::byte* kv_pool, int32_t max_positions, DeviceArena& arena,
                 const SharedWeights& shared, int32_t rope_offset)
    : model_(std::move(model)),
      first_store_(kv_stores(model_->config).first),
      store_to_group_(layout.layer_to_group(role)),
      rope_offset_(rope_offset),
      embed_(weights().embed != nullptr ? weights().embed : shared.embed),
      lm_head_(weights().lm_head.is_present() ? weights().lm_head : shared.lm_head) {
  const DecoderConfig& c = config();
  PACELINE_CHECK(embed_ != nullptr && lm_head_.is_present(), c.name,
                 " needs the embedding or lm_head of a target");
  PACELINE_CHECK(store_to_group_.size() == kv_layer_shapes(c).size());
  for (size_t store = 0; store < store_to_group_.size(); ++store) {
    const KvGroup& group = layout.groups[store_to_group_[store]];
    const int64_t k_offset = layout.layer_index(role)[store] * group.layer_bytes;
    const int64_t v_offset = k_offset + group.layer_bytes * (kv_parts(group.kind) - 1) / 2;
    kv_.push_back({.base = kv_pool,
                   .block_bytes = group.block_bytes,
                   .k_offset = k_offset,
                   .v_offset = v_offset,
                   .block_size = group.block_size,
                   .dtype = group.dtype});
  }
  first_store_.push_back(static_cast<int32_t>(kv_.size()));
  const bool has_mixture = std::ranges::any_of(c.layers, [](const LayerConfig& layer) {
    return std::visit([](const auto& mlp) { return mlp.has_experts(); }, layer.mlp);
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

AttentionPass Decoder::attention_pass(int32_t layer, const void* input, const PassRows& rows,
                                      std::span<const GroupMetadata> groups,
                                      const Activations& activations,
                                      const OutputRows* output) const {
  const auto at = static_cast<size_t>(layer);
  const auto first = static_cast<size_t>(first_store_[at]);
  const size_t count = static_cast<size_t>(first_store_[at + 1]) - first;
  return {.config = config(),
          .input = input,
          .rows = rows,
          .groups = groups,
          .activations = activations,
          .output = output,
          .stores = std::span(kv_).subspan(first, count),
          .store_groups = std::span(store_to_group_).subspan(first, count),
          .rope_tables = ropes_,
          .rope_offset = rope_offset_};
}

template <class Ctx>
void Decoder::attention(Ctx& ctx, int32_t layer, const AttentionPass& pass) const {
  std::visit(
      [&]<class Kind>(const Kind& kind) {
        run_attention(ctx, kind, std::get<WeightsOf<Kind>>(weights().layers[layer].attention),
                      pass);
      },
      config().layers[layer].attention);
}

template <class Ctx>
void Decoder::write_keys_values(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                                std::span<const GroupMetadata> groups,
                                const Activations& activations) const {
  const AttentionPass pass =
      attention_pass(layer, input, rows, groups, activations, /*output=*/nullptr);
  std::visit(
      [&]<class Kind>(const Kind& kind) {
        if constexpr (Kind::kWritesContext) {
          paceline::write_keys_values(
              ctx, kind, std::get<WeightsOf<Kind>>(weights().layers[layer].attention), pass);
        } else {
          PACELINE_CHECK(false, "this kind of layer has no context");
        }
      },
      config().layers[layer].attention);
}

template <class Ctx>
std::optional<CombineExpertsParams> Decoder::mlp(Ctx& ctx, int32_t layer, const PassRows& rows,
                                                 const Activations& activations,
                                                 const BranchEnds& ends) const {
  const MlpPass pass = {.config = config(),
                        .rows = rows,
                        .activations = activations,
                        .expert_counters = expert_counters_,
                        .ends = ends};
  return std::visit(
      [&]<class Kind>(const Kind& kind) {
        return run_mlp(ctx, kind, std::get<WeightsOf<Kind>>(weights().layers[layer].mlp), pass);
      },
      config().layers[layer].mlp);
}

template <class Ctx>
float* Decoder::residual_of(const Ctx& ctx, const Linear* last, const Branch& branch,
                            const BlockConvWeights& conv, const PassRows& rows,
                            const Activations& activations) const {
  const bool is_sum = config().streams.count == 1 && branch.norm == nullptr &&
                      branch.scale == nullptr && conv.base == nullptr;
  if (!is_sum || last == nullptr) return nullptr;
  const GemmParams product = gemm_params(row_count(rows), *last,
                                         {.x = nullptr,
                                          .y = activations.branch,
                                          .x_dtype = activations.dtype,
                                          .y_dtype = activations.dtype});
  return adds_in_product(ctx, product) ? activations.residual : nullptr;
}

template <class Ctx>
void Decoder::convolve_input(Ctx& ctx, const BlockConvWeights& weights, const PassRows& rows,
                             const Activations& activations) const {
  if (weights.base == nullptr) return;
  PACELINE_CHECK(activations.conv_delta != nullptr, "this pass is not over blocks");
  project(ctx, row_count(rows), weights.kernel,
          {.x = activations.normed,
           .y = activations.conv_delta,
           .x_dtype = activations.dtype,
           .y_dtype = DType::kFloat32});
  ctx.run(convolve_blocks, convolution(config(), weights, rows, activations, activations.normed,
                                       /*is_output=*/false));
}

template <class Ctx>
void Decoder::convolve_output(Ctx& ctx, const BlockConvWeights& weights, const PassRows& rows,
                              const Activations& activations) const {
  if (weights.base == nullptr) return;
  ctx.run(convolve_blocks, convolution(config(), weights, rows, activations, activations.branch,
                                       /*is_output=*/true));
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
                             .y = single_residual(activations),
                             .vocab_size = c.vocab_size,
                             .hidden = c.embed_width()});
}

template <class Ctx>
void Decoder::spread_embeddings(Ctx& ctx, const PassRows& rows, const Activations& activations,
                                bool adds) const {
  const DecoderConfig& c = config();
  if (c.streams.count == 1) return;
  ctx.run(spread_streams, SpreadStreamsParams{.num_rows = rows.num_rows,
                                              .max_rows = rows.capacity,
                                              .x = activations.embedded,
                                              .y = activations.residual,
                                              .num_streams = c.streams.count,
                                              .hidden = c.hidden,
                                              .adds = adds});
}

template <class Ctx>
void Decoder::forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                      const Activations& activations, const HiddenTaps& taps,
                      const OutputRows* output) const {
  embed_tokens(ctx, rows, activations);
  spread_embeddings(ctx, rows, activations, /*adds=*/false);
  if (config().per_layer_inputs.size > 0) make_per_layer_inputs(ctx, rows, activations);
  run_layers(ctx, rows, groups, activations, /*first_input=*/nullptr, taps, output);
}

bool Decoder::picks_output() const {
  const DecoderConfig& c = config();
  // Per-layer inputs and several streams have rows of their own for every layer, and a convolution
  // reads other rows.
  const bool is_convolved = c.drafter && c.drafter->block.conv.is_used();
  return !is_convolved && c.streams.count == 1 && c.per_layer_inputs.size == 0 &&
         std::visit([](const auto& attention) { return attention.kPicksRows; },
                    c.layers.back().attention);
}

template <class Ctx>
void Decoder::run_layers(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                         const Activations& activations, const void* first_input,
                         const HiddenTaps& taps, const OutputRows* output) const {
  const DecoderConfig& c = config();
  const DecoderWeights& w = model_->weights;
  const bool has_per_layer = c.per_layer_inputs.size > 0;
  const bool taps_layers = taps.data != nullptr && !taps.aux_layers.empty();
  void* const last_tap = taps.aux_layers.empty() ? taps.data : nullptr;
  const Residual<Ctx> residual(ctx, row_count(rows), c, activations);
  PACELINE_CHECK(output == nullptr || (picks_output() && last_tap == nullptr), c.name,
                 " has readers of the output of all rows");
  // At this point the residual stream is the input of the layer.
  const auto tap_layer = [&](int32_t layer) {
    const auto found = std::find(taps.aux_layers.begin(), taps.aux_layers.end(), layer);
    if (found == taps.aux_layers.end()) return;
    const bool is_mean = taps.averages_streams && c.streams.count > 1;
    const int64_t offset =
        (found - taps.aux_layers.begin()) * (is_mean ? c.hidden : c.residual_width());
    void* const to = static_cast<std::byte*>(taps.data) + offset * dtype_bytes(activations.dtype);
    if (is_mean) {
      residual.average_to(to, taps.width);
    } else {
      residual.copy_to(to, taps.width);
    }
  };
  Branch last = {};
  bool is_added = true;  // `last` is part of the residual
  const auto num_layers = static_cast<int32_t>(c.layers.size());
  // The layers of which all rows are computed, and then the last one.
  const int32_t num_whole = output != nullptr ? num_layers - 1 : num_layers;
  // Makes the input of a branch, or leaves its norm to the branch, which joins it with its product.
  const auto make_input = [&](const Branch* branch, const BranchInput& next, bool takes_norm) {
    std::optional<RmsNormParams> norm;
    if (branch == nullptr && takes_norm && c.streams.count == 1) {
      norm = residual.join_params(branch, next);
    } else {
      residual.join(branch, next);
    }
    return norm;
  };
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    const LayerWeights& lw = w.layers[layer];
    const bool has_input = layer == 0 && first_input != nullptr;
    const BranchTraits traits = branch_traits(c.layers[layer].attention, lw.attention);
    BranchEnds ends;
    if (!has_input) {
      ends.norm = make_input(is_added ? nullptr : &last,
                             {.norm = lw.attn_norm, .y = activations.normed, .mix = lw.attn_mix},
                             traits.takes_norm && lw.attn_conv.base == nullptr);
    }
    if (taps_layers) tap_layer(layer);
    capture_layer(ctx, taps.captures, layer, activations.residual, c.hidden);
    convolve_input(ctx, lw.attn_conv, rows, activations);
    const void* const input = has_input ? first_input : activations.normed;
    Branch attended = {.norm = lw.attn_post_norm, .scale = nullptr};
    // A convolution reads the output of a branch before it joins.
    if (lw.attn_conv.base == nullptr) ends.exchange = &attended.exchange;
    AttentionPass pass = attention_pass(layer, input, rows, groups, activations,
                                        layer == num_whole ? output : nullptr);
    if (layer == num_whole) {
      pass.ends = ends;
      attention(ctx, layer, pass);
      finish_rows(ctx, layer, attended, *output, activations);
      return;
    }
    ends.residual = residual_of(ctx, traits.last, attended, lw.attn_conv, rows, activations);
    pass.ends = ends;
    attention(ctx, layer, pass);
    convolve_output(ctx, lw.attn_conv, rows, activations);
    const BranchTraits mlp_traits = branch_traits(c.layers[layer].mlp, lw.mlp);
    BranchEnds mlp_ends;
    mlp_ends.norm = make_input(ends.residual != nullptr ? nullptr : &attended,
                               {.norm = lw.mlp_norm, .y = activations.normed, .mix = lw.mlp_mix},
                               mlp_traits.takes_norm && lw.mlp_conv.base == nullptr);
    convolve_input(ctx, lw.mlp_conv, rows, activations);
    last = {.norm = lw.mlp_post_norm, .scale = has_per_layer ? nullptr : lw.scale};
    if (lw.mlp_conv.base == nullptr) mlp_ends.exchange = &last.exchange;
    mlp_ends.residual =
        has_per_layer ? nullptr
                      : residual_of(ctx, mlp_traits.last, last, lw.mlp_conv, rows, activations);
    last.places = mlp(ctx, layer, rows, activations, mlp_ends);
    is_added = mlp_ends.residual != nullptr;
    convolve_output(ctx, lw.mlp_conv, rows, activations);
    if (has_per_layer) {
      residual.join(&last, {.y = activations.normed});
      per_layer_branch(ctx, layer, rows, activations);
      last = {.norm = lw.per_layer_norm, .scale = lw.scale};
    }
  }
  if (c.streams.count > 1) {
    residual.join(&last, {});
    if (taps_layers) tap_layer(num_layers);
    if (last_tap != nullptr) residual.copy_to(last_tap, taps.width);
  } else if (!is_added || last_tap != nullptr) {
    residual.join(is_added ? nullptr : &last,
                  {.norm = last_tap != nullptr ? w.final_norm : nullptr, .y = last_tap});
  }
}

template <class Ctx>
void Decoder::finish_rows(Ctx& ctx, int32_t layer, const Branch& attended, const OutputRows& output,
                          const Activations& activations) const {
  const DecoderConfig& c = config();
  const LayerWeights& lw = weights().layers[layer];
  ctx.run(gather_rows, GatherRowsParams{.num_rows = output.rows.num_rows,
                                        .max_rows = output.rows.capacity,
                                        .row_index = output.row_index,
                                        .x = activations.residual,
                                        .y = output.residual,
                                        .hidden = c.hidden});
  Activations picked = activations;
  picked.residual = output.residual;
  const Residual<Ctx> residual(ctx, row_count(output.rows), c, picked);
  residual.join(&attended, {.norm = lw.mlp_norm, .y = picked.normed, .mix = {}});
  Branch last = {.norm = lw.mlp_post_norm, .scale = lw.scale};
  last.places = mlp(ctx, layer, output.rows, picked, {.exchange = &last.exchange});
  residual.join(&last, {});
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
  float* const output = single_residual(activations);
  Residual<Ctx>(ctx, row_count(rows), c, activations)
      .finish(weights(), activations.residual, output, DType::kFloat32);
  capture_layer(ctx, captures, last, output, c.hidden);
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
                                        .hidden = static_cast<int32_t>(c.residual_width())});
  if (w.final_norm != nullptr) {
    Residual<Ctx>(ctx, {.num_rows = num_logit_rows, .max_rows = max_logit_rows}, c, activations)
        .finish(w, gathered, activations.normed, activations.dtype);
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
                     float* logits, LogitIds of_ids) const {
  const DecoderConfig& c = config();
  output_rows(ctx, num_logit_rows, max_logit_rows, row_index, activations, gathered);
  const RowCount rows = {.num_rows = num_logit_rows, .max_rows = max_logit_rows};
  const auto exchange = project_own(ctx, rows, lm_head_,
                                    {.x = activations.normed,
                                     .y = logits,
                                     .x_dtype = activations.dtype,
                                     .y_dtype = DType::kFloat32},
                                    activations);
  LinearRange ids = {.first = 0, .count = c.num_logits()};
  if (exchange && of_ids == LogitIds::kOwn) {
    ids = exchange->columns.of(activations.ranks.rank);
  } else if (exchange) {
    ctx.run(gather_columns, *exchange);
  }
  cap_logits(ctx, rows, c, ids, logits);
}

// Instantiates every member template for one context.
#define PACELINE_INSTANTIATE_DECODER(Ctx)                                                        \
  template void Decoder::embed_tokens<Ctx>(Ctx&, const PassRows&, const Activations&) const;     \
  template void Decoder::spread_embeddings<Ctx>(Ctx&, const PassRows&, const Activations&, bool) \
      const;                                                                                     \
  template void Decoder::run_layers<Ctx>(Ctx&, const PassRows&, std::span<const GroupMetadata>,  \
                                         const Activations&, const void*, const HiddenTaps&,     \
                                         const OutputRows*) const;                               \
  template void Decoder::forward<Ctx>(Ctx&, const PassRows&, std::span<const GroupMetadata>,     \
                                      const Activations&, const HiddenTaps&, const OutputRows*)  \
      const;                                                                                     \
  template void Decoder::write_keys_values<Ctx>(Ctx&, int32_t, const void*, const PassRows&,     \
                                                std::span<const GroupMetadata>,                  \
                                                const Activations&) const;                       \
  template void Decoder::capture_output<Ctx>(Ctx&, const PassRows&, const Activations&,          \
                                             std::span<const HiddenCapture>) const;              \
  template void Decoder::output_rows<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,         \
                                          const Activations&, float*) const;                     \
  template void Decoder::logits<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,              \
                                     const Activations&, float*, float*, LogitIds) const;
PACELINE_INSTANTIATE_DECODER(CpuContext)
#ifdef PACELINE_CUDA
PACELINE_INSTANTIATE_DECODER(CudaContext)
#endif
#undef PACELINE_INSTANTIATE_DECODER

}  // namespace paceline
