// SPDX-License-Identifier: Apache-2.0

// The attention of a layer: multi-head or latent. Compressed attention is in
// decoder_compressed.cc.

#include <variant>

#include "base/check.h"
#include "base/overloaded.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/decoder.h"
#include "model/forward/layer_ops.h"
#include "ops/latent.h"

namespace paceline {

template <class Ctx>
void Decoder::attention(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                        std::span<const GroupMetadata> groups, const Activations& activations,
                        const OutputRows* output) const {
  std::visit(Overloaded{[&](const MultiHeadAttention&) {
                          multi_head_attention(ctx, layer, input, rows, groups, activations,
                                               output);
                        },
                        [&](const LatentAttention&) {
                          latent_attention(ctx, layer, input, rows, groups, activations, output);
                        },
                        [&](const CompressedAttention&) {
                          compressed_attention(ctx, layer, input, rows, groups, activations);
                        }},
             config().layers[layer].attention);
}

template <class Ctx>
void Decoder::pick_queries(Ctx& ctx, const OutputRows& output, const Activations& activations,
                           int32_t width) const {
  ctx.run(copy_rows, CopyRowsParams{.num_rows = output.rows.num_rows,
                                    .max_rows = output.rows.capacity,
                                    .row_index = output.row_index,
                                    .x = activations.qkv,
                                    .x_stride = width,
                                    .y = output.qkv,
                                    .y_stride = width,
                                    .width = width,
                                    .x_dtype = activations.dtype,
                                    .y_dtype = activations.dtype});
}

template <class Ctx>
void Decoder::multi_head_attention(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                                   std::span<const GroupMetadata> groups,
                                   const Activations& activations, const OutputRows* output) const {
  const auto& w = std::get<MultiHeadAttentionWeights>(weights().layers[layer].attention);
  project(ctx, row_count(rows), w.qkv,
          {.x = input,
           .y = activations.qkv,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
  rotate_and_append(ctx, layer, rows, groups, activations, /*has_queries=*/true);
  if (output == nullptr) return attend(ctx, layer, rows, groups, activations);
  pick_queries(ctx, *output, activations, w.qkv.weight.n);
  Activations picked = activations;
  picked.qkv = output->qkv;
  attend(ctx, layer, output->rows, output->groups, picked);
}

// Multi-head attention, once the keys and values of the rows are in the cache.
template <class Ctx>
void Decoder::attend(Ctx& ctx, int32_t layer, const PassRows& rows,
                     std::span<const GroupMetadata> groups, const Activations& activations) const {
  const auto& a = std::get<MultiHeadAttention>(config().layers[layer].attention);
  const auto& w = std::get<MultiHeadAttentionWeights>(weights().layers[layer].attention);
  const GroupMetadata& metadata = groups[group_of(layer)];
  const auto paged = [&](const int32_t* kv_begin, const int32_t* kv_end, const BlockTable& table) {
    ctx.run(paged_attention, PagedAttentionParams{.num_rows = rows.num_rows,
                                                  .max_rows = rows.capacity,
                                                  .qkv = activations.qkv,
                                                  .seq_slot = rows.seq_slot,
                                                  .kv_begin = kv_begin,
                                                  .kv_end = kv_end,
                                                  .block_table = table.blocks,
                                                  .block_table_stride = table.stride,
                                                  .kv = kv_of(layer),
                                                  .scale = a.scale,
                                                  .soft_cap = a.soft_cap,
                                                  .sinks = w.sinks,
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
  std::visit(Overloaded{[&](const FullMetadata& full) { paged(nullptr, full.kv_end, full.table); },
                        [&](const SlidingMetadata& sliding) {
                          paged(sliding.kv_begin, sliding.kv_end, sliding.table);
                        },
                        [&](const WindowListMetadata& list) {
                          ctx.run(list_attention,
                                  ListAttentionParams{.num_rows = rows.num_rows,
                                                      .max_rows = rows.capacity,
                                                      .qkv = activations.qkv,
                                                      .window_slots = list.window_slots,
                                                      .window_count = list.window_count,
                                                      .window = list.window,
                                                      .kv = kv_of(layer),
                                                      .scale = a.scale,
                                                      .sinks = w.sinks,
                                                      .y = activations.attention,
                                                      .num_qo_heads = a.num_qo_heads,
                                                      .num_kv_heads = a.num_kv_heads,
                                                      .head_dim = a.head_dim,
                                                      .dtype = activations.dtype,
                                                      .kv_inputs = kv_inputs(a)});
                        },
                        [](const CompressedMetadata&) {
                          PACELINE_CHECK(false, "keys and values are not in a compressed group");
                        }},
             metadata);
  project(ctx, row_count(rows), w.o,
          {.x = activations.attention,
           .y = activations.branch,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
}

LatentRope Decoder::latent_rope(const LatentAttention& a, const PassRows& rows) const {
  return {.positions = rows.positions,
          .cos = ropes_[a.rope].cos,
          .sin = ropes_[a.rope].sin,
          .position_offset = rope_offset_,
          .is_interleaved = config().ropes[a.rope].is_interleaved};
}

template <class Ctx>
void Decoder::write_keys_values(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                                std::span<const GroupMetadata> groups,
                                const Activations& activations) const {
  const AttentionConfig& attention = config().layers[layer].attention;
  if (std::holds_alternative<CompressedAttention>(attention)) {
    return append_window(ctx, layer, input, rows, groups, activations);
  }
  const auto& a = std::get<MultiHeadAttention>(attention);
  const auto& w = std::get<MultiHeadAttentionWeights>(weights().layers[layer].attention);
  const Linear kv = key_value_rows(w.qkv, a);
  project(ctx, row_count(rows), kv,
          {.x = input,
           .y = activations.qkv,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
  rotate_and_append(ctx, layer, rows, groups, activations, /*has_queries=*/false);
}

template <class Ctx>
void Decoder::rotate_and_append(Ctx& ctx, int32_t layer, const PassRows& rows,
                                std::span<const GroupMetadata> groups,
                                const Activations& activations, bool has_queries) const {
  const DecoderConfig& c = config();
  const auto& a = std::get<MultiHeadAttention>(c.layers[layer].attention);
  const auto& w = std::get<MultiHeadAttentionWeights>(weights().layers[layer].attention);
  ctx.run(qk_norm_rope_append,
          QkNormRopeAppendParams{.num_rows = rows.num_rows,
                                 .max_rows = rows.capacity,
                                 .qkv = activations.qkv,
                                 .positions = rows.positions,
                                 .slot_mapping = slot_mapping(groups[group_of(layer)]),
                                 .q_norm = has_queries ? w.q_norm : nullptr,
                                 .k_norm = w.k_norm,
                                 .norm_weight_offset = c.norm_weight_offset,
                                 .norm_eps = c.norm_eps,
                                 .rope_cos = ropes_[a.rope].cos,
                                 .rope_sin = ropes_[a.rope].sin,
                                 .kv = kv_of(layer),
                                 .num_qo_heads = has_queries ? a.num_qo_heads : 0,
                                 .num_kv_heads = a.num_kv_heads,
                                 .head_dim = a.head_dim,
                                 .qkv_dtype = activations.dtype,
                                 .kv_inputs = kv_inputs(a),
                                 .has_v_norm = a.has_v_norm,
                                 .position_offset = rope_offset_});
}

template <class Ctx>
void Decoder::latent_attention(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                               std::span<const GroupMetadata> groups,
                               const Activations& activations, const OutputRows* output) const {
  const DecoderConfig& c = config();
  const auto& a = std::get<LatentAttention>(c.layers[layer].attention);
  const auto& w = std::get<LatentAttentionWeights>(weights().layers[layer].attention);
  const auto* const metadata = std::get_if<FullMetadata>(&groups[group_of(layer)]);
  PACELINE_CHECK(metadata != nullptr, "a latent group has the metadata of a full one");
  const DType dtype = activations.dtype;
  const LatentRope rope = latent_rope(a, rows);
  project(ctx, row_count(rows), w.qkv_a,
          {.x = input, .y = activations.qkv, .x_dtype = dtype, .y_dtype = dtype});
  ctx.run(append_latents, AppendLatentsParams{.num_rows = rows.num_rows,
                                              .max_rows = rows.capacity,
                                              .qkv_a = activations.qkv,
                                              .q_width = w.qkv_a.weight.n - a.entry_width(),
                                              .slot_mapping = metadata->slot_mapping,
                                              .q_norm = w.q_a_norm,
                                              .latent_norm = w.kv_a_norm,
                                              .norm_weight_offset = c.norm_weight_offset,
                                              .norm_eps = a.norm_eps,
                                              .rope = rope,
                                              .entries = kv_of(layer),
                                              .kv_lora_rank = a.kv_lora_rank,
                                              .qk_rope_head_dim = a.qk_rope_head_dim,
                                              .dtype = dtype});
  if (output == nullptr) return attend_latents(ctx, layer, rows, groups, activations);
  pick_queries(ctx, *output, activations, w.qkv_a.weight.n);
  Activations picked = activations;
  picked.qkv = output->qkv;
  attend_latents(ctx, layer, output->rows, output->groups, picked);
}

// Latent attention, once the entries of the rows are in the cache.
template <class Ctx>
void Decoder::attend_latents(Ctx& ctx, int32_t layer, const PassRows& rows,
                             std::span<const GroupMetadata> groups,
                             const Activations& activations) const {
  const DecoderConfig& c = config();
  const auto& a = std::get<LatentAttention>(c.layers[layer].attention);
  const auto& w = std::get<LatentAttentionWeights>(weights().layers[layer].attention);
  const auto* const metadata = std::get_if<FullMetadata>(&groups[group_of(layer)]);
  PACELINE_CHECK(metadata != nullptr, "a latent group has the metadata of a full one");
  const DType dtype = activations.dtype;
  const LatentRope rope = latent_rope(a, rows);
  const LatentHeads heads = {.kv_b = w.kv_b.weight,
                             .num_heads = a.num_qo_heads,
                             .qk_nope_head_dim = a.qk_nope_head_dim,
                             .v_head_dim = a.v_head_dim};
  const bool has_q_a = a.q_lora_rank > 0;
  if (has_q_a) {
    project(ctx, row_count(rows), w.q_b,
            {.x = activations.qkv,
             .x_stride = w.qkv_a.weight.n,
             .y = activations.latent_q,
             .x_dtype = dtype,
             .y_dtype = dtype});
  }
  ctx.run(absorb_queries,
          AbsorbQueriesParams{.num_rows = rows.num_rows,
                              .max_rows = rows.capacity,
                              .q = has_q_a ? activations.latent_q : activations.qkv,
                              .q_stride = has_q_a ? w.q_b.weight.n : w.qkv_a.weight.n,
                              .heads = heads,
                              .rope = rope,
                              .y = activations.absorbed_q,
                              .qk_rope_head_dim = a.qk_rope_head_dim,
                              .dtype = dtype});
  ctx.run(paceline::latent_attention,
          LatentAttentionParams{.num_rows = rows.num_rows,
                                .max_rows = rows.capacity,
                                .q = activations.absorbed_q,
                                .seq_slot = rows.seq_slot,
                                .kv_end = metadata->kv_end,
                                .block_table = metadata->table.blocks,
                                .block_table_stride = metadata->table.stride,
                                .entries = kv_of(layer),
                                .scale = a.scale,
                                .y = activations.mean_latents,
                                .num_heads = a.num_qo_heads,
                                .kv_lora_rank = a.kv_lora_rank,
                                .qk_rope_head_dim = a.qk_rope_head_dim,
                                .dtype = dtype,
                                .num_seqs = rows.num_seqs,
                                .row_indptr = rows.row_indptr,
                                .max_seqs = rows.max_seqs,
                                .max_rows_per_seq = rows.max_rows_per_seq});
  ctx.run(project_values, ProjectValuesParams{.num_rows = rows.num_rows,
                                              .max_rows = rows.capacity,
                                              .x = activations.mean_latents,
                                              .heads = heads,
                                              .y = activations.attention,
                                              .dtype = dtype});
  project(
      ctx, row_count(rows), w.o,
      {.x = activations.attention, .y = activations.branch, .x_dtype = dtype, .y_dtype = dtype});
}

template void Decoder::write_keys_values<CpuContext>(CpuContext&, int32_t, const void*,
                                                     const PassRows&,
                                                     std::span<const GroupMetadata>,
                                                     const Activations&) const;
template void Decoder::attention<CpuContext>(CpuContext&, int32_t, const void*, const PassRows&,
                                             std::span<const GroupMetadata>, const Activations&,
                                             const OutputRows*) const;
#ifdef PACELINE_CUDA
template void Decoder::write_keys_values<CudaContext>(CudaContext&, int32_t, const void*,
                                                      const PassRows&,
                                                      std::span<const GroupMetadata>,
                                                      const Activations&) const;
template void Decoder::attention<CudaContext>(CudaContext&, int32_t, const void*, const PassRows&,
                                              std::span<const GroupMetadata>, const Activations&,
                                              const OutputRows*) const;
#endif

}  // namespace paceline
