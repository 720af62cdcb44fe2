// SPDX-License-Identifier: Apache-2.0
#include "model/forward/draft_head.h"

#include <algorithm>
#include <cstdlib>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "metadata/pass_rows.h"
#include "model/description/kv_shapes.h"
#include "model/forward/layer_ops.h"
#include "model/forward/residual.h"
#include "ops/streams.h"

namespace paceline {
DraftHead::DraftHead(std::shared_ptr<const Model> model, const Decoder& target,
                     const KvLayout& layout, std::byte* kv_pool, int32_t max_positions,
                     DeviceArena& arena, int32_t rope_offset)
    : decoder_(std::move(model), layout, KvOwner::kDraft, kv_pool, max_positions, arena,
               target.shareable_weights(), rope_offset) {
  PACELINE_CHECK(config().drafter.has_value(), config().name, " is not a draft head");
}

template <class Ctx>
void DraftHead::run_fc(Ctx& ctx, const PassRows& rows, const void* x, float* y,
                       const Activations& activations) const {
  project_all(ctx, row_count(rows), decoder_.weights().head.fc,
              {.x = x, .y = y, .x_dtype = activations.dtype, .y_dtype = DType::kFloat32},
              activations);
}

// [embedding ; hidden] -> fc -> the residual stream, and activations.normed as input of the
// attention. Both parts have the target's width, which but for Gemma 4 MTP is also the draft
// head's.
template <class Ctx>
void DraftHead::join_pair(Ctx& ctx, const PassRows& rows, const Activations& activations,
                          const DraftHeadInput& input) const {
  const DecoderConfig& c = config();
  const int32_t part = drafter().target_hidden;
  const int64_t width = 2 * int64_t{part};
  const auto copy = [&](const void* x, DType x_dtype, const int32_t* row_index, int64_t offset,
                        int64_t y_stride, int32_t columns) {
    ctx.run(copy_rows, CopyRowsParams{.num_rows = rows.num_rows,
                                      .max_rows = rows.capacity,
                                      .row_index = row_index,
                                      .x = x,
                                      .x_stride = columns,
                                      .y = element(activations.normed, offset, activations.dtype),
                                      .y_stride = y_stride,
                                      .width = columns,
                                      .x_dtype = x_dtype,
                                      .y_dtype = activations.dtype});
  };
  const std::vector<const float*>& norms = decoder_.weights().head.fc_norms;
  const auto normalise_half = [&](const void* x, DType x_dtype, int64_t x_stride, int32_t half) {
    normalise(ctx, row_count(rows), c,
              {.x = x,
               .x_stride = x_stride,
               .weight = norms[static_cast<size_t>(half)],
               .y = element(activations.normed, int64_t{half} * part, activations.dtype),
               .y_stride = width,
               .hidden = part,
               .x_dtype = x_dtype,
               .y_dtype = activations.dtype});
  };
  // Hidden states of the target are gathered first; the norm then works in place.
  void* const hidden = element(activations.normed, part, activations.dtype);
  if (norms.empty()) {
    copy(activations.residual, DType::kFloat32, nullptr, 0, width, part);
  } else {
    normalise_half(activations.residual, DType::kFloat32, part, 0);
  }
  if (input.feedback == nullptr) {
    copy(input.target_hidden, activations.dtype, input.hidden_rows, part, width, part);
    if (!norms.empty()) normalise_half(hidden, activations.dtype, width, 1);
  } else if (norms.empty()) {
    copy(input.feedback, DType::kFloat32, nullptr, part, width, part);
  } else {
    normalise_half(input.feedback, DType::kFloat32, part, 1);
  }
  run_fc(ctx, rows, activations.normed, activations.residual, activations);
  // If the first attention has a norm, run_layers computes its input instead.
  if (!drafter().has_attn_norm) {
    copy(activations.residual, DType::kFloat32, nullptr, 0, c.hidden, c.hidden);
  }
}

// fc norm(embedding) + fc_hidden norm(hidden of a stream) -> every residual stream.
template <class Ctx>
void DraftHead::join_streams(Ctx& ctx, const PassRows& rows, const Activations& activations,
                             const DraftHeadInput& input) const {
  const DecoderConfig& c = config();
  const DraftHeadWeights& w = decoder_.weights().head;
  const DType dtype = activations.dtype;
  const bool has_feedback = input.feedback != nullptr;
  normalise(ctx, row_count(rows), c,
            {.x = activations.embedded,
             .x_stride = c.hidden,
             .weight = w.fc_norms[0],
             .y = activations.normed,
             .y_stride = c.hidden,
             .hidden = c.hidden,
             .y_dtype = dtype});
  run_fc(ctx, rows, activations.normed, activations.embedded, activations);
  ctx.run(norm_streams, NormStreamsParams{.num_rows = rows.num_rows,
                                          .max_rows = rows.capacity,
                                          .row_index = has_feedback ? nullptr : input.hidden_rows,
                                          .x = has_feedback ? input.feedback : input.target_hidden,
                                          .weight = w.fc_norms[1],
                                          .eps = c.norm_eps,
                                          .y = activations.normed,
                                          .num_streams = c.streams.count,
                                          .hidden = c.hidden,
                                          .num_stream_rows = activations.num_stream_rows,
                                          .x_dtype = has_feedback ? DType::kFloat32 : dtype,
                                          .y_dtype = dtype});
  project_all(
      ctx, {.num_rows = activations.num_stream_rows, .max_rows = rows.capacity * c.streams.count},
      w.fc_hidden,
      {.x = activations.normed,
       .y = activations.residual,
       .x_dtype = dtype,
       .y_dtype = DType::kFloat32},
      activations);
  decoder_.spread_embeddings(ctx, rows, activations, /*adds=*/true);
}

// Writes the first layer's input [norm(embedding) ; norm(g)] to activations.normed, and the
// residual stream to which its attention is added.
template <class Ctx>
void DraftHead::join_eagle3(Ctx& ctx, const PassRows& rows, const Activations& activations,
                            const DraftHeadInput& input) const {
  const DecoderConfig& c = config();
  const DrafterConfig& d = drafter();
  const DraftHeadWeights& w = decoder_.weights().head;
  const auto norm = [&](const void* x, DType x_dtype, int64_t x_stride, const float* weight,
                        int64_t hidden, void* y, DType y_dtype, int64_t y_stride) {
    normalise(ctx, row_count(rows), c,
              {.x = x,
               .x_stride = x_stride,
               .weight = weight,
               .y = y,
               .y_stride = y_stride,
               .hidden = static_cast<int32_t>(hidden),
               .x_dtype = x_dtype,
               .y_dtype = y_dtype});
  };
  const DType dtype = activations.dtype;
  const int64_t width = 2 * int64_t{c.hidden};
  norm(activations.residual, DType::kFloat32, c.hidden, decoder_.weights().layers[0].attn_norm,
       c.hidden, activations.normed, dtype, width);
  const float* g = input.feedback;
  if (g == nullptr) {
    void* const aux = input.target_hidden;
    const int64_t fc_width = d.fc_width();
    if (w.fc_input_norm != nullptr) {
      norm(aux, dtype, fc_width, w.fc_input_norm, fc_width, aux, dtype, fc_width);
    }
    for (size_t i = 0; i < w.fc_norms.size(); ++i) {
      void* const part = element(aux, static_cast<int64_t>(i) * d.target_hidden, dtype);
      norm(part, dtype, fc_width, w.fc_norms[i], d.target_hidden, part, dtype, fc_width);
    }
    run_fc(ctx, rows, aux, activations.residual, activations);
    g = activations.residual;
  }
  norm(g, DType::kFloat32, c.hidden, w.hidden_norm, c.hidden,
       element(activations.normed, c.hidden, dtype), dtype, width);
  if (d.norm_before_residual) {
    norm(g, DType::kFloat32, c.hidden, w.hidden_norm, c.hidden, activations.residual,
         DType::kFloat32, c.hidden);
  } else if (g != activations.residual) {
    ctx.run(copy_rows, CopyRowsParams{.num_rows = rows.num_rows,
                                      .max_rows = rows.capacity,
                                      .row_index = nullptr,
                                      .x = g,
                                      .x_stride = c.hidden,
                                      .y = activations.residual,
                                      .y_stride = c.hidden,
                                      .width = c.hidden});
  }
}

template <class Ctx>
void DraftHead::forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                        const Activations& activations, const DraftHeadInput& input) const {
  decoder_.embed_tokens(ctx, rows, activations);
  const bool is_eagle3 = drafter().kind == DrafterKind::kEagle3;
  if (is_eagle3) {
    join_eagle3(ctx, rows, activations, input);
  } else if (config().streams.count > 1) {
    join_streams(ctx, rows, activations, input);
  } else {
    join_pair(ctx, rows, activations, input);
  }
  const bool has_input = is_eagle3 || !drafter().has_attn_norm;
  decoder_.run_layers(ctx, rows, groups, activations, has_input ? activations.normed : nullptr,
                      /*taps=*/{}, input.output);
}

template <class Ctx>
void DraftHead::cluster_rows(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                             const Activations& activations, const DraftHeadOutput& output) const {
  const DecoderConfig& c = config();
  const CentroidsConfig& centroids = drafter().centroids;
  const DecoderWeights& w = decoder_.weights();
  project(ctx, {.num_rows = num_rows, .max_rows = max_rows}, w.head.centroids,
          {.x = activations.normed,
           .y = output.centroid_scores,
           .x_dtype = activations.dtype,
           .y_dtype = DType::kFloat32});
  ctx.run(select_clusters, SelectClustersParams{.num_rows = num_rows,
                                                .max_rows = max_rows,
                                                .scores = output.centroid_scores,
                                                .num_clusters = centroids.count,
                                                .top = centroids.top,
                                                .clusters = output.clusters});
  ctx.run(cluster_logits, ClusterLogitsParams{.num_rows = num_rows,
                                              .max_rows = max_rows,
                                              .x = activations.normed,
                                              .clusters = output.clusters,
                                              .top = centroids.top,
                                              .token_ordering = w.head.token_ordering,
                                              .cluster_size = drafter().cluster_size(),
                                              .weight = decoder_.lm_head().weight.data,
                                              .logits = output.logits,
                                              .tokens = output.tokens,
                                              .hidden = c.hidden,
                                              .x_dtype = activations.dtype,
                                              .weight_dtype = decoder_.lm_head().weight.dtype});
  cap_logits(ctx, {.num_rows = num_rows, .max_rows = max_rows}, c,
             {.first = 0, .count = c.num_logits()}, output.logits);
}

template <class Ctx>
void DraftHead::logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                       const int32_t* row_index, const Activations& activations,
                       const DraftHeadOutput& output, LogitIds of_ids) const {
  const DecoderConfig& c = config();
  float* const feedback = output.feedback;
  if (drafter().centroids.count > 0) {
    decoder_.output_rows(ctx, num_rows, max_rows, row_index, activations, feedback);
    cluster_rows(ctx, num_rows, max_rows, activations, output);
  } else {
    decoder_.logits(ctx, num_rows, max_rows, row_index, activations, feedback, output.logits,
                    of_ids);
  }
  if (const Linear& linear = decoder_.weights().head.feedback; linear.is_present()) {
    // Projects the output of the final norm, in activations.normed, back to the target's width.
    project(ctx, {.num_rows = num_rows, .max_rows = max_rows}, linear,
            {.x = activations.normed,
             .y = feedback,
             .x_dtype = activations.dtype,
             .y_dtype = DType::kFloat32});
  }
  if (!drafter().norm_output) return;
  normalise(ctx, {.num_rows = num_rows, .max_rows = max_rows}, c,
            {.x = feedback,
             .x_stride = c.hidden,
             .weight = decoder_.weights().final_norm,
             .y = feedback,
             .y_stride = c.hidden,
             .hidden = c.hidden});
}

void check_draft_head(const Model& model, const Model& target) {
  const DecoderConfig& c = model.config;
  const DrafterConfig& d = *c.drafter;
  const DecoderConfig& t = target.config;
  if (d.target_hidden != t.hidden) {
    throw InvalidArgument(concat("the drafter ", c.name, " was made for a target of hidden size ",
                                 d.target_hidden, " and the target ", t.name, " has ", t.hidden,
                                 "; use the target that the drafter was trained for"));
  }
  if (c.streams.count != t.streams.count) {
    throw InvalidArgument(concat(
        "the drafter ", c.name, " has ", c.streams.count, " residual streams and the target ",
        t.name, " has ", t.streams.count, "; use the target that the drafter was trained for"));
  }
  static_cast<void>(draft_kv_layer_shapes(c, t));
  const auto num_layers = static_cast<int32_t>(t.layers.size());
  // The output of the last layer is the input of the one that would follow. With one stream, the
  // last layer may leave out rows (Decoder::picks_output).
  const int32_t last = t.streams.count > 1 ? num_layers : num_layers - 1;
  for (const int32_t layer : d.aux_layers) {
    if (layer > last) {
      throw InvalidArgument(concat("the drafter ", c.name, " reads the input of layer ", layer,
                                   " and the target ", t.name, " has ", num_layers,
                                   " layers; allowed: 0 to ", last));
    }
  }
  // Vocabularies that differ only in padding are compatible; tokens beyond either one are never
  // drafted.
  const int32_t larger = std::max(c.vocab_size, t.vocab_size);
  constexpr int32_t kMaxPadding = 64;  // padding is less than 1/64 of a table
  const bool is_shared = !d.owns_embedding || !d.owns_lm_head;
  const int32_t allowed = is_shared ? 0 : larger / kMaxPadding;
  if (std::abs(c.vocab_size - t.vocab_size) > allowed) {
    throw InvalidArgument(concat("the drafter ", c.name, " has a vocabulary of ", c.vocab_size,
                                 " tokens and the target ", t.name, " one of ", t.vocab_size,
                                 "; use the target that the drafter was trained for"));
  }
  if (!is_shared) return;
  const char* const shared_weight = d.owns_embedding ? "lm_head" : "embedding table";
  if (c.embed_width() != t.hidden) {
    throw InvalidArgument(concat("the drafter ", c.name, " of hidden size ", c.hidden, " uses the ",
                                 shared_weight, " of the target ", t.name, " of hidden size ",
                                 t.hidden, "; the sizes must be equal"));
  }
  if (model.weights.dtype != target.weights.dtype) {
    throw InvalidArgument(
        concat("the drafter ", c.name, " is loaded as ", dtype_name(model.weights.dtype),
               " and uses the ", shared_weight, " of the target ", t.name, ", loaded as ",
               dtype_name(target.weights.dtype), "; load both with the same dtype"));
  }
}

// Instantiates every member template for one context.
#define PACELINE_INSTANTIATE_DRAFT_HEAD(Ctx)                                                   \
  template void DraftHead::forward<Ctx>(Ctx&, const PassRows&, std::span<const GroupMetadata>, \
                                        const Activations&, const DraftHeadInput&) const;      \
  template void DraftHead::logits<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,          \
                                       const Activations&, const DraftHeadOutput&, LogitIds)   \
      const;
PACELINE_INSTANTIATE_DRAFT_HEAD(CpuContext)
#ifdef PACELINE_CUDA
PACELINE_INSTANTIATE_DRAFT_HEAD(CudaContext)
#endif
#undef PACELINE_INSTANTIATE_DRAFT_HEAD

}  // namespace paceline
