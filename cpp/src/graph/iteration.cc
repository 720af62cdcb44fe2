// SPDX-License-Identifier: Apache-2.0
#include "graph/iteration.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "device/cpu_context.h"
#include "sample/accept.h"
#include "speculate/row_ops.h"

namespace paceline {
namespace {

PassRows allocate_rows(DeviceArena& arena, int32_t capacity) {
  return {.num_rows = arena.allocate<int32_t>(1, "rows"),
          .token_ids = arena.allocate<int32_t>(capacity, "rows"),
          .positions = arena.allocate<int32_t>(capacity, "rows"),
          .seq_slot = arena.allocate<int32_t>(capacity, "rows"),
          .capacity = capacity};
}

GroupMetadata allocate_metadata(DeviceArena& arena, const KvGroup& group, const BlockTable& table,
                                int32_t capacity, bool use_window_lists) {
  auto* slots = arena.allocate<int64_t>(capacity, "metadata");
  if (group.kind == KvKind::kFull) {
    return FullMetadata{.slot_mapping = slots,
                        .kv_end = arena.allocate<int32_t>(capacity, "metadata"),
                        .table = table};
  }
  if (use_window_lists) {
    return WindowListMetadata{
        .slot_mapping = slots,
        .window_slots = arena.allocate<int64_t>(int64_t{capacity} * group.window, "window lists"),
        .window_count = arena.allocate<int32_t>(capacity, "metadata"),
        .window = group.window,
        .table = table};
  }
  return SlidingMetadata{.slot_mapping = slots,
                         .kv_begin = arena.allocate<int32_t>(capacity, "metadata"),
                         .kv_end = arena.allocate<int32_t>(capacity, "metadata"),
                         .window = group.window,
                         .table = table};
}

StagedInputs allocate_staged(DeviceArena& arena, const BatchShape& shape) {
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "staged inputs"); };
  return {.num_seqs = ints(1),
          .num_drafting = ints(1),
          .num_verify_rows = ints(1),
          .num_first_rows = ints(1),
          .num_logit_rows = ints(1),
          .seq_slot = ints(shape.max_seqs),
          .kind = ints(shape.max_seqs),
          .prefill_start = ints(shape.max_seqs),
          .verify_indptr = ints(shape.max_seqs + 1),
          .first_indptr = ints(shape.max_seqs + 1),
          .logit_indptr = ints(shape.max_seqs + 1),
          .prefill_tokens = ints(shape.max_verify_rows),
          .logit_rows = ints(shape.max_logit_rows),
          .first_last_row = ints(shape.max_seqs)};
}

SequenceState allocate_sequences(DeviceArena& arena, const BatchShape& shape,
                                 int32_t max_model_len) {
  const int64_t slots = shape.max_seqs;
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "sequence state"); };
  return {.known_len = ints(slots),
          .limit = ints(slots),
          .is_active = ints(slots),
          .seed = arena.allocate<uint64_t>(slots, "sequence state"),
          .temperature = arena.allocate<float>(slots, "sequence state"),
          .num_stop_ids = ints(slots),
          .stop_ids = ints(slots * kMaxStopIds),
          .history = ints(slots * max_model_len),
          .history_stride = max_model_len,
          .draft_tokens = ints(slots * std::max(shape.num_draft_tokens, 1)),
          .draft_len = ints(slots),
          .num_draft_tokens = shape.num_draft_tokens};
}

}  // namespace

IterationBuffers allocate_iteration_buffers(DeviceArena& arena, const IterationOptions& options,
                                            const KvLayout& layout, const DecoderConfig& target,
                                            const DecoderConfig* draft) {
  const BatchShape& shape = options.shape;
  PACELINE_CHECK(layout.groups.size() <= kMaxKvGroups, layout.groups.size(), " KV groups of ",
                 kMaxKvGroups);
  // The drafter also sees the token that a finished prompt has drawn.
  const int32_t first_capacity = shape.max_verify_rows + shape.max_seqs;
  IterationBuffers b;
  b.staged = allocate_staged(arena, shape);
  b.sequences = allocate_sequences(arena, shape, options.max_model_len);
  b.current_draft_step = arena.allocate<int32_t>(1, "step state");
  b.verify_rows = allocate_rows(arena, shape.max_verify_rows);
  b.first_rows = allocate_rows(arena, first_capacity);
  b.step_rows = allocate_rows(arena, shape.max_seqs);
  for (const KvGroup& group : layout.groups) {
    const int64_t stride =
        (int64_t{options.max_model_len} + group.block_size - 1) / group.block_size;
    const BlockTable table{
        .blocks = arena.allocate<int32_t>(stride * shape.max_seqs, "block tables"),
        .stride = stride,
        .block_size = group.block_size};
    b.block_tables.push_back(table);
    const bool is_target = group.owner == KvOwner::kTarget;
    const auto metadata = [&](bool is_used, int32_t capacity) {
      return is_used ? allocate_metadata(arena, group, table, capacity, options.use_window_lists)
                     : GroupMetadata{};
    };
    b.verify_metadata.push_back(metadata(is_target, shape.max_verify_rows));
    b.first_metadata.push_back(metadata(!is_target, first_capacity));
    b.step_metadata.push_back(metadata(!is_target, shape.max_seqs));
  }
  ActivationWidths widths;
  widths.merge(target);
  if (draft != nullptr) widths.merge(*draft);
  b.activations = allocate_activations(
      arena, draft != nullptr ? first_capacity : shape.max_verify_rows, widths);
  b.gathered = arena.allocate<float>(shape.max_logit_rows * widths.hidden, "logits");
  b.logits = arena.allocate<float>(
      int64_t{shape.max_logit_rows} *
          std::max(target.vocab_size, draft != nullptr ? draft->vocab_size : 0),
      "logits");
  b.target_tokens = arena.allocate<int32_t>(shape.max_logit_rows, "draws");
  b.drawn = arena.allocate<int32_t>(shape.max_seqs, "draws");
  b.identity = arena.allocate<int32_t>(shape.max_seqs, "draws");
  for (int32_t i = 0; i < shape.max_seqs; ++i) b.identity[i] = i;
  b.results = arena.allocate<SequenceResult>(shape.max_seqs, "results");
  return b;
}

Iteration::Iteration(const IterationOptions& options, const KvLayout& layout,
                     const Decoder& target, const Speculator& speculator,
                     const IterationBuffers& buffers)
    : options_(options),
      layout_(layout),
      target_(target),
      speculator_(speculator),
      buffers_(buffers) {}

const Decoder* Iteration::drafter() const {
  const auto* draft = std::get_if<DraftModelSpeculator>(&speculator_);
  return draft != nullptr ? &draft->decoder : nullptr;
}

int32_t Iteration::num_draft_steps() const {
  return traits_of(speculator_).drafts ? options_.shape.num_draft_tokens - 1 : 0;
}

template <class Ctx>
void Iteration::draw_drafts(Ctx& ctx, const int32_t* num_rows, const int32_t* row_index,
                            const PassRows& rows) const {
  const IterationBuffers& b = buffers_;
  const int32_t draft_vocab = drafter()->config().vocab_size;
  ctx.run(draw, DrawParams{.num_rows = num_rows,
                           .max_rows = options_.shape.max_seqs,
                           .logits = b.logits,
                           .logits_stride = draft_vocab,
                           // Tables that differ in padding rows: what only one of them has is never
                           // drafted.
                           .vocab_limit = std::min(target_.config().vocab_size, draft_vocab),
                           .row_index = row_index,
                           .seq_slot = rows.seq_slot,
                           .positions = rows.positions,
                           .seeds = b.sequences.seed,
                           .temperatures = b.sequences.temperature,
                           .tokens = b.drawn});
}

template <class Ctx>
void Iteration::verify(Ctx& ctx) const {
  const IterationBuffers& b = buffers_;
  const int32_t max_logit_rows = options_.shape.max_logit_rows;
  ctx.run(assemble_verify_rows, AssembleVerifyRowsParams{b.staged, b.sequences, b.verify_rows});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].owner == KvOwner::kTarget) {
      build(ctx, b.verify_rows, b.verify_metadata[g], /*padded_rows=*/0);
    }
  }
  target_.forward(ctx, b.verify_rows, b.verify_metadata, b.activations);
  target_.logits(ctx, b.staged.num_logit_rows, max_logit_rows, b.staged.logit_rows, b.activations,
                 b.gathered, b.logits);
  ctx.run(draw, DrawParams{.num_rows = b.staged.num_logit_rows,
                           .max_rows = max_logit_rows,
                           .logits = b.logits,
                           .logits_stride = target_.config().vocab_size,
                           .vocab_limit = target_.config().vocab_size,
                           .row_index = b.staged.logit_rows,
                           .seq_slot = b.verify_rows.seq_slot,
                           .positions = b.verify_rows.positions,
                           .seeds = b.sequences.seed,
                           .temperatures = b.sequences.temperature,
                           .tokens = b.target_tokens});
  AcceptParams params{.inputs = b.staged,
                      .sequences = b.sequences,
                      .target_tokens = b.target_tokens,
                      .results = b.results,
                      .method = options_.accept_method,
                      .synthetic_rate = {}};
  // A mean length A (bonus included) as certain acceptance of floor(A) - 1 drafts and a chance at
  // one more.
  double left = options_.synthetic_acceptance_length - 1;
  for (float& rate : params.synthetic_rate) {
    rate = static_cast<float>(std::clamp(left, 0.0, 1.0));
    left -= 1;
  }
  ctx.run(accept, params);
}

template <class Ctx>
void Iteration::first_draft_pass(Ctx& ctx) const {
  const IterationBuffers& b = buffers_;
  const Decoder* draft = drafter();
  if (draft == nullptr) return;
  ctx.run(assemble_first_rows, AssembleFirstRowsParams{b.staged, b.sequences, b.first_rows});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].owner == KvOwner::kDraft) {
      build(ctx, b.first_rows, b.first_metadata[g], /*padded_rows=*/0);
    }
  }
  draft->forward(ctx, b.first_rows, b.first_metadata, b.activations);
  draft->logits(ctx, b.staged.num_drafting, options_.shape.max_seqs, b.staged.first_last_row,
                b.activations, b.gathered, b.logits);
  draw_drafts(ctx, b.staged.num_drafting, b.staged.first_last_row, b.first_rows);
  ctx.run(begin_draft_steps, BeginDraftStepsParams{.inputs = b.staged,
                                                   .sequences = b.sequences,
                                                   .drawn = b.drawn,
                                                   .rows = b.step_rows,
                                                   .current_draft_step = b.current_draft_step});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].owner == KvOwner::kDraft) {
      build(ctx, b.step_rows, b.step_metadata[g], b.step_rows.capacity);
    }
  }
}

template <class Ctx>
void Iteration::draft_step(Ctx& ctx) const {
  const IterationBuffers& b = buffers_;
  const Decoder* draft = drafter();
  if (draft == nullptr) return;
  draft->forward(ctx, b.step_rows, b.step_metadata, b.activations);
  draft->logits(ctx, b.step_rows.num_rows, b.step_rows.capacity, b.identity, b.activations,
                b.gathered, b.logits);
  draw_drafts(ctx, b.step_rows.num_rows, b.identity, b.step_rows);
  ctx.run(store_draft, StoreDraftParams{.current_draft_step = b.current_draft_step,
                                        .rows = b.step_rows,
                                        .sequences = b.sequences,
                                        .drawn = b.drawn});
  AdvanceParams params{.current_draft_step = b.current_draft_step,
                       .rows = b.step_rows,
                       .drawn = b.drawn,
                       .sequences = b.sequences,
                       .groups = {},
                       .num_groups = 0};
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].owner == KvOwner::kDraft) {
      params.groups[params.num_groups++] = advance_group(b.step_metadata[g]);
    }
  }
  ctx.run(advance_draft_step, params);
  for (const GroupMetadata& metadata : b.step_metadata) {
    if (const auto* list = std::get_if<WindowListMetadata>(&metadata)) {
      ctx.run(advance_window_list, AdvanceWindowListParams{b.step_rows, *list});
    }
  }
}

template void Iteration::verify<CpuContext>(CpuContext&) const;
template void Iteration::first_draft_pass<CpuContext>(CpuContext&) const;
template void Iteration::draft_step<CpuContext>(CpuContext&) const;

}  // namespace paceline
