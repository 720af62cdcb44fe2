// SPDX-License-Identifier: Apache-2.0
#include "model/layers/latent/layer.h"

#include <algorithm>
#include <span>
#include <variant>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"
#include "ops/latent.h"

namespace paceline {

void LatentWidths::merge(const LatentAttention& a, const ScratchSizes&) {
  const int64_t heads = a.num_qo_heads;
  q = std::max(q, a.q_lora_rank > 0 ? a.q_rows() : 0);
  absorbed_q = std::max(absorbed_q, heads * a.entry_width());
  mean_latents = std::max(mean_latents, heads * a.kv_lora_rank);
}

LatentScratch LatentWidths::allocate(DeviceArena& arena, int64_t rows, DType dtype) const {
  const auto buffer = [&](int64_t width) -> void* {
    if (width == 0) return nullptr;
    return arena.allocate<std::byte>(rows * width * dtype_bytes(dtype), "activations");
  };
  return {.q = buffer(q), .absorbed_q = buffer(absorbed_q), .mean_latents = buffer(mean_latents)};
}

namespace {

// Latent attention, once the entries of the rows are in the cache.
template <class Ctx>
void attend_latents(Ctx& ctx, const LatentAttention& a, const LatentAttentionWeights& w,
                    const AttentionPass& pass, const PassRows& rows,
                    std::span<const GroupMetadata> groups, const Activations& activations) {
  const auto& own = activations.of<LatentScratch>();
  const auto* const metadata = std::get_if<FullMetadata>(&pass.metadata(groups));
  PACELINE_CHECK(metadata != nullptr, "a latent group has the metadata of a full one");
  const DType dtype = activations.dtype;
  const LatentRope rope = pass.rope(a.rope, rows);
  const LatentHeads heads = {.kv_b = w.kv_b.weight,
                             .num_heads = a.num_qo_heads,
                             .qk_nope_head_dim = a.qk_nope_head_dim,
                             .v_head_dim = a.v_head_dim};
  const bool has_q_a = a.q_lora_rank > 0;
  if (has_q_a) {
    project(ctx, row_count(rows), w.q_b,
            {.x = activations.qkv,
             .x_stride = w.qkv_a.weight.n,
             .y = own.q,
             .x_dtype = dtype,
             .y_dtype = dtype,
             .delays_successor = true});
  }
  ctx.run(absorb_queries,
          AbsorbQueriesParams{.num_rows = rows.num_rows,
                              .max_rows = rows.capacity,
                              .q = has_q_a ? own.q : activations.qkv,
                              .q_stride = has_q_a ? w.q_b.weight.n : w.qkv_a.weight.n,
                              .heads = heads,
                              .rope = rope,
                              .y = own.absorbed_q,
                              .qk_rope_head_dim = a.qk_rope_head_dim,
                              .dtype = dtype});
  ctx.run(paceline::latent_attention,
          LatentAttentionParams{.num_rows = rows.num_rows,
                                .max_rows = rows.capacity,
                                .q = own.absorbed_q,
                                .seq_slot = rows.seq_slot,
                                .kv_end = metadata->kv_end,
                                .block_table = metadata->table.blocks,
                                .block_table_stride = metadata->table.stride,
                                .entries = pass.stores[0],
                                .scale = a.scale,
                                .y = own.mean_latents,
                                .num_heads = a.num_qo_heads,
                                .kv_lora_rank = a.kv_lora_rank,
                                .qk_rope_head_dim = a.qk_rope_head_dim,
                                .dtype = dtype,
                                .num_seqs = rows.num_seqs,
                                .row_indptr = rows.row_indptr,
                                .max_seqs = rows.max_seqs,
                                .max_rows_per_seq = rows.max_rows_per_seq,
                                .reads_early = has_q_a});
  ctx.run(project_values, ProjectValuesParams{.num_rows = rows.num_rows,
                                              .max_rows = rows.capacity,
                                              .x = own.mean_latents,
                                              .heads = heads,
                                              .y = activations.attention,
                                              .dtype = dtype});
  project_branch(
      ctx, row_count(rows), w.o,
      {.x = activations.attention, .y = activations.branch, .x_dtype = dtype, .y_dtype = dtype},
      activations, pass.ends);
}

}  // namespace

template <class Ctx>
void run_attention(Ctx& ctx, const LatentAttention& a, const LatentAttentionWeights& w,
                   const AttentionPass& pass) {
  const DecoderConfig& c = pass.config;
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  const auto* const metadata = std::get_if<FullMetadata>(&pass.metadata(pass.groups));
  PACELINE_CHECK(metadata != nullptr, "a latent group has the metadata of a full one");
  const DType dtype = activations.dtype;
  const LatentRope rope = pass.rope(a.rope, rows);
  project(ctx, row_count(rows), w.qkv_a,
          {.x = pass.input, .y = activations.qkv, .x_dtype = dtype, .y_dtype = dtype});
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
                                              .entries = pass.stores[0],
                                              .kv_lora_rank = a.kv_lora_rank,
                                              .qk_rope_head_dim = a.qk_rope_head_dim,
                                              .dtype = dtype});
  if (pass.output == nullptr) {
    return attend_latents(ctx, a, w, pass, rows, pass.groups, activations);
  }
  pick_queries(ctx, *pass.output, activations, w.qkv_a.weight.n);
  Activations picked = activations;
  picked.qkv = pass.output->qkv;
  attend_latents(ctx, a, w, pass, pass.output->rows, pass.output->groups, picked);
}

template void run_attention<CpuContext>(CpuContext&, const LatentAttention&,
                                        const WeightsOf<LatentAttention>&, const AttentionPass&);
#ifdef PACELINE_CUDA
template void run_attention<CudaContext>(CudaContext&, const LatentAttention&,
                                         const WeightsOf<LatentAttention>&, const AttentionPass&);
#endif

}  // namespace paceline
