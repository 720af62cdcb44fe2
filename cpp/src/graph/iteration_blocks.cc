// SPDX-License-Identifier: Apache-2.0

// The pass of a block drafter over its blocks, and the drafts that it makes.

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "graph/iteration.h"
#include "metadata/pass_rows.h"
#include "model/forward/block_drafter.h"
#include "speculate/row_ops.h"

namespace paceline {

template <class Ctx>
void Iteration::draft_blocks(Ctx& ctx, const IterationExtent& extent,
                             const BlockDrafter& drafter) const {
  const IterationBuffers& b = buffers_;
  const BlockBuffers& blocks = b.blocks;
  const BlockConfig& config = drafter.block();
  const int32_t num_drafts = extent.num_drafts;
  const int32_t num_seqs = extent.num_drafting;
  const int32_t rows_per_seq = config.num_rows(num_drafts);
  const PassRows rows = with_extent(blocks.rows, num_seqs * rows_per_seq, num_seqs, rows_per_seq);
  int32_t* const drawn = blocks.tokens + num_seqs;  // behind the newest tokens
  ctx.run(assemble_block_rows,
          AssembleBlockRowsParams{.inputs = b.staged,
                                  .sequences = b.sequences,
                                  .rows = rows,
                                  .row_indptr = blocks.row_indptr,
                                  .predicting_rows = blocks.predicting_rows,
                                  .num_predicting = blocks.num_predicting,
                                  .newest_tokens = blocks.tokens,
                                  .num_seqs = num_seqs,
                                  .num_drafts = num_drafts,
                                  .rows_per_seq = rows_per_seq,
                                  .mask_token = config.mask_token,
                                  .first_predicting_row = config.first_predicting_row()});
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (is_drafted_from(g)) build(ctx, rows, blocks.metadata[g], rows.capacity);
  }
  Activations activations = b.activations;
  activations.conv_delta = blocks.conv_delta;
  drafter.forward(ctx, rows, blocks.metadata, activations);
  // With a confidence head, a draft whose estimate is too low is the first that is not made.
  // Otherwise the probability of a drawn draft decides on those behind it.
  const bool estimates =
      b.draft_stop.probabilities != nullptr && config.confidence != ConfidenceHead::kNone;
  const int32_t* const num_drafting = &b.staged.counts->num_drafting;
  const auto chained = [&](int32_t j, bool is_first) -> ChainedDraft {
    const int32_t at = j * num_seqs;
    return {.num_rows = num_drafting,
            .max_rows = num_seqs,
            .previous = blocks.tokens + at,
            .first_hidden_row = at,
            .is_first = is_first,
            .probability = estimates ? b.draft_stop.probabilities + at : nullptr};
  };
  drafter.begin_chain(ctx, blocks.row_indptr, chained(0, /*is_first=*/true), b.activations,
                      blocks.heads, b.gathered);
  const bool is_chain = config.markov != MarkovHead::kNone;
  const bool has_selector = config.selector.top > 0;
  float* const probabilities = estimates ? nullptr : b.draft_stop.probabilities;
  // The heads read the logits of all ids.
  const LogitIds ids = is_chain || has_selector ? LogitIds::kAll : draft_ids(extent, probabilities);
  drafter.logits(ctx, blocks.num_predicting, num_drafts * num_seqs, blocks.predicting_rows,
                 b.activations, b.gathered, b.logits, ids);
  if (estimates) {
    drafter.estimate_drafts(ctx, blocks.num_predicting, num_drafts * num_seqs, b.activations,
                            b.gathered, b.draft_stop.probabilities);
  }
  // Draft `first` and those behind it, `count` in all.
  const auto draws_of = [&](int32_t first, int32_t count, const int32_t* num_rows) -> DraftDraws {
    const int32_t at = first * num_seqs;
    const int64_t num_logits = drafter.config().num_logits();
    return {.num_rows = num_rows,
            .max_rows = count * num_seqs,
            .row_index = blocks.predicting_rows + at,
            .rows = rows,
            .logits = b.logits + at * num_logits,
            .tokens = drawn + at,
            .probabilities = probabilities != nullptr ? probabilities + at : nullptr,
            .draw_ahead = config.samples_from_anchor ? 1 : 0,
            .steps = b.identity + first,
            .adds_steps = false,
            .ids = ids};
  };
  if (has_selector) {
    choose_drafts(ctx, extent, drafter,
                  {.num_seqs = num_drafting,
                   .max_seqs = num_seqs,
                   .num_drafts = num_drafts,
                   .num_rows = blocks.num_predicting,
                   .row_index = blocks.predicting_rows,
                   .seq_slot = rows.seq_slot,
                   .newest = blocks.tokens},
                  draws_of(0, num_drafts, blocks.num_predicting));
  } else if (!is_chain && !b.rejection.is_used()) {
    draw_drafts(ctx, extent, draws_of(0, num_drafts, blocks.num_predicting));
  } else {
    // The proposals of a window are stored draft by draft.
    for (int32_t j = 0; j < num_drafts; ++j) {
      const DraftDraws draws = draws_of(j, 1, num_drafting);
      // Where nothing stands between the Markov head and the draw, they are one op.
      const DrawParams drawing = draw_params(draws);
      const bool is_drawn = is_chain && !extent.has_logit_work && !b.rejection.is_used() &&
                            drawing.probabilities == nullptr;
      if (is_chain) {
        const bool is_first = j == 0 && !config.begins_with_state();
        drafter.add_markov(ctx, chained(j, is_first), b.activations, blocks.heads, draws.logits,
                           is_drawn ? &drawing : nullptr);
      }
      if (!is_drawn) draw_drafts(ctx, extent, draws);
    }
  }
  ctx.run(store_block_drafts, StoreBlockDraftsParams{.inputs = b.staged,
                                                     .sequences = b.sequences,
                                                     .drawn = drawn,
                                                     .stop = b.draft_stop,
                                                     .stops_before = estimates,
                                                     .num_seqs = num_seqs,
                                                     .num_drafts = num_drafts});
}

template <class Ctx>
void Iteration::choose_drafts(Ctx& ctx, const IterationExtent& extent, const BlockDrafter& drafter,
                              const AllDrafts& drafts, const DraftDraws& draws) const {
  const IterationBuffers& b = buffers_;
  const BlockHeadScratch& heads = b.blocks.heads;
  const CandidateLists& lists = heads.lists;
  drafter.score_candidates(ctx, drafts, b.activations, draws.logits, draw_params(draws).vocab_limit,
                           heads);
  if (!extent.has_logit_work && !b.rejection.is_used() && draws.probabilities == nullptr) {
    DraftDraws chosen = draws;
    chosen.candidates = lists.ids;
    chosen.num_candidates = lists.count;
    ctx.run(walk_candidates, WalkCandidatesParams{.num_seqs = drafts.num_seqs,
                                                  .max_seqs = drafts.max_seqs,
                                                  .num_drafts = drafts.num_drafts,
                                                  .lists = lists,
                                                  .followed = heads.followed,
                                                  .draw = draw_params(chosen)});
    return;
  }
  const int64_t count = lists.count;
  for (int32_t j = 0; j < drafts.num_drafts; ++j) {
    const int32_t at = j * drafts.max_seqs;
    const int32_t before = at - drafts.max_seqs;
    ctx.run(follow_candidates,
            FollowCandidatesParams{.num_seqs = drafts.num_seqs,
                                   .max_seqs = drafts.max_seqs,
                                   .count = lists.count,
                                   .scores = lists.scores + at * count * count,
                                   .before = j > 0 ? lists.ids + before * count : nullptr,
                                   .previous = j > 0 ? draws.tokens + before : nullptr,
                                   .y = heads.followed});
    draw_drafts(
        ctx, extent,
        {.num_rows = drafts.num_seqs,
         .max_rows = drafts.max_seqs,
         .row_index = draws.row_index + at,
         .rows = draws.rows,
         .logits = heads.followed,
         .tokens = draws.tokens + at,
         .probabilities = draws.probabilities != nullptr ? draws.probabilities + at : nullptr,
         .draw_ahead = draws.draw_ahead,
         .steps = b.identity + j,
         .adds_steps = false,
         .candidates = lists.ids + at * count,
         .num_candidates = lists.count});
  }
}

template void Iteration::draft_blocks<CpuContext>(CpuContext&, const IterationExtent&,
                                                  const BlockDrafter&) const;
#ifdef PACELINE_CUDA
template void Iteration::draft_blocks<CudaContext>(CudaContext&, const IterationExtent&,
                                                   const BlockDrafter&) const;
#endif

}  // namespace paceline
