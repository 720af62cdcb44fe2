// SPDX-License-Identifier: Apache-2.0
#include "graph/iteration.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "ops/fork.h"
#include "sample/accept.h"
#include "speculate/row_ops.h"

namespace paceline {
namespace {

// `num_seqs` null: each row is a sequence of its own.
PassRows allocate_rows(DeviceArena& arena, int32_t capacity, const int32_t* num_seqs,
                       const int32_t* row_indptr) {
  auto* num_rows = arena.allocate<int32_t>(1, "rows");
  return {.num_rows = num_rows,
          .token_ids = arena.allocate<int32_t>(capacity, "rows"),
          .positions = arena.allocate<int32_t>(capacity, "rows"),
          .seq_slot = arena.allocate<int32_t>(capacity, "rows"),
          .capacity = capacity,
          .num_seqs = num_seqs != nullptr ? num_seqs : num_rows,
          .row_indptr = row_indptr,
          .max_seqs = 0,  // these two come with the extent of a pass
          .max_rows_per_seq = 0};
}

PassRows with_extent(PassRows rows, int32_t num_rows, int32_t num_seqs, int32_t rows_per_seq) {
  rows.capacity = num_rows;
  rows.max_seqs = num_seqs;
  rows.max_rows_per_seq = rows_per_seq;
  return rows;
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

StagedInputs allocate_staged(DeviceArena& arena, const BatchShape& shape, int64_t num_groups) {
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "staged inputs"); };
  return {.num_seqs = ints(1),
          .num_drafting = ints(1),
          .num_verify_rows = ints(1),
          .num_first_rows = ints(1),
          .num_logit_rows = ints(1),
          .seq_slot = ints(shape.max_seqs),
          .kind = ints(shape.max_seqs),
          .prefill_start = ints(shape.max_seqs),
          .next_token = ints(shape.max_seqs),
          .verify_indptr = ints(shape.max_seqs + 1),
          .first_indptr = ints(shape.max_seqs + 1),
          .logit_indptr = ints(shape.max_seqs + 1),
          .prefill_tokens = ints(shape.max_verify_rows),
          .logit_rows = ints(shape.max_logit_rows),
          .num_resets = ints(1),
          .reset_slots = ints(shape.max_seqs),
          .num_all_logit_rows = ints(1),
          .prompt_targets = ints(shape.max_prompt_rows),
          .num_forks = ints(1),
          .forks = arena.allocate<SequenceFork>(shape.max_seqs, "staged inputs"),
          .num_block_copies = ints(1),
          .block_copies = arena.allocate<BlockCopy>(shape.max_seqs * num_groups, "staged inputs")};
}

SamplingState allocate_sampling(DeviceArena& arena, const BatchShape& shape, int32_t vocab_size) {
  const int64_t slots = shape.max_seqs;
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "sampling"); };
  const auto floats = [&](int64_t count) { return arena.allocate<float>(count, "sampling"); };
  const auto masks = [&] {
    return arena.allocate<uint32_t>(slots * mask_words(vocab_size), "sampling");
  };
  return {.adjusts = ints(slots),
          .truncates = ints(slots),
          .repetition_penalty = floats(slots),
          .presence_penalty = floats(slots),
          .frequency_penalty = floats(slots),
          .prompt_len = ints(slots),
          .min_tokens = ints(slots),
          .num_bias = ints(slots),
          .bias_ids = ints(slots * kMaxLogitBias),
          .bias_values = floats(slots * kMaxLogitBias),
          .num_bad_words = ints(slots),
          .bad_word_ends = ints(slots * kMaxBadWords),
          .bad_word_tokens = ints(slots * kMaxBadWordTokens),
          .has_allowed = ints(slots),
          .allowed = masks(),
          .top_k = ints(slots),
          .top_p = floats(slots),
          .min_p = floats(slots),
          .num_logprobs = ints(slots),
          .num_prompt_logprobs = ints(slots),
          .counts = ints(slots * vocab_size),
          .seen = masks(),
          .vocab_size = vocab_size};
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

IterationExtent full_extent(const BatchShape& shape) {
  return {.num_seqs = shape.max_seqs,
          .num_drafting = shape.max_seqs,
          .num_verify_rows = shape.max_verify_rows,
          .num_first_rows = shape.max_verify_rows + shape.max_seqs,
          .num_logit_rows = shape.max_logit_rows,
          .num_prompt_rows = shape.max_prompt_rows,
          .verify_rows_per_seq = shape.max_verify_rows,
          .first_rows_per_seq = shape.max_verify_rows + 1,
          .num_forks = shape.max_seqs,
          .num_block_copies = shape.max_seqs * kMaxKvGroups};
}

IterationExtent decode_extent(const BatchShape& shape, int32_t num_seqs, bool has_logit_work) {
  const int32_t width = shape.num_draft_tokens + 1;
  return {.num_seqs = num_seqs,
          .num_drafting = num_seqs,
          .num_verify_rows = num_seqs * width,
          .num_first_rows = num_seqs * shape.first_rows_per_decode(),
          .num_logit_rows = num_seqs * width,
          .verify_rows_per_seq = width,
          .first_rows_per_seq = shape.first_rows_per_decode(),
          .has_logit_work = has_logit_work};
}

IterationExtent extent_of(const IterationInputs& inputs) {
  IterationExtent extent = {.num_seqs = inputs.num_seqs,
                            .num_drafting = inputs.num_drafting,
                            .num_verify_rows = inputs.num_verify_rows,
                            .num_first_rows = inputs.num_first_rows,
                            .num_logit_rows = inputs.num_logit_rows,
                            .num_prompt_rows = inputs.num_prompt_rows,
                            .num_forks = static_cast<int32_t>(inputs.forks.size()),
                            .num_block_copies = static_cast<int32_t>(inputs.block_copies.size()),
                            .has_logit_work = inputs.has_logit_work};
  for (int32_t i = 0; i < inputs.num_seqs; ++i) {
    extent.verify_rows_per_seq =
        std::max(extent.verify_rows_per_seq, inputs.verify_indptr[i + 1] - inputs.verify_indptr[i]);
    extent.first_rows_per_seq =
        std::max(extent.first_rows_per_seq, inputs.first_indptr[i + 1] - inputs.first_indptr[i]);
  }
  return extent;
}

IterationBuffers allocate_iteration_buffers(DeviceArena& arena, const IterationOptions& options,
                                            const KvLayout& layout, const DecoderConfig& target,
                                            const DecoderConfig* draft, DType activation_dtype) {
  const BatchShape& shape = options.shape;
  PACELINE_CHECK(layout.groups.size() <= kMaxKvGroups, layout.groups.size(), " KV groups of ",
                 kMaxKvGroups);
  // The drafter also sees the token that a finished prompt has drawn.
  const int32_t first_capacity = shape.max_verify_rows + shape.max_seqs;
  IterationBuffers b;
  b.staged = allocate_staged(arena, shape, static_cast<int64_t>(layout.groups.size()));
  b.sequences = allocate_sequences(arena, shape, options.max_model_len);
  b.sampling = allocate_sampling(arena, shape, target.vocab_size);
  b.current_draft_step = arena.allocate<int32_t>(1, "step state");
  std::vector<int32_t> identity(static_cast<size_t>(shape.max_seqs) + 1);
  std::iota(identity.begin(), identity.end(), 0);
  b.identity = arena.allocate_copy<int32_t>(identity, "draws");
  b.verify_rows =
      allocate_rows(arena, shape.max_verify_rows, b.staged.num_seqs, b.staged.verify_indptr);
  b.first_rows = allocate_rows(arena, first_capacity, b.staged.num_seqs, b.staged.first_indptr);
  b.step_rows = allocate_rows(arena, shape.max_seqs, /*num_seqs=*/nullptr, b.identity);
  for (const KvGroup& group : layout.groups) {
    const int64_t stride =
        (int64_t{options.max_model_len} + group.block_size - 1) / group.block_size;
    const BlockTable table{
        .blocks = arena.allocate<int32_t>(stride * shape.max_seqs, "block tables"),
        .stride = stride,
        .block_size = group.block_size};
    b.block_tables.push_back(table);
    const auto id = static_cast<GroupId>(b.block_tables.size() - 1);
    const bool is_drafted_from = layout.is_read_by(KvOwner::kDraft, id);
    const auto metadata = [&](bool is_used, int32_t capacity) {
      return is_used ? allocate_metadata(arena, group, table, capacity, options.use_window_lists)
                     : GroupMetadata{};
    };
    b.verify_metadata.push_back(
        metadata(layout.is_read_by(KvOwner::kTarget, id), shape.max_verify_rows));
    b.first_metadata.push_back(metadata(is_drafted_from, first_capacity));
    b.step_metadata.push_back(metadata(is_drafted_from, shape.max_seqs));
  }
  ActivationWidths widths;
  widths.merge(target);
  if (draft != nullptr) widths.merge(*draft);
  const auto padded = [&](int32_t rows) -> int64_t {
    return options.padded_rows != nullptr ? options.padded_rows(rows) : rows;
  };
  b.activations =
      allocate_activations(arena, padded(draft != nullptr ? first_capacity : shape.max_verify_rows),
                           widths, activation_dtype);
  b.gathered = arena.allocate<float>(shape.max_logit_rows * widths.hidden, "logits");
  b.logits = arena.allocate<float>(
      padded(shape.max_logit_rows) *
          std::max(target.num_logits(), draft != nullptr ? draft->num_logits() : 0),
      "logits");
  b.target_tokens = arena.allocate<int32_t>(shape.max_logit_rows, "draws");
  b.drawn = arena.allocate<int32_t>(shape.max_seqs, "draws");
  b.first_last_row = arena.allocate<int32_t>(shape.max_seqs, "rows");
  b.draft_output = {.feedback = b.gathered, .logits = b.logits};
  if (draft != nullptr && draft->drafter) {
    const DrafterConfig& drafter = *draft->drafter;
    const auto num_parts = static_cast<int32_t>(std::max<size_t>(drafter.aux_layers.size(), 1));
    const int32_t width = num_parts * target.hidden;
    b.target_hidden = {
        .data = arena.allocate<std::byte>(
            padded(first_capacity) * width * dtype_bytes(activation_dtype), "hidden states"),
        .width = width,
        .aux_layers = drafter.aux_layers};
    if (shape.first_rows == FirstRows::kLast) {
      b.hidden_rows = arena.allocate<int32_t>(first_capacity, "rows");
    }
    // Not b.gathered: this is state that goes from step to step.
    HeadOutput& output = b.draft_output;
    output.feedback = arena.allocate<float>(
        padded(shape.max_seqs) * std::max(draft->hidden, draft->embed_width()), "hidden states");
    if (const CentroidsConfig& centroids = drafter.centroids; centroids.count > 0) {
      output.centroid_scores =
          arena.allocate<float>(padded(shape.max_seqs) * centroids.count, "logits");
      output.clusters = arena.allocate<int32_t>(int64_t{shape.max_seqs} * centroids.top, "logits");
      output.tokens =
          arena.allocate<int32_t>(int64_t{shape.max_seqs} * draft->num_logits(), "logits");
    }
  }
  b.draft_stop.keep_drafting = arena.allocate<int32_t>(1, "step state");
  if (options.draft_stop_threshold > 0) {
    b.draft_stop.probabilities = arena.allocate<float>(shape.max_seqs, "draws");
    b.draft_stop.threshold = static_cast<float>(options.draft_stop_threshold);
  }
  b.results = arena.allocate<SequenceResult>(shape.max_seqs, "results");
  if (shape.max_logprobs > 0) b.logprobs = allocate_logprobs(arena, shape, target.vocab_size);
  b.rejection =
      allocate_rejection(arena, shape, options.accept_method,
                         options.samples_drafts && draft != nullptr, options.num_draft_proposals);
  return b;
}

Iteration::Iteration(const IterationOptions& options, const KvLayout& layout, const Decoder& target,
                     const Speculator& speculator, const IterationBuffers& buffers)
    : options_(options),
      layout_(layout),
      target_(target),
      speculator_(speculator),
      buffers_(buffers) {}

bool Iteration::has_draft_passes() const {
  return traits_of(speculator_).first_rows != FirstRows::kNone;
}

int32_t Iteration::num_draft_steps() const {
  return has_draft_passes() ? options_.shape.num_draft_tokens - 1 : 0;
}

bool Iteration::is_drafted_from(size_t group) const {
  return layout_.is_read_by(KvOwner::kDraft, static_cast<GroupId>(group));
}

template <class Ctx>
void Iteration::draw_drafts(Ctx& ctx, const IterationExtent& extent, const int32_t* num_rows,
                            const int32_t* row_index, const PassRows& rows,
                            const int32_t* steps) const {
  const IterationBuffers& b = buffers_;
  const int32_t num_logits = decoder_of(speculator_)->config().num_logits();
  const int32_t target_vocab = target_.config().vocab_size;
  const TokenMap map = token_map(speculator_, b.draft_output);
  const SpecTraits traits = traits_of(speculator_);
  // Tables that differ in padding rows: what only one of them has is never drafted.
  const int32_t vocab_limit =
      map.tokens != nullptr ? num_logits : std::min(target_vocab, num_logits);
  if (extent.has_logit_work) {
    // What the target would hardly draw is not worth drafting.
    ctx.run(truncate_logits, TruncateLogitsParams{.num_rows = num_rows,
                                                  .max_rows = extent.num_drafting,
                                                  .logits = b.logits,
                                                  .logits_stride = num_logits,
                                                  .vocab_limit = vocab_limit,
                                                  .row_index = row_index,
                                                  .seq_slot = rows.seq_slot,
                                                  .temperatures = b.sequences.temperature,
                                                  .sampling = b.sampling});
  }
  DrawParams params{.num_rows = num_rows,
                    .max_rows = extent.num_drafting,
                    .logits = b.logits,
                    .logits_stride = num_logits,
                    .vocab_limit = vocab_limit,
                    .row_index = row_index,
                    .seq_slot = rows.seq_slot,
                    .positions = rows.positions,
                    .seeds = b.sequences.seed,
                    .temperatures = b.sequences.temperature,
                    .tokens = b.drawn,
                    .probabilities = b.draft_stop.probabilities,
                    .draw_ahead = traits.draw_ahead,
                    .token_map = map.tokens,
                    .token_limit = target_vocab,
                    .token_map_stride = map.stride,
                    .steps_ahead = traits.advances_positions ? nullptr : steps};
  if (b.rejection.is_used()) params = propose_draft(ctx, b.rejection, b.sequences, params, steps);
  ctx.run(draw, params);
}

template <class Ctx>
void Iteration::fork(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  CopyBlocksParams copies{.num_copies = b.staged.num_block_copies,
                          .max_copies = extent.num_block_copies,
                          .copies = b.staged.block_copies,
                          .pool = b.kv_pool,
                          .block_bytes = {}};
  ForkSequencesParams forks{.num_forks = b.staged.num_forks,
                            .max_forks = extent.num_forks,
                            .forks = b.staged.forks,
                            .sequences = b.sequences,
                            .sampling = b.sampling,
                            .tables = {},
                            .num_tables = static_cast<int32_t>(b.block_tables.size())};
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    copies.block_bytes[g] = layout_.groups[g].block_bytes;
    forks.tables[g] = b.block_tables[g];
  }
  ctx.run(copy_blocks, copies);
  ctx.run(fork_sequences, forks);
}

template <class Ctx>
void Iteration::begin_prefill(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  if (extent.has_logit_work) {
    ctx.run(clear_counts, ClearCountsParams{.num_slots = b.staged.num_resets,
                                            .max_slots = options_.shape.max_seqs,
                                            .slots = b.staged.reset_slots,
                                            .sampling = b.sampling});
  }
  if (extent.num_forks > 0) fork(ctx, extent);
  if (!extent.has_logit_work) return;
  ctx.run(count_prefill_tokens,
          CountPrefillTokensParams{
              .inputs = b.staged, .sampling = b.sampling, .max_seqs = extent.num_seqs});
}

template <class Ctx>
void Iteration::shape_logits(Ctx& ctx, const IterationExtent& extent, const PassRows& rows) const {
  const IterationBuffers& b = buffers_;
  ctx.run(adjust_logits, AdjustLogitsParams{.num_rows = b.staged.num_logit_rows,
                                            .max_rows = extent.num_logit_rows,
                                            .logits = b.logits,
                                            .logits_stride = target_.config().vocab_size,
                                            .row_index = b.staged.logit_rows,
                                            .seq_slot = rows.seq_slot,
                                            .positions = rows.positions,
                                            .token_ids = rows.token_ids,
                                            .sequences = b.sequences,
                                            .sampling = b.sampling});
  ctx.run(truncate_logits, TruncateLogitsParams{.num_rows = b.staged.num_logit_rows,
                                                .max_rows = extent.num_logit_rows,
                                                .logits = b.logits,
                                                .logits_stride = target_.config().vocab_size,
                                                .vocab_limit = target_.config().vocab_size,
                                                .row_index = b.staged.logit_rows,
                                                .seq_slot = rows.seq_slot,
                                                .temperatures = b.sequences.temperature,
                                                .sampling = b.sampling});
}

template <class Ctx>
void Iteration::verify(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  const PassRows rows = with_extent(b.verify_rows, extent.num_verify_rows, extent.num_seqs,
                                    extent.verify_rows_per_seq);
  ctx.run(assemble_verify_rows, AssembleVerifyRowsParams{b.staged, b.sequences, rows});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].owner == KvOwner::kTarget) {
      build(ctx, rows, b.verify_metadata[g], /*padded_rows=*/0);
    }
  }
  target_.forward(ctx, rows, b.verify_metadata, b.activations, b.target_hidden);
  target_.logits(
      ctx, b.staged.num_all_logit_rows,
      std::min(extent.num_logit_rows + extent.num_prompt_rows, options_.shape.max_logit_rows),
      b.staged.logit_rows, b.activations, b.gathered, b.logits);
  if (extent.has_logit_work) {
    keep_raw_logits(ctx, extent);
    shape_logits(ctx, extent, rows);
  }
  ctx.run(draw, DrawParams{.num_rows = b.staged.num_logit_rows,
                           .max_rows = extent.num_logit_rows,
                           .logits = b.logits,
                           .logits_stride = target_.config().vocab_size,
                           .vocab_limit = target_.config().vocab_size,
                           .row_index = b.staged.logit_rows,
                           .seq_slot = rows.seq_slot,
                           .positions = rows.positions,
                           .seeds = b.sequences.seed,
                           .temperatures = b.sequences.temperature,
                           .tokens = b.target_tokens});
  AcceptParams params{.inputs = b.staged,
                      .sequences = b.sequences,
                      .target_tokens = b.target_tokens,
                      .results = b.results,
                      .max_seqs = extent.num_seqs,
                      .method = options_.accept_method,
                      .synthetic_rate = {}};
  // A mean length A (bonus included) as certain acceptance of floor(A) - 1 drafts and a chance at
  // one more.
  double left = options_.synthetic_acceptance_length - 1;
  for (float& rate : params.synthetic_rate) {
    rate = static_cast<float>(std::clamp(left, 0.0, 1.0));
    left -= 1;
  }
  if (b.rejection.is_used()) {
    reject(ctx, b.rejection,
           {.inputs = b.staged,
            .sequences = b.sequences,
            .rows = rows,
            .method = options_.accept_method,
            .target_tokens = b.target_tokens,
            .logits = b.logits,
            .vocab_size = target_.config().vocab_size,
            .num_logit_rows = extent.num_logit_rows,
            .num_seqs = extent.num_seqs});
    params.kept = b.rejection.kept;
    params.replacements = b.rejection.replacements;
  }
  ctx.run(accept, params);
  if (!extent.has_logit_work) return;
  ctx.run(count_emitted_tokens, CountEmittedTokensParams{.inputs = b.staged,
                                                         .sampling = b.sampling,
                                                         .results = b.results,
                                                         .max_seqs = extent.num_seqs});
  rate_tokens(ctx, extent);
}

template <class Ctx>
void Iteration::first_draft_pass(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  if (!has_draft_passes()) {
    propose(ctx, speculator_, b.staged, b.sequences, extent.num_drafting);
    return;
  }
  const SpecTraits traits = traits_of(speculator_);
  const PassRows rows =
      with_extent(b.first_rows, extent.num_first_rows, extent.num_seqs, extent.first_rows_per_seq);
  const PassRows step_rows =
      with_extent(b.step_rows, extent.num_drafting, extent.num_drafting, /*rows_per_seq=*/1);
  ctx.run(assemble_first_rows, AssembleFirstRowsParams{.inputs = b.staged,
                                                       .sequences = b.sequences,
                                                       .rows = rows,
                                                       .first_rows = traits.first_rows,
                                                       .results = b.results,
                                                       .last_row = b.first_last_row,
                                                       .hidden_rows = b.hidden_rows});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (is_drafted_from(g)) {
      build(ctx, rows, b.first_metadata[g], /*padded_rows=*/0);
    }
  }
  draft_forward(ctx, speculator_, rows, b.first_metadata, b.activations,
                {.target_hidden = traits.takes_target_hidden ? b.target_hidden.data : nullptr,
                 .hidden_rows = b.hidden_rows});
  draft_logits(ctx, speculator_, b.staged.num_drafting, extent.num_drafting, b.first_last_row,
               b.activations, b.draft_output);
  draw_drafts(ctx, extent, b.staged.num_drafting, b.first_last_row, rows, /*steps=*/nullptr);
  ctx.run(begin_draft_steps,
          BeginDraftStepsParams{.inputs = b.staged,
                                .sequences = b.sequences,
                                .drawn = b.drawn,
                                .rows = step_rows,
                                .current_draft_step = b.current_draft_step,
                                .stop = b.draft_stop,
                                .draw_ahead = traits.draw_ahead,
                                .advances_positions = traits.advances_positions});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (is_drafted_from(g)) {
      build(ctx, step_rows, b.step_metadata[g], step_rows.capacity);
    }
  }
}

template <class Ctx>
void Iteration::draft_step(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  if (!has_draft_passes()) return;
  const PassRows rows =
      with_extent(b.step_rows, extent.num_drafting, extent.num_drafting, /*rows_per_seq=*/1);
  const SpecTraits traits = traits_of(speculator_);
  draft_forward(ctx, speculator_, rows, b.step_metadata, b.activations,
                {.feedback = traits.feeds_hidden_back ? b.draft_output.feedback : nullptr});
  draft_logits(ctx, speculator_, rows.num_rows, rows.capacity, b.identity, b.activations,
               b.draft_output);
  draw_drafts(ctx, extent, rows.num_rows, b.identity, rows, b.current_draft_step);
  ctx.run(store_draft, StoreDraftParams{.current_draft_step = b.current_draft_step,
                                        .rows = rows,
                                        .sequences = b.sequences,
                                        .drawn = b.drawn,
                                        .stop = b.draft_stop});
  AdvanceParams params{.current_draft_step = b.current_draft_step,
                       .rows = rows,
                       .drawn = b.drawn,
                       .sequences = b.sequences,
                       .stop = b.draft_stop,
                       .groups = {},
                       .num_groups = 0,
                       .draw_ahead = traits.draw_ahead,
                       .advances_positions = traits.advances_positions};
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (is_drafted_from(g)) {
      params.groups[params.num_groups++] = advance_group(b.step_metadata[g]);
    }
  }
  ctx.run(advance_draft_step, params);
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (!is_drafted_from(g)) continue;
    if (const auto* list = std::get_if<WindowListMetadata>(&b.step_metadata[g])) {
      ctx.run(advance_window_list, AdvanceWindowListParams{rows, *list});
    }
  }
}

template void Iteration::begin_prefill<CpuContext>(CpuContext&, const IterationExtent&) const;
template void Iteration::verify<CpuContext>(CpuContext&, const IterationExtent&) const;
template void Iteration::first_draft_pass<CpuContext>(CpuContext&, const IterationExtent&) const;
template void Iteration::draft_step<CpuContext>(CpuContext&, const IterationExtent&) const;
#ifdef PACELINE_CUDA
template void Iteration::begin_prefill<CudaContext>(CudaContext&, const IterationExtent&) const;
template void Iteration::verify<CudaContext>(CudaContext&, const IterationExtent&) const;
template void Iteration::first_draft_pass<CudaContext>(CudaContext&, const IterationExtent&) const;
template void Iteration::draft_step<CudaContext>(CudaContext&, const IterationExtent&) const;
#endif

}  // namespace paceline
