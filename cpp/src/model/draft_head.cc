// SPDX-License-Identifier: Apache-2.0
#include "model/draft_head.h"

#include <algorithm>
#include <cstdlib>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "metadata/pass_rows.h"

namespace paceline {
namespace {

// Elements of `data` from `offset` on.
void* at(void* data, int64_t offset, DType dtype) {
  return static_cast<std::byte*>(data) + offset * dtype_bytes(dtype);
}

}  // namespace

DraftHead::DraftHead(std::shared_ptr<const Model> model, const Decoder& target,
                     const KvLayout& layout, std::byte* kv_pool, int32_t max_positions,
                     DeviceArena& arena, int32_t rope_offset)
    : decoder_(std::move(model), layout, KvOwner::kDraft, kv_pool, max_positions, arena,
               target.shareable_weights(), rope_offset) {
  PACELINE_CHECK(config().drafter.has_value(), config().name, " is no head");
}

template <class Ctx>
void DraftHead::run_fc(Ctx& ctx, const PassRows& rows, const void* x,
                       const Activations& activations) const {
  const DecoderConfig& c = config();
  const auto width = static_cast<int32_t>(drafter().fc_width());
  ctx.run(gemm, GemmParams{.num_rows = rows.num_rows,
                           .max_rows = rows.capacity,
                           .x = x,
                           .x_stride = width,
                           .weight = decoder_.weights().head.fc,
                           .weight_dtype = decoder_.weights().dtype,
                           .bias = decoder_.weights().head.fc_bias,
                           .y = activations.residual,
                           .y_stride = c.hidden,
                           .n = c.hidden,
                           .k = width,
                           .x_dtype = activations.dtype,
                           .y_dtype = DType::kFloat32});
}

// [embedding ; hidden] -> fc -> the residual stream, and activations.normed for the attention. Both
// parts have the target's width, which with EAGLE is the head's.
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
                                      .y = at(activations.normed, offset, activations.dtype),
                                      .y_stride = y_stride,
                                      .width = columns,
                                      .x_dtype = x_dtype,
                                      .y_dtype = activations.dtype});
  };
  copy(activations.residual, DType::kFloat32, nullptr, 0, width, part);
  if (input.feedback != nullptr) {
    copy(input.feedback, DType::kFloat32, nullptr, part, width, part);
  } else {
    copy(input.target_hidden, activations.dtype, input.hidden_rows, part, width, part);
  }
  run_fc(ctx, rows, activations.normed, activations);
  // A head with a norm before its first attention leaves that to the layers.
  if (!drafter().has_attn_norm) {
    copy(activations.residual, DType::kFloat32, nullptr, 0, c.hidden, c.hidden);
  }
}

// The first layer's input [norm(embedding) ; norm(g)] in activations.normed, and the residual
// stream that its attention joins.
template <class Ctx>
void DraftHead::join_eagle3(Ctx& ctx, const PassRows& rows, const Activations& activations,
                            const DraftHeadInput& input) const {
  const DecoderConfig& c = config();
  const DrafterConfig& d = drafter();
  const DraftHeadWeights& w = decoder_.weights().head;
  const auto norm = [&](const void* x, DType x_dtype, int64_t x_stride, const float* weight,
                        int64_t hidden, void* y, DType y_dtype, int64_t y_stride) {
    ctx.run(rms_norm, RmsNormParams{.num_rows = rows.num_rows,
                                    .max_rows = rows.capacity,
                                    .x = x,
                                    .x_stride = x_stride,
                                    .residual = nullptr,
                                    .weight = weight,
                                    .weight_offset = c.norm_weight_offset,
                                    .eps = c.norm_eps,
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
      void* const part = at(aux, static_cast<int64_t>(i) * d.target_hidden, dtype);
      norm(part, dtype, fc_width, w.fc_norms[i], d.target_hidden, part, dtype, fc_width);
    }
    run_fc(ctx, rows, aux, activations);
    g = activations.residual;
  }
  norm(g, DType::kFloat32, c.hidden, w.hidden_norm, c.hidden,
       at(activations.normed, c.hidden, dtype), dtype, width);
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
  } else {
    join_pair(ctx, rows, activations, input);
  }
  const bool has_input = is_eagle3 || !drafter().has_attn_norm;
  decoder_.run_layers(ctx, rows, groups, activations, has_input ? activations.normed : nullptr,
                      /*taps=*/{});
}

template <class Ctx>
void DraftHead::cluster_rows(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                             const Activations& activations, const DraftHeadOutput& output) const {
  const DecoderConfig& c = config();
  const CentroidsConfig& centroids = drafter().centroids;
  const DecoderWeights& w = decoder_.weights();
  ctx.run(gemm, GemmParams{.num_rows = num_rows,
                           .max_rows = max_rows,
                           .x = activations.normed,
                           .x_stride = c.hidden,
                           .weight = w.head.centroids,
                           .weight_dtype = w.dtype,
                           .bias = nullptr,
                           .y = output.centroid_scores,
                           .y_stride = centroids.count,
                           .n = centroids.count,
                           .k = c.hidden,
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
                                              .weight = decoder_.lm_head(),
                                              .logits = output.logits,
                                              .tokens = output.tokens,
                                              .hidden = c.hidden,
                                              .x_dtype = activations.dtype,
                                              .weight_dtype = w.dtype});
  if (c.logit_soft_cap > 0) {
    ctx.run(soft_cap, SoftCapParams{.num_rows = num_rows,
                                    .max_rows = max_rows,
                                    .logits = output.logits,
                                    .cap = c.logit_soft_cap,
                                    .n = c.num_logits()});
  }
}

template <class Ctx>
void DraftHead::logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                       const int32_t* row_index, const Activations& activations,
                       const DraftHeadOutput& output) const {
  const DecoderConfig& c = config();
  float* const feedback = output.feedback;
  if (drafter().centroids.count > 0) {
    decoder_.output_rows(ctx, num_rows, max_rows, row_index, activations, feedback);
    cluster_rows(ctx, num_rows, max_rows, activations, output);
  } else {
    decoder_.logits(ctx, num_rows, max_rows, row_index, activations, feedback, output.logits);
  }
  if (const std::byte* weight = decoder_.weights().head.feedback; weight != nullptr) {
    // The final norm's output, in activations.normed, back in the target's width.
    const int32_t width = drafter().target_hidden;
    ctx.run(gemm, GemmParams{.num_rows = num_rows,
                             .max_rows = max_rows,
                             .x = activations.normed,
                             .x_stride = c.hidden,
                             .weight = weight,
                             .weight_dtype = decoder_.weights().dtype,
                             .bias = nullptr,
                             .y = feedback,
                             .y_stride = width,
                             .n = width,
                             .k = c.hidden,
                             .x_dtype = activations.dtype,
                             .y_dtype = DType::kFloat32});
  }
  if (!drafter().norm_output) return;
  ctx.run(rms_norm, RmsNormParams{.num_rows = num_rows,
                                  .max_rows = max_rows,
                                  .x = feedback,
                                  .x_stride = c.hidden,
                                  .residual = nullptr,
                                  .weight = decoder_.weights().final_norm,
                                  .weight_offset = c.norm_weight_offset,
                                  .eps = c.norm_eps,
                                  .y = feedback,
                                  .y_stride = c.hidden,
                                  .hidden = c.hidden});
}

void check_head(const Model& model, const Model& target) {
  const DecoderConfig& c = model.config;
  const DrafterConfig& d = *c.drafter;
  const DecoderConfig& t = target.config;
  if (d.target_hidden != t.hidden) {
    throw InvalidArgument(concat("the drafter ", c.name, " was made for a target of hidden size ",
                                 d.target_hidden, " and the target ", t.name, " has ", t.hidden,
                                 "; give the target that the drafter was trained for"));
  }
  static_cast<void>(draft_kv_layer_shapes(c, t));
  const auto num_layers = static_cast<int32_t>(t.layers.size());
  for (const int32_t layer : d.aux_layers) {
    if (layer >= num_layers) {
      throw InvalidArgument(concat("the drafter ", c.name, " reads the input of layer ", layer,
                                   " and the target ", t.name, " has ", num_layers,
                                   " layers; allowed: 0 to ", num_layers - 1));
    }
  }
  // Tables padded to another multiple are compatible, whatever lies beyond either is not drafted.
  const int32_t larger = std::max(c.vocab_size, t.vocab_size);
  constexpr int32_t kMaxPadding = 64;  // a table's part of padding is below 1/64
  const bool is_shared = !d.owns_embedding || !d.owns_lm_head;
  const int32_t allowed = is_shared ? 0 : larger / kMaxPadding;
  if (std::abs(c.vocab_size - t.vocab_size) > allowed) {
    throw InvalidArgument(concat("the drafter ", c.name, " has a vocabulary of ", c.vocab_size,
                                 " tokens and the target ", t.name, " one of ", t.vocab_size,
                                 "; give the target that the drafter was trained for"));
  }
  if (!is_shared) return;
  const char* const what = d.owns_embedding ? "lm_head" : "embedding table";
  if (c.embed_width() != t.hidden) {
    throw InvalidArgument(concat("the drafter ", c.name, " of hidden size ", c.hidden, " uses the ",
                                 what, " of the target ", t.name, " of hidden size ", t.hidden,
                                 "; both must be the same"));
  }
  if (model.weights.dtype != target.weights.dtype) {
    throw InvalidArgument(concat("the drafter ", c.name, " is loaded as ",
                                 dtype_name(model.weights.dtype), " and uses the ", what,
                                 " of the target ", t.name, ", loaded as ",
                                 dtype_name(target.weights.dtype), "; load both alike"));
  }
}

// Every member template, for one context.
#define PACELINE_INSTANTIATE_HEAD(Ctx)                                                         \
  template void DraftHead::forward<Ctx>(Ctx&, const PassRows&, std::span<const GroupMetadata>, \
                                        const Activations&, const DraftHeadInput&) const;      \
  template void DraftHead::logits<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,          \
                                       const Activations&, const DraftHeadOutput&) const;
PACELINE_INSTANTIATE_HEAD(CpuContext)
#ifdef PACELINE_CUDA
PACELINE_INSTANTIATE_HEAD(CudaContext)
#endif
#undef PACELINE_INSTANTIATE_HEAD

}  // namespace paceline
