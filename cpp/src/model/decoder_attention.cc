// SPDX-License-Identifier: Apache-2.0

// The attention of a layer: multi-head or latent.

#include <variant>

#include "base/check.h"
#include "base/overloaded.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/decoder.h"
#include "model/layer_ops.h"

namespace paceline {

template <class Ctx>
void Decoder::attention(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                        std::span<const GroupMetadata> groups,
                        const Activations& activations) const {
  std::visit(Overloaded{[&](const MultiHeadAttention&) {
                          multi_head_attention(ctx, layer, input, rows, groups, activations);
                        },
                        [&](const LatentAttention&) {
                          PACELINE_CHECK(false, "the constructor refuses latent attention");
                        }},
             config().layers[layer].attention);
}

template <class Ctx>
void Decoder::multi_head_attention(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                                   std::span<const GroupMetadata> groups,
                                   const Activations& activations) const {
  const DecoderConfig& c = config();
  const auto& a = std::get<MultiHeadAttention>(c.layers[layer].attention);
  const auto& w = std::get<MultiHeadAttentionWeights>(weights().layers[layer].attention);
  const GroupMetadata& metadata = groups[layer_to_group_[layer]];

  project(ctx, row_count(rows), w.qkv,
          {.x = input,
           .y = activations.qkv,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
  ctx.run(qk_norm_rope_append, QkNormRopeAppendParams{.num_rows = rows.num_rows,
                                                      .max_rows = rows.capacity,
                                                      .qkv = activations.qkv,
                                                      .positions = rows.positions,
                                                      .slot_mapping = slot_mapping(metadata),
                                                      .q_norm = w.q_norm,
                                                      .k_norm = w.k_norm,
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
                                                      .sinks = w.sinks,
                                                      .y = activations.attention,
                                                      .num_qo_heads = a.num_qo_heads,
                                                      .num_kv_heads = a.num_kv_heads,
                                                      .head_dim = a.head_dim,
                                                      .dtype = activations.dtype,
                                                      .kv_inputs = kv_inputs(a)});
                        }},
             metadata);
  project(ctx, row_count(rows), w.o,
          {.x = activations.attention,
           .y = activations.branch,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
}

template void Decoder::attention<CpuContext>(CpuContext&, int32_t, const void*, const PassRows&,
                                             std::span<const GroupMetadata>,
                                             const Activations&) const;
#ifdef PACELINE_CUDA
template void Decoder::attention<CudaContext>(CudaContext&, int32_t, const void*, const PassRows&,
                                              std::span<const GroupMetadata>,
                                              const Activations&) const;
#endif

}  // namespace paceline
