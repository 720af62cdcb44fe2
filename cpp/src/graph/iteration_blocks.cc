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
  drafter.forward(ctx, rows, blocks.metadata, b.activations);
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
  drafter.logits(ctx, blocks.num_predicting, num_drafts * num_seqs, blocks.predicting_rows,
                 b.activations, b.gathered, b.logits);
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
            .probabilities = b.draft_stop.probabilities != nullptr && !estimates
                                 ? b.draft_stop.probabilities + at
                                 : nullptr,
            .draw_ahead = config.samples_from_anchor ? 1 : 0,
            .steps = b.identity + first,
            .adds_steps = false};
  };
  const bool is_chain = config.markov != MarkovHead::kNone;
  if (!is_chain && !b.rejection.is_used()) {
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

template void Iteration::draft_blocks<CpuContext>(CpuContext&, const IterationExtent&,
                                                  const BlockDrafter&) const;
#ifdef PACELINE_CUDA
template void Iteration::draft_blocks<CudaContext>(CudaContext&, const IterationExtent&,
                                                   const BlockDrafter&) const;
#endif

}  // namespace paceline
