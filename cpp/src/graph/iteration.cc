// SPDX-License-Identifier: Apache-2.0
#include "graph/iteration.h"

#include <algorithm>
#include <optional>

#include "base/overloaded.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "metadata/pass_rows.h"
#include "ops/fork.h"
#include "ops/gather.h"
#include "sample/accept.h"
#include "sample/logits.h"
#include "speculate/row_ops.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"

namespace paceline {
namespace {

// The activations that have the output of a pass.
Activations with_output(Activations activations, const std::optional<OutputRows>& output) {
  if (output.has_value()) activations.residual = output->residual;
  return activations;
}

// The last layer leaves out rows with an unread output if there are at least this many. With fewer
// that would be slower, because five small ops pick the other rows.
constexpr int32_t kMinUnread = 32;

}  // namespace

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

int32_t Iteration::num_draft_steps(int32_t num_drafts) const {
  const bool has_steps = has_draft_passes() && !traits_of(speculator_).drafts_in_blocks;
  return has_steps ? std::max(num_drafts - 1, 0) : 0;
}

bool Iteration::is_drafted_from(size_t group) const {
  return layout_.is_read_by(KvOwner::kDraft, static_cast<GroupId>(group));
}

DrawParams Iteration::draw_params(const DraftDraws& draws) const {
  const IterationBuffers& b = buffers_;
  const bool is_chosen = draws.candidates != nullptr;
  const int32_t num_logits =
      is_chosen ? draws.num_candidates : decoder_of(speculator_)->config().num_logits();
  const int32_t target_vocab = target_.config().vocab_size;
  const TokenMap map = is_chosen ? TokenMap{draws.candidates, draws.num_candidates}
                                 : token_map(speculator_, b.draft_output);
  return {.num_rows = draws.num_rows,
          .max_rows = draws.max_rows,
          .logits = draws.logits,
          .logits_stride = num_logits,
          // The two vocabularies may differ in padding rows. A token that only one has is never
          // drafted.
          .vocab_limit = map.tokens != nullptr ? num_logits : std::min(target_vocab, num_logits),
          .row_index = draws.row_index,
          .seq_slot = draws.rows.seq_slot,
          .positions = draws.rows.positions,
          .seeds = b.sequences.seed,
          .temperatures = b.sequences.temperature,
          .tokens = draws.tokens,
          .probabilities = draws.probabilities,
          .draw_ahead = draws.draw_ahead,
          .token_map = map.tokens,
          .token_limit = target_vocab,
          .token_map_stride = map.stride,
          .steps_ahead = draws.adds_steps ? draws.steps : nullptr};
}

LogitIds Iteration::target_ids(const IterationExtent& extent) const {
  const bool rejects = extent.num_drafts > 0 && buffers_.rejection.is_used();
  const bool reads_all = extent.has_logit_work || extent.returns_logits || rejects;
  return reads_all ? LogitIds::kAll : LogitIds::kOwn;
}

LogitIds Iteration::draft_ids(const IterationExtent& extent, const float* probabilities) const {
  const bool reads_all =
      extent.has_logit_work || buffers_.rejection.is_used() || probabilities != nullptr;
  return reads_all ? LogitIds::kAll : LogitIds::kOwn;
}

template <class Ctx>
void Iteration::draw_ids(Ctx& ctx, const DrawParams& params, const Decoder& decoder,
                         LogitIds ids) const {
  const RankColumns& columns = decoder.lm_head().outputs;
  if (ids == LogitIds::kAll || !columns.is_shared()) {
    ctx.run(draw, params);
    return;
  }
  ctx.run(
      gathered_draw,
      GatheredDrawParams{.draw = params, .columns = columns, .ranks = buffers_.activations.ranks});
}

template <class Ctx>
void Iteration::draw_drafts(Ctx& ctx, const IterationExtent& extent,
                            const DraftDraws& draws) const {
  const IterationBuffers& b = buffers_;
  DrawParams params = draw_params(draws);
  if (extent.has_logit_work) {
    // The target's logits are cut in the same way, so the target would seldom draw other tokens.
    ctx.run(truncate_logits, TruncateLogitsParams{.num_rows = draws.num_rows,
                                                  .max_rows = draws.max_rows,
                                                  .logits = draws.logits,
                                                  .logits_stride = params.logits_stride,
                                                  .vocab_limit = params.vocab_limit,
                                                  .row_index = draws.row_index,
                                                  .seq_slot = draws.rows.seq_slot,
                                                  .temperatures = b.sequences.temperature,
                                                  .sampling = b.sampling});
  }
  if (b.rejection.is_used()) {
    params = propose_draft(ctx, b.rejection, b.sequences, params, draws.steps);
  }
  draw_ids(ctx, params, *decoder_of(speculator_), draws.ids);
}

template <class Ctx>
void Iteration::fork(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  CopyBlocksParams copies{.num_copies = &b.staged.counts->num_block_copies,
                          .max_copies = extent.num_block_copies,
                          .copies = b.staged.block_copies,
                          .pool = b.kv_pool,
                          .block_bytes = {}};
  ForkSequencesParams forks{.num_forks = &b.staged.counts->num_forks,
                            .max_forks = extent.num_forks,
                            .forks = b.staged.forks,
                            .adopted_tokens = b.staged.adopted_tokens,
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
    ctx.run(clear_counts, ClearCountsParams{.num_seqs = &b.staged.counts->num_resets,
                                            .max_seqs = options_.shape.max_seqs,
                                            .seq_slots = b.staged.reset_seq_slots,
                                            .sampling = b.sampling});
  }
  if (extent.num_forks > 0) fork(ctx, extent);
  if (!extent.has_logit_work) return;
  ctx.run(count_prefill_tokens,
          CountPrefillTokensParams{
              .inputs = b.staged, .sampling = b.sampling, .max_seqs = extent.num_seqs});
}

template <class Ctx>
void Iteration::process_logits(Ctx& ctx, const IterationExtent& extent,
                               const PassRows& rows) const {
  const IterationBuffers& b = buffers_;
  ctx.run(adjust_logits, AdjustLogitsParams{.num_rows = &b.staged.counts->num_logit_rows,
                                            .max_rows = extent.num_logit_rows,
                                            .logits = b.logits,
                                            .logits_stride = target_.config().vocab_size,
                                            .row_index = b.staged.logit_rows,
                                            .seq_slot = rows.seq_slot,
                                            .positions = rows.positions,
                                            .token_ids = rows.token_ids,
                                            .sequences = b.sequences,
                                            .sampling = b.sampling});
  ctx.run(truncate_logits, TruncateLogitsParams{.num_rows = &b.staged.counts->num_logit_rows,
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
OutputRows Iteration::pick_rows(Ctx& ctx, const PassRows& pass, const PassRows& output,
                                const int32_t* row_index, KvOwner owner) const {
  const OutputBuffers& o = buffers_.output;
  // A word is copied as it is, so it may be an integer.
  const auto pick = [&](const int32_t* from, int32_t* to) {
    ctx.run(copy_rows, CopyRowsParams{.num_rows = output.num_rows,
                                      .max_rows = output.capacity,
                                      .row_index = row_index,
                                      .x = from,
                                      .x_stride = 1,
                                      .y = to,
                                      .y_stride = 1,
                                      .width = 1});
  };
  pick(pass.token_ids, output.token_ids);
  pick(pass.positions, output.positions);
  pick(pass.seq_slot, output.seq_slot);
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.is_read_by(owner, static_cast<GroupId>(g))) {
      build(ctx, output, o.metadata[g], /*padded_rows=*/0);
    }
  }
  return {.rows = output,
          .row_index = row_index,
          .groups = o.metadata,
          .qkv = o.qkv,
          .residual = o.residual};
}

template <class Ctx>
void Iteration::verify(Ctx& ctx, const IterationExtent& extent,
                       std::span<const HiddenCapture> captures) const {
  const IterationBuffers& b = buffers_;
  const PassRows rows = with_extent(b.verify_rows, extent.num_verify_rows, extent.num_seqs,
                                    extent.verify_rows_per_seq);
  ctx.run(assemble_verify_rows, AssembleVerifyRowsParams{b.staged, b.sequences, rows});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].owner == KvOwner::kTarget) {
      build(ctx, rows, b.verify_metadata[g], /*padded_rows=*/0);
    }
  }
  const bool feeds_drafter = extent.num_first_rows > 0 || extent.keeps_hidden;
  HiddenTaps taps = feeds_drafter ? b.target_hidden : HiddenTaps{};
  taps.captures = captures;
  const bool is_all_read = captures.size() > 0 || extent.num_prompt_rows > 0 ||
                           (taps.data != nullptr && taps.aux_layers.empty());
  std::optional<OutputRows> output;
  if (!is_all_read && target_.picks_output() &&
      extent.num_verify_rows - extent.num_logit_rows >= kMinUnread) {
    PassRows picked = with_extent(b.output.rows, std::max(extent.num_logit_rows, 1),
                                  extent.num_seqs, std::max(extent.logit_rows_per_seq, 1));
    picked.num_rows = &b.staged.counts->num_logit_rows;
    picked.num_seqs = &b.staged.counts->num_seqs;
    picked.row_indptr = b.staged.logit_indptr;
    output = pick_rows(ctx, rows, picked, b.staged.logit_rows, KvOwner::kTarget);
  }
  target_.forward(ctx, rows, b.verify_metadata, b.activations, taps,
                  output.has_value() ? &*output : nullptr);
  const LogitIds ids = target_ids(extent);
  target_.logits(
      ctx, &b.staged.counts->num_all_logit_rows,
      std::min(extent.num_logit_rows + extent.num_prompt_rows, options_.shape.max_logit_rows),
      output.has_value() ? b.identity : b.staged.logit_rows, with_output(b.activations, output),
      b.gathered, b.logits, ids);
  target_.capture_output(ctx, rows, b.activations, captures);
  if (extent.has_logit_work) {
    save_logits(ctx, extent);
    process_logits(ctx, extent, rows);
  }
  draw_ids(ctx,
           DrawParams{.num_rows = &b.staged.counts->num_logit_rows,
                      .max_rows = extent.num_logit_rows,
                      .logits = b.logits,
                      .logits_stride = target_.config().vocab_size,
                      .vocab_limit = target_.config().vocab_size,
                      .row_index = b.staged.logit_rows,
                      .seq_slot = rows.seq_slot,
                      .positions = rows.positions,
                      .seeds = b.sequences.seed,
                      .temperatures = b.sequences.temperature,
                      .tokens = b.target_tokens},
           target_, ids);
  AcceptParams params{.inputs = b.staged,
                      .sequences = b.sequences,
                      .target_tokens = b.target_tokens,
                      .results = b.results,
                      .max_seqs = extent.num_seqs,
                      .method = AcceptMethod::kCoupled,
                      .synthetic_rate = {}};
  // Without drafts for the next windows there are none to verify, so all methods are the same.
  const bool has_drafts = extent.num_drafts > 0;
  if (has_drafts) {
    params.method = options_.rejection_sample_method;
    std::ranges::copy(options_.synthetic_rates, params.synthetic_rate);
  }
  if (has_drafts && b.rejection.is_used()) {
    reject(ctx, b.rejection,
           {.inputs = b.staged,
            .sequences = b.sequences,
            .rows = rows,
            .method = options_.rejection_sample_method,
            .target_tokens = b.target_tokens,
            .logits = b.logits,
            .vocab_size = target_.config().vocab_size,
            .num_logit_rows = extent.num_logit_rows,
            .num_seqs = extent.num_seqs});
    params.num_accepted = b.rejection.num_accepted;
    params.recovered_tokens = b.rejection.recovered_tokens;
  }
  ctx.run(accept, params);
  keep_hidden_states(ctx, extent);
  if (!extent.has_logit_work) return;
  ctx.run(count_emitted_tokens, CountEmittedTokensParams{.inputs = b.staged,
                                                         .sampling = b.sampling,
                                                         .results = b.results,
                                                         .max_seqs = extent.num_seqs});
  compute_logprobs(ctx, extent);
}

template <class Ctx>
void Iteration::keep_hidden_states(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  if (!extent.keeps_hidden) return;
  const int64_t row_bytes = b.target_hidden.width * dtype_bytes(b.activations.dtype);
  ctx.run(keep_hidden, KeepHiddenParams{.inputs = b.staged,
                                        .sequences = b.sequences,
                                        .results = b.results,
                                        .max_seqs = extent.num_seqs,
                                        .hidden = static_cast<int32_t*>(b.target_hidden.data),
                                        .row_words = static_cast<int32_t>(row_bytes / 4),
                                        .kept = b.kept_hidden});
}

template <class Ctx>
void Iteration::first_draft_pass(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  if (!has_draft_passes()) {
    if (extent.num_drafting > 0) {
      propose(ctx, speculator_, b.staged, b.sequences, extent.num_drafting);
    }
    return;
  }
  const SpecTraits traits = traits_of(speculator_);
  const PassRows rows =
      with_extent(b.first_rows, extent.num_first_rows, extent.num_seqs, extent.first_rows_per_seq);
  const PassRows step_rows =
      with_extent(b.step_rows, extent.num_drafting, extent.num_drafting, /*rows_per_seq=*/1);
  const bool gathers = traits.first_rows == FirstRows::kWindow && extent.gathers_hidden;
  int32_t* const hidden_rows =
      gathers || traits.first_rows == FirstRows::kLast ? b.hidden_rows : nullptr;
  ctx.run(assemble_first_rows,
          AssembleFirstRowsParams{.inputs = b.staged,
                                  .sequences = b.sequences,
                                  .rows = rows,
                                  .first_rows = traits.first_rows,
                                  .results = b.results,
                                  .last_row = b.first_last_row,
                                  .hidden_rows = hidden_rows,
                                  .kept = b.kept_hidden,
                                  .follows_windows = options_.shape.follows_windows});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (is_drafted_from(g)) {
      build(ctx, rows, b.first_metadata[g], /*padded_rows=*/0);
    }
  }
  DraftHeadInput input{.target_hidden = traits.takes_target_hidden ? b.target_hidden.data : nullptr,
                       .hidden_rows = hidden_rows};
  if (gathers) {
    // In memory of its own, since a draft head may overwrite its input.
    ctx.run(copy_rows, CopyRowsParams{.num_rows = rows.num_rows,
                                      .max_rows = rows.capacity,
                                      .row_index = hidden_rows,
                                      .x = b.target_hidden.data,
                                      .x_stride = b.target_hidden.width,
                                      .y = b.gathered_hidden,
                                      .y_stride = b.target_hidden.width,
                                      .width = b.target_hidden.width,
                                      .x_dtype = b.activations.dtype,
                                      .y_dtype = b.activations.dtype});
    input = {.target_hidden = b.gathered_hidden};
  }
  if (const BlockDrafter* drafter = block_drafter_of(speculator_)) {
    drafter->write_context(ctx, rows, b.first_metadata, b.activations, input.target_hidden);
    if (extent.num_drafting > 0) draft_blocks(ctx, extent, *drafter);
    return;
  }
  std::optional<OutputRows> output;
  // Decode iterations have few such rows.
  const bool has_prompts =
      extent.first_rows_per_seq > options_.shape.first_rows_per_decode(extent.num_drafts);
  if (has_prompts && decoder_of(speculator_)->picks_output() &&
      extent.num_first_rows - extent.num_drafting >= kMinUnread) {
    const int32_t num_rows = std::max(extent.num_drafting, 1);
    PassRows picked = with_extent(b.output.rows, num_rows, num_rows, /*rows_per_seq=*/1);
    picked.num_rows = &b.staged.counts->num_drafting;
    picked.num_seqs = &b.staged.counts->num_drafting;
    picked.row_indptr = b.identity;
    output = pick_rows(ctx, rows, picked, b.first_last_row, KvOwner::kDraft);
    input.output = &*output;
  }
  draft_forward(ctx, speculator_, rows, b.first_metadata, b.activations, input);
  const LogitIds ids = draft_ids(extent, b.draft_stop.probabilities);
  draft_logits(ctx, speculator_, &b.staged.counts->num_drafting, extent.num_drafting,
               output.has_value() ? b.identity : b.first_last_row,
               with_output(b.activations, output), b.draft_output, ids);
  draw_drafts(ctx, extent,
              {.num_rows = &b.staged.counts->num_drafting,
               .max_rows = extent.num_drafting,
               .row_index = b.first_last_row,
               .rows = rows,
               .logits = b.logits,
               .tokens = b.drawn,
               .probabilities = b.draft_stop.probabilities,
               .draw_ahead = traits.draw_ahead,
               .steps = nullptr,
               .adds_steps = false,
               .ids = ids});
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
  const LogitIds ids = draft_ids(extent, b.draft_stop.probabilities);
  draft_logits(ctx, speculator_, rows.num_rows, rows.capacity, b.identity, b.activations,
               b.draft_output, ids);
  draw_drafts(ctx, extent,
              {.num_rows = rows.num_rows,
               .max_rows = rows.capacity,
               .row_index = b.identity,
               .rows = rows,
               .logits = b.logits,
               .tokens = b.drawn,
               .probabilities = b.draft_stop.probabilities,
               .draw_ahead = traits.draw_ahead,
               .steps = b.current_draft_step,
               .adds_steps = !traits.advances_positions,
               .ids = ids});
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
}

template <class Ctx>
void Iteration::look_up(Ctx& ctx, int32_t num_drafting) const {
  const NgramOptions& ngram = options_.model_free.ngram;
  if (ngram.max_tokens == 0 || !has_draft_passes()) return;
  ctx.run(propose_ngram, ProposeNgramParams{.inputs = buffers_.staged,
                                            .sequences = buffers_.sequences,
                                            .max_seqs = num_drafting,
                                            .min_tokens = ngram.min_tokens,
                                            .max_tokens = ngram.max_tokens,
                                            .keeps_drafts = true});
}

template void Iteration::draw_drafts<CpuContext>(CpuContext&, const IterationExtent&,
                                                 const DraftDraws&) const;
template void Iteration::begin_prefill<CpuContext>(CpuContext&, const IterationExtent&) const;
template void Iteration::verify<CpuContext>(CpuContext&, const IterationExtent&,
                                            std::span<const HiddenCapture>) const;
template void Iteration::first_draft_pass<CpuContext>(CpuContext&, const IterationExtent&) const;
template void Iteration::draft_step<CpuContext>(CpuContext&, const IterationExtent&) const;
template void Iteration::look_up<CpuContext>(CpuContext&, int32_t) const;
#ifdef PACELINE_CUDA
template void Iteration::draw_drafts<CudaContext>(CudaContext&, const IterationExtent&,
                                                  const DraftDraws&) const;
template void Iteration::begin_prefill<CudaContext>(CudaContext&, const IterationExtent&) const;
template void Iteration::verify<CudaContext>(CudaContext&, const IterationExtent&,
                                             std::span<const HiddenCapture>) const;
template void Iteration::first_draft_pass<CudaContext>(CudaContext&, const IterationExtent&) const;
template void Iteration::draft_step<CudaContext>(CudaContext&, const IterationExtent&) const;
template void Iteration::look_up<CudaContext>(CudaContext&, int32_t) const;
#endif

}  // namespace paceline
