// SPDX-License-Identifier: Apache-2.0
#include "model/layers/compressed/layer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <variant>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"
#include "ops/compressed.h"

namespace paceline {
namespace {

// The stores of a layer (append_stores).
constexpr size_t kWindowStore = 0;
constexpr size_t kTailStore = 1;
constexpr size_t kEntryStore = 2;

template <class Metadata>
[[nodiscard]] const Metadata& metadata_of(const GroupMetadata& metadata) {
  const auto* const own = std::get_if<Metadata>(&metadata);
  PACELINE_CHECK(own != nullptr, "a store has metadata of another kind");
  return *own;
}

// The indexer's keys, which follow the entries of a block.
[[nodiscard]] KvLayerView keys_behind(const KvLayerView& entries, int32_t head_dim) {
  KvLayerView keys = entries;
  keys.k_offset += int64_t{entries.block_size} * head_dim * dtype_bytes(entries.dtype);
  return keys;
}

}  // namespace

void CompressedWidths::merge(const CompressedAttention& a, const ScratchSizes& sizes) {
  q = std::max(q, a.q_rows());
  groups = std::max(groups, a.o_a_rows());
  inputs = std::max<int64_t>(inputs, a.compress_rows());
  if (!a.indexer) return;
  index_q = std::max(index_q, a.index_q_rows());
  index_entries = std::max(index_entries, sizes.max_tokens / a.compressor->tokens_per_entry);
  index_top_k = std::max<int64_t>(index_top_k, a.indexer->top_k);
}

CompressedScratch CompressedWidths::allocate(DeviceArena& arena, int64_t rows, DType dtype) const {
  if (q == 0) return {};
  const auto buffer = [&](int64_t width) -> void* {
    if (width == 0) return nullptr;
    return arena.allocate<std::byte>(rows * width * dtype_bytes(dtype), "activations");
  };
  const auto numbers = [&]<class T>(T, int64_t width) -> T* {
    return width == 0 ? nullptr : arena.allocate<T>(rows * width, "activations");
  };
  const int64_t top_k = index_top_k;
  // At least one entry, so that there is an address.
  const int64_t stride = top_k > 0 ? std::max<int64_t>(index_entries, 1) : 0;
  return {.q = buffer(q),
          .groups = buffer(groups),
          .inputs = numbers(float{}, inputs),
          .index_q = buffer(index_q),
          .scores = numbers(float{}, stride),
          .scores_stride = stride,
          .chosen = numbers(int32_t{}, top_k),
          .num_chosen = numbers(int32_t{}, top_k > 0 ? 1 : 0)};
}

template <class Ctx>
void write_keys_values(Ctx& ctx, const CompressedAttention& a, const CompressedAttentionWeights& w,
                       const AttentionPass& pass) {
  const DecoderConfig& c = pass.config;
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  const DType dtype = activations.dtype;
  const auto& window = metadata_of<SlidingMetadata>(pass.metadata(pass.groups, kWindowStore));
  project(ctx, row_count(rows), w.qkv_a,
          {.x = pass.input, .y = activations.qkv, .x_dtype = dtype, .y_dtype = dtype});
  ctx.run(append_window_entries,
          AppendWindowEntriesParams{.num_rows = rows.num_rows,
                                    .max_rows = rows.capacity,
                                    .qkv_a = activations.qkv,
                                    .q_width = a.q_lora_rank,
                                    .slot_mapping = window.slot_mapping,
                                    .q_norm = w.q_norm,
                                    .entry_norm = w.kv_norm,
                                    .norm_weight_offset = c.norm_weight_offset,
                                    .norm_eps = c.norm_eps,
                                    .rope = pass.rope(a.rope, rows),
                                    .entries = pass.stores[kWindowStore],
                                    .head_dim = a.head_dim,
                                    .rope_head_dim = a.rope_head_dim,
                                    .dtype = dtype});
}

namespace {

template <class Ctx>
void rotate(Ctx& ctx, const CompressedAttention& a, const AttentionPass& pass, void* x,
            int32_t num_heads, int32_t head_dim, bool has_norm, bool is_inverse) {
  ctx.run(rotate_heads, RotateHeadsParams{.num_rows = pass.rows.num_rows,
                                          .max_rows = pass.rows.capacity,
                                          .x = x,
                                          .has_norm = has_norm,
                                          .norm_eps = pass.config.norm_eps,
                                          .rope = pass.rope(a.rope, pass.rows),
                                          .is_inverse = is_inverse,
                                          .num_heads = num_heads,
                                          .head_dim = head_dim,
                                          .rope_head_dim = a.rope_head_dim,
                                          .dtype = pass.activations.dtype});
}

// The queries of the attention or of the indexer, from the latent vector that both share.
template <class Ctx>
void project_q(Ctx& ctx, const CompressedAttention& a, const AttentionPass& pass,
               const Linear& linear, void* y) {
  project(ctx, row_count(pass.rows), linear,
          {.x = pass.activations.qkv,
           .x_stride = a.qkv_a_rows(),
           .y = y,
           .x_dtype = pass.activations.dtype,
           .y_dtype = pass.activations.dtype});
}

// Appends the rows' inputs to the tail, and the entries that they complete.
template <class Ctx>
void append_entries(Ctx& ctx, const CompressedAttention& a, const CompressedAttentionWeights& w,
                    const AttentionPass& pass) {
  const DecoderConfig& c = pass.config;
  const PassRows& rows = pass.rows;
  const auto& own = pass.activations.of<CompressedScratch>();
  const auto& tail = metadata_of<SlidingMetadata>(pass.metadata(pass.groups, kTailStore));
  const auto& entries = metadata_of<CompressedMetadata>(pass.metadata(pass.groups, kEntryStore));
  const KvLayerView entry_view = pass.stores[kEntryStore];
  const KvLayerView key_view = keys_behind(entry_view, a.head_dim);
  const DType dtype = pass.activations.dtype;
  project(ctx, row_count(rows), w.compress,
          {.x = pass.input, .y = own.inputs, .x_dtype = dtype, .y_dtype = DType::kFloat32});
  ctx.run(append_tail, AppendTailParams{.num_rows = rows.num_rows,
                                        .max_rows = rows.capacity,
                                        .x = own.inputs,
                                        .x_stride = a.compress_rows(),
                                        .slot_mapping = tail.slot_mapping,
                                        .tail = pass.stores[kTailStore],
                                        .width = a.tail_width()});
  ctx.run(compress, CompressParams{.num_rows = rows.num_rows,
                                   .max_rows = rows.capacity,
                                   .positions = rows.positions,
                                   .seq_slot = rows.seq_slot,
                                   .entry_slots = entries.slot_mapping,
                                   .tail = pass.stores[kTailStore],
                                   .tail_table = tail.table,
                                   .tail_width = a.tail_width(),
                                   .tokens_per_entry = a.compressor->tokens_per_entry,
                                   .overlaps = a.compressor->overlaps,
                                   .compressors = {{.dim = a.head_dim,
                                                    .tail_offset = 0,
                                                    .position_bias = w.position_bias,
                                                    .norm = w.entry_norm,
                                                    .entries = entry_view},
                                                   {.dim = a.indexer ? a.indexer->head_dim : 0,
                                                    .tail_offset = 2 * a.entry_inputs(),
                                                    .position_bias = w.index_position_bias,
                                                    .norm = w.index_norm,
                                                    .entries = key_view}},
                                   .num_compressors = a.indexer ? 2 : 1,
                                   .norm_weight_offset = c.norm_weight_offset,
                                   .norm_eps = c.norm_eps,
                                   .rope = pass.rope(a.rope, rows),
                                   .rope_head_dim = a.rope_head_dim});
}

// Scores the entries that each row may see and chooses those that it reads.
template <class Ctx>
void choose(Ctx& ctx, const CompressedAttention& a, const CompressedAttentionWeights& w,
            const AttentionPass& pass) {
  const PassRows& rows = pass.rows;
  const DType dtype = pass.activations.dtype;
  const auto& own = pass.activations.of<CompressedScratch>();
  const auto& entries = metadata_of<CompressedMetadata>(pass.metadata(pass.groups, kEntryStore));
  const KvLayerView key_view = keys_behind(pass.stores[kEntryStore], a.head_dim);
  const IndexerConfig& indexer = *a.indexer;
  project_q(ctx, a, pass, w.index_q, own.index_q);
  rotate(ctx, a, pass, own.index_q, indexer.num_heads, indexer.head_dim, /*has_norm=*/false,
         /*is_inverse=*/false);
  const auto heads = static_cast<float>(indexer.num_heads);
  const auto head_dim = static_cast<float>(indexer.head_dim);
  ctx.run(index_scores, IndexScoresParams{.num_rows = rows.num_rows,
                                          .max_rows = rows.capacity,
                                          .q = own.index_q,
                                          .weights = own.inputs + a.tail_width(),
                                          .weights_stride = a.compress_rows(),
                                          .seq_slot = rows.seq_slot,
                                          .entry_end = entries.entry_end,
                                          .table = entries.table,
                                          .keys = key_view,
                                          .scale = 1.0f / std::sqrt(heads * head_dim),
                                          .num_heads = indexer.num_heads,
                                          .head_dim = indexer.head_dim,
                                          .top_k = indexer.top_k,
                                          .scores = own.scores,
                                          .scores_stride = own.scores_stride,
                                          .dtype = dtype,
                                          .num_seqs = rows.num_seqs,
                                          .row_indptr = rows.row_indptr,
                                          .max_seqs = rows.max_seqs,
                                          .max_rows_per_seq = rows.max_rows_per_seq});
  ctx.run(choose_entries, ChooseEntriesParams{.num_rows = rows.num_rows,
                                              .max_rows = rows.capacity,
                                              .scores = own.scores,
                                              .scores_stride = own.scores_stride,
                                              .seq_slot = rows.seq_slot,
                                              .entry_end = entries.entry_end,
                                              .top_k = indexer.top_k,
                                              .chosen = own.chosen,
                                              .num_chosen = own.num_chosen});
}

}  // namespace

template <class Ctx>
void run_attention(Ctx& ctx, const CompressedAttention& a, const CompressedAttentionWeights& w,
                   const AttentionPass& pass) {
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  const auto& own = activations.of<CompressedScratch>();
  const DType dtype = activations.dtype;
  const auto& window = metadata_of<SlidingMetadata>(pass.metadata(pass.groups, kWindowStore));

  write_keys_values(ctx, a, w, pass);
  project_q(ctx, a, pass, w.q_b, own.q);
  rotate(ctx, a, pass, own.q, a.num_qo_heads, a.head_dim, /*has_norm=*/true,
         /*is_inverse=*/false);

  CompressedAttentionParams params = {.num_rows = rows.num_rows,
                                      .max_rows = rows.capacity,
                                      .q = own.q,
                                      .seq_slot = rows.seq_slot,
                                      .window_begin = window.kv_begin,
                                      .window_end = window.kv_end,
                                      .window_table = window.table,
                                      .window = pass.stores[kWindowStore],
                                      .entry_end = nullptr,
                                      .entry_table = {},
                                      .entries = {},
                                      .chosen = nullptr,
                                      .num_chosen = nullptr,
                                      .top_k = 0,
                                      .scale = a.scale,
                                      .sinks = w.sinks,
                                      .y = activations.attention,
                                      .num_heads = a.num_qo_heads,
                                      .head_dim = a.head_dim,
                                      .dtype = dtype,
                                      .num_seqs = rows.num_seqs,
                                      .row_indptr = rows.row_indptr,
                                      .max_seqs = rows.max_seqs,
                                      .max_rows_per_seq = rows.max_rows_per_seq};
  if (a.compressor) {
    append_entries(ctx, a, w, pass);
    const auto& entries = metadata_of<CompressedMetadata>(pass.metadata(pass.groups, kEntryStore));
    params.entry_end = entries.entry_end;
    params.entry_table = entries.table;
    params.entries = pass.stores[kEntryStore];
    if (a.indexer) {
      choose(ctx, a, w, pass);
      params.chosen = own.chosen;
      params.num_chosen = own.num_chosen;
      params.top_k = a.indexer->top_k;
    }
  }
  ctx.run(paceline::compressed_attention, params);
  rotate(ctx, a, pass, activations.attention, a.num_qo_heads, a.head_dim, /*has_norm=*/false,
         /*is_inverse=*/true);
  project(ctx, row_count(rows), w.o_a,
          {.x = activations.attention, .y = own.groups, .x_dtype = dtype, .y_dtype = dtype});
  project_branch(ctx, row_count(rows), w.o_b,
                 {.x = own.groups, .y = activations.branch, .x_dtype = dtype, .y_dtype = dtype},
                 activations, pass.ends);
}

template void run_attention<CpuContext>(CpuContext&, const CompressedAttention&,
                                        const WeightsOf<CompressedAttention>&,
                                        const AttentionPass&);
template void write_keys_values<CpuContext>(CpuContext&, const CompressedAttention&,
                                            const WeightsOf<CompressedAttention>&,
                                            const AttentionPass&);
#ifdef PACELINE_CUDA
template void run_attention<CudaContext>(CudaContext&, const CompressedAttention&,
                                         const WeightsOf<CompressedAttention>&,
                                         const AttentionPass&);
template void write_keys_values<CudaContext>(CudaContext&, const CompressedAttention&,
                                             const WeightsOf<CompressedAttention>&,
                                             const AttentionPass&);
#endif

}  // namespace paceline
