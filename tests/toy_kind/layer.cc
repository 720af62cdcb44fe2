// SPDX-License-Identifier: Apache-2.0
#include "model/layers/toy/layer.h"

#include <cmath>
#include <variant>

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"

namespace paceline {

template <class Ctx>
void run_attention(Ctx& ctx, const ToyAttention& a, const ToyAttentionWeights& w,
                   const AttentionPass& pass) {
  const Activations& activations = pass.activations;
  const PassRows& rows = pass.rows;
  const auto& metadata = std::get<FullMetadata>(pass.metadata(pass.groups));
  const RopeTable& rope = pass.rope_tables[static_cast<size_t>(a.rope)];
  project(ctx, row_count(rows), w.m,
          {.x = pass.input,
           .y = activations.qkv,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
  ctx.run(qk_norm_rope_append, QkNormRopeAppendParams{.num_rows = rows.num_rows,
                                                      .max_rows = rows.capacity,
                                                      .qkv = activations.qkv,
                                                      .positions = rows.positions,
                                                      .slot_mapping = metadata.slot_mapping,
                                                      .q_norm = nullptr,
                                                      .k_norm = nullptr,
                                                      .norm_weight_offset = 0,
                                                      .norm_eps = pass.config.norm_eps,
                                                      .rope_cos = rope.cos,
                                                      .rope_sin = rope.sin,
                                                      .kv = pass.stores[0],
                                                      .num_qo_heads = a.num_heads,
                                                      .num_kv_heads = a.num_heads,
                                                      .head_dim = a.head_dim,
                                                      .qkv_dtype = activations.dtype,
                                                      .kv_inputs = KvInputs::kKeysAndValues,
                                                      .has_v_norm = false,
                                                      .position_offset = pass.rope_offset});
  ctx.run(paged_attention,
          PagedAttentionParams{.num_rows = rows.num_rows,
                               .max_rows = rows.capacity,
                               .qkv = activations.qkv,
                               .seq_slot = rows.seq_slot,
                               .kv_begin = nullptr,
                               .kv_end = metadata.kv_end,
                               .block_table = metadata.table.blocks,
                               .block_table_stride = metadata.table.stride,
                               .kv = pass.stores[0],
                               .scale = 1.0f / std::sqrt(static_cast<float>(a.head_dim)),
                               .soft_cap = 0,
                               .sinks = nullptr,
                               .y = activations.branch,
                               .num_qo_heads = a.num_heads,
                               .num_kv_heads = a.num_heads,
                               .head_dim = a.head_dim,
                               .dtype = activations.dtype,
                               .num_seqs = rows.num_seqs,
                               .row_indptr = rows.row_indptr,
                               .max_seqs = rows.max_seqs,
                               .max_rows_per_seq = rows.max_rows_per_seq,
                               .kv_inputs = KvInputs::kKeysAndValues});
}

template void run_attention<CpuContext>(CpuContext&, const ToyAttention&,
                                        const WeightsOf<ToyAttention>&, const AttentionPass&);
#ifdef PACELINE_CUDA
template void run_attention<CudaContext>(CudaContext&, const ToyAttention&,
                                         const WeightsOf<ToyAttention>&, const AttentionPass&);
#endif

}  // namespace paceline
