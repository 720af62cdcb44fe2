// SPDX-License-Identifier: Apache-2.0
#include "model/layers/multi_head/layer.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <variant>

#include "base/check.h"
#include "base/overloaded.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"

namespace paceline {

void MultiHeadWidths::merge(const MultiHeadAttention& attention, const ScratchSizes& /*sizes*/) {
  if (attention.has_output_gate) gate = std::max(gate, attention.output_width());
}

MultiHeadScratch MultiHeadWidths::allocate(DeviceArena& arena, int64_t rows, DType dtype) const {
  if (gate == 0) return {};
  return {.gate = arena.allocate<std::byte>(rows * gate * dtype_bytes(dtype), "activations")};
}

namespace {

// Norms and rotates the rows of activations.qkv, and appends their keys and values to the cache.
// Without queries, a row begins with its keys.
template <class Ctx>
void rotate_and_append(Ctx& ctx, const MultiHeadAttention& a, const MultiHeadAttentionWeights& w,
                       const AttentionPass& pass, bool has_queries) {
  const DecoderConfig& c = pass.config;
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  const RopeTable& rope = pass.rope_tables[static_cast<size_t>(a.rope)];
  ctx.run(qk_norm_rope_append,
          QkNormRopeAppendParams{.num_rows = rows.num_rows,
                                 .max_rows = rows.capacity,
                                 .qkv = activations.qkv,
                                 .positions = rows.positions,
                                 .slot_mapping = slot_mapping(pass.metadata(pass.groups)),
                                 .q_norm = has_queries ? w.q_norm : nullptr,
                                 .k_norm = w.k_norm,
                                 .norm_weight_offset = c.norm_weight_offset,
                                 .norm_eps = c.norm_eps,
                                 .rope_cos = rope.cos,
                                 .rope_sin = rope.sin,
                                 .kv = pass.stores[0],
                                 .num_qo_heads = has_queries ? a.num_qo_heads : 0,
                                 .num_kv_heads = a.num_kv_heads,
                                 .head_dim = a.head_dim,
                                 .qkv_dtype = activations.dtype,
                                 .kv_inputs = a.kv_inputs(),
                                 .has_v_norm = a.has_v_norm,
                                 .position_offset = pass.rope_offset,
                                 .rope_head_dim = a.rope_head_dim,
                                 .reads_early = has_queries});
}

// Multiplies the attention of `rows` by the sigmoid of a projection of `input`, their rows of
// pass.input.
template <class Ctx>
void apply_gate(Ctx& ctx, const MultiHeadAttention& a, const MultiHeadAttentionWeights& w,
                const PassRows& rows, const void* input, const Activations& activations) {
  void* const gate = activations.of<MultiHeadScratch>().gate;
  project(ctx, row_count(rows), w.gate,
          {.x = input, .y = gate, .x_dtype = activations.dtype, .y_dtype = activations.dtype});
  ctx.run(gated_activation,
          GatedActivationParams{.num_rows = rows.num_rows,
                                .max_rows = rows.capacity,
                                .x = gate,
                                .y = activations.attention,
                                .intermediate = static_cast<int32_t>(a.output_width()),
                                .activation = Activation::kSigmoid,
                                .dtype = activations.dtype,
                                .up = activations.attention,
                                .up_stride = a.output_width()});
}

// Multi-head attention, once the keys and values of the rows are in the cache. `input`: the rows of
// pass.input.
template <class Ctx>
void attend(Ctx& ctx, const MultiHeadAttention& a, const MultiHeadAttentionWeights& w,
            const AttentionPass& pass, const PassRows& rows, std::span<const GroupMetadata> groups,
            const void* input, const Activations& activations) {
  const GroupMetadata& metadata = pass.metadata(groups);
  const auto paged = [&](const int32_t* kv_begin, const int32_t* kv_end, const BlockTable& table) {
    ctx.run(paged_attention, PagedAttentionParams{.num_rows = rows.num_rows,
                                                  .max_rows = rows.capacity,
                                                  .qkv = activations.qkv,
                                                  .seq_slot = rows.seq_slot,
                                                  .kv_begin = kv_begin,
                                                  .kv_end = kv_end,
                                                  .block_table = table.blocks,
                                                  .block_table_stride = table.stride,
                                                  .kv = pass.stores[0],
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
                                                  .kv_inputs = a.kv_inputs(),
                                                  .reads_early = pass.output == nullptr});
  };
  std::visit(Overloaded{[&](const FullMetadata& full) { paged(nullptr, full.kv_end, full.table); },
                        [&](const SlidingMetadata& sliding) {
                          paged(sliding.kv_begin, sliding.kv_end, sliding.table);
                        },
                        [](const CompressedMetadata&) {
                          PACELINE_CHECK(false, "keys and values are not in a compressed group");
                        }},
             metadata);
  if (a.has_output_gate) apply_gate(ctx, a, w, rows, input, activations);
  project_branch(ctx, row_count(rows), w.o,
                 {.x = activations.attention,
                  .y = activations.branch,
                  .x_dtype = activations.dtype,
                  .y_dtype = activations.dtype},
                 activations, pass.ends);
}

}  // namespace

template <class Ctx>
void run_attention(Ctx& ctx, const MultiHeadAttention& a, const MultiHeadAttentionWeights& w,
                   const AttentionPass& pass) {
  const Activations& activations = pass.activations;
  project_input(ctx, row_count(pass.rows), w.qkv,
                {.x = pass.input,
                 .y = activations.qkv,
                 .x_dtype = activations.dtype,
                 .y_dtype = activations.dtype,
                 .delays_successor = true},
                activations, pass.ends);
  rotate_and_append(ctx, a, w, pass, /*has_queries=*/true);
  if (pass.output == nullptr) {
    return attend(ctx, a, w, pass, pass.rows, pass.groups, pass.input, activations);
  }
  const OutputRows& output = *pass.output;
  pick_queries(ctx, output, activations, w.qkv.weight.n);
  if (a.has_output_gate) {
    const int32_t width = w.gate.weight.k;
    ctx.run(copy_rows, CopyRowsParams{.num_rows = output.rows.num_rows,
                                      .max_rows = output.rows.capacity,
                                      .row_index = output.row_index,
                                      .x = pass.input,
                                      .x_stride = width,
                                      .y = activations.branch,
                                      .y_stride = width,
                                      .width = width,
                                      .x_dtype = activations.dtype,
                                      .y_dtype = activations.dtype});
  }
  Activations picked = activations;
  picked.qkv = output.qkv;
  attend(ctx, a, w, pass, output.rows, output.groups, activations.branch, picked);
}

template <class Ctx>
void write_keys_values(Ctx& ctx, const MultiHeadAttention& a, const MultiHeadAttentionWeights& w,
                       const AttentionPass& pass) {
  const Linear kv = context_rows(a, w);
  project(ctx, row_count(pass.rows), kv,
          {.x = pass.input,
           .y = pass.activations.qkv,
           .x_dtype = pass.activations.dtype,
           .y_dtype = pass.activations.dtype});
  rotate_and_append(ctx, a, w, pass, /*has_queries=*/false);
}

template void run_attention<CpuContext>(CpuContext&, const MultiHeadAttention&,
                                        const WeightsOf<MultiHeadAttention>&, const AttentionPass&);
template void write_keys_values<CpuContext>(CpuContext&, const MultiHeadAttention&,
                                            const WeightsOf<MultiHeadAttention>&,
                                            const AttentionPass&);
#ifdef PACELINE_CUDA
template void run_attention<CudaContext>(CudaContext&, const MultiHeadAttention&,
                                         const WeightsOf<MultiHeadAttention>&,
                                         const AttentionPass&);
template void write_keys_values<CudaContext>(CudaContext&, const MultiHeadAttention&,
                                             const WeightsOf<MultiHeadAttention>&,
                                             const AttentionPass&);
#endif

}  // namespace paceline
