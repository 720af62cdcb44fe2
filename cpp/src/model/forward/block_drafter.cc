// SPDX-License-Identifier: Apache-2.0
#include "model/forward/block_drafter.h"

#include <utility>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/layer_ops.h"
#include "model/forward/residual.h"
#include "ops/markov.h"

namespace paceline {

BlockDrafter::BlockDrafter(std::shared_ptr<const Model> model, const Decoder& target,
                           const KvLayout& layout, std::byte* kv_pool, int32_t max_positions,
                           DeviceArena& arena)
    : decoder_(std::move(model), layout, KvOwner::kDraft, kv_pool, max_positions, arena,
               target.shareable_weights()) {
  PACELINE_CHECK(config().drafter.has_value() && block().size > 0, config().name,
                 " is not a block drafter");
}

template <class Ctx>
void BlockDrafter::write_context(Ctx& ctx, const PassRows& rows,
                                 std::span<const GroupMetadata> groups,
                                 const Activations& activations, const void* target_hidden) const {
  const DecoderConfig& c = config();
  const DraftHeadWeights& w = decoder_.weights().head;
  project_all(ctx, row_count(rows), w.fc,
              {.x = target_hidden,
               .y = activations.residual,
               .x_dtype = activations.dtype,
               .y_dtype = DType::kFloat32},
              activations);
  normalise(ctx, row_count(rows), c,
            {.x = activations.residual,
             .x_stride = c.hidden,
             .weight = w.hidden_norm,
             .y = activations.normed,
             .y_stride = c.hidden,
             .hidden = c.hidden,
             .y_dtype = activations.dtype});
  for (int32_t layer = 0; layer < static_cast<int32_t>(c.layers.size()); ++layer) {
    decoder_.write_keys_values(ctx, layer, activations.normed, rows, groups, activations);
  }
}

template <class Ctx>
void BlockDrafter::forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                           const Activations& activations) const {
  decoder_.forward(ctx, rows, groups, activations);
}

template <class Ctx>
void BlockDrafter::logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                          const int32_t* row_index, const Activations& activations, float* gathered,
                          float* logits, LogitIds of_ids) const {
  decoder_.logits(ctx, num_rows, max_rows, row_index, activations, gathered, logits, of_ids);
}

const std::byte* BlockDrafter::hidden_rows(const ChainedDraft& draft,
                                           const Activations& activations) const {
  return rows_from(activations.normed, draft.first_hidden_row, activations.dtype);
}

const std::byte* BlockDrafter::rows_from(const void* h, int64_t row, DType dtype) const {
  return static_cast<const std::byte*>(h) + row * config().hidden * dtype_bytes(dtype);
}

template <class Ctx>
void BlockDrafter::embed_previous(Ctx& ctx, const ChainedDraft& draft,
                                  const BlockHeadScratch& scratch) const {
  ctx.run(embed, EmbedParams{.num_rows = draft.num_rows,
                             .max_rows = draft.max_rows,
                             .token_ids = draft.previous,
                             .table = decoder_.weights().head.markov_table,
                             .table_dtype = decoder_.weights().dtype,
                             .scale = 1,
                             .y = scratch.e,
                             .vocab_size = config().vocab_size,
                             .hidden = block().markov_rank});
}

template <class Ctx>
void BlockDrafter::make_factors(Ctx& ctx, const ChainedDraft& draft, const Activations& activations,
                                const BlockHeadScratch& scratch) const {
  const int32_t rank = block().markov_rank;
  const bool has_state = block().markov == MarkovHead::kRnn;
  const RowPart e{.x = scratch.e, .stride = rank, .width = rank};
  const RowPart h{.x = hidden_rows(draft, activations),
                  .stride = config().hidden,
                  .width = config().hidden,
                  .dtype = activations.dtype};
  JoinPartsParams join{.num_rows = draft.num_rows,
                       .max_rows = draft.max_rows,
                       .parts = {h, e},
                       .y = scratch.inputs,
                       .y_dtype = activations.dtype};
  if (has_state) {
    const float* const state = draft.is_first ? nullptr : scratch.state;
    join.parts[0] = {.x = state, .stride = rank, .width = rank};
    join.parts[1] = e;
    join.parts[2] = h;
  }
  ctx.run(join_parts, join);
  project(ctx, {.num_rows = draft.num_rows, .max_rows = draft.max_rows},
          decoder_.weights().head.markov_mix,
          {.x = scratch.inputs,
           .y = scratch.mix,
           .x_dtype = activations.dtype,
           .y_dtype = DType::kFloat32});
  if (has_state) {
    ctx.run(advance_markov, AdvanceMarkovParams{.num_rows = draft.num_rows,
                                                .max_rows = draft.max_rows,
                                                .mix = scratch.mix,
                                                .state = scratch.state,
                                                .is_first = draft.is_first,
                                                .y = scratch.factors,
                                                .rank = rank,
                                                .y_dtype = activations.dtype});
  } else {
    ctx.run(gate_embeddings, GateEmbeddingsParams{.num_rows = draft.num_rows,
                                                  .max_rows = draft.max_rows,
                                                  .gate = scratch.mix,
                                                  .e = scratch.e,
                                                  .y = scratch.factors,
                                                  .rank = rank,
                                                  .y_dtype = activations.dtype});
  }
}

template <class Ctx>
void BlockDrafter::begin_chain(Ctx& ctx, const int32_t* first_rows, const ChainedDraft& draft,
                               const Activations& activations, const BlockHeadScratch& scratch,
                               float* gathered) const {
  if (!block().begins_with_state()) return;
  decoder_.output_rows(ctx, draft.num_rows, draft.max_rows, first_rows, activations, gathered);
  embed_previous(ctx, draft, scratch);
  make_factors(ctx, draft, activations, scratch);
}

template <class Ctx>
void BlockDrafter::add_markov(Ctx& ctx, const ChainedDraft& draft, const Activations& activations,
                              const BlockHeadScratch& scratch, float* logits,
                              const DrawParams* drawing) const {
  const DraftHeadWeights& w = decoder_.weights().head;
  const bool has_factors = block().has_markov_mix();
  const bool estimates =
      draft.probability != nullptr && block().confidence == ConfidenceHead::kHiddenAndToken;
  if (has_factors || estimates) embed_previous(ctx, draft, scratch);
  if (estimates) {
    estimate(ctx, {.num_rows = draft.num_rows, .max_rows = draft.max_rows}, draft.first_hidden_row,
             scratch.e, activations, draft.probability);
  }
  if (has_factors) make_factors(ctx, draft, activations, scratch);
  ctx.run(markov_draft, MarkovDraftParams{.num_rows = draft.num_rows,
                                          .max_rows = draft.max_rows,
                                          .factors = has_factors ? scratch.factors : nullptr,
                                          .previous = has_factors ? nullptr : draft.previous,
                                          .table = has_factors ? nullptr : w.markov_table,
                                          .vocab_size = config().vocab_size,
                                          .weight = w.markov.weight,
                                          .logits = logits,
                                          .dtype = activations.dtype,
                                          .draws = drawing != nullptr,
                                          .draw = drawing != nullptr ? *drawing : DrawParams{}});
}

template <class Ctx>
void BlockDrafter::score_candidates(Ctx& ctx, const AllDrafts& drafts,
                                    const Activations& activations, const float* logits,
                                    int32_t vocab_limit, const BlockHeadScratch& scratch) const {
  const DraftHeadWeights& w = decoder_.weights().head;
  const int32_t max_rows = drafts.num_drafts * drafts.max_seqs;
  const CandidateLists& lists = scratch.lists;
  ctx.run(select_proposals,
          SelectProposalsParams{
              .num_rows = drafts.num_rows,
              .max_rows = max_rows,
              .logits = logits,
              .logits_stride = config().num_logits(),
              .vocab_limit = vocab_limit,
              .row_index = drafts.row_index,
              .seq_slot = drafts.seq_slot,
              .token_map = draft_to_target(),
              .token_limit = config().vocab_size,
              .token_map_stride = 0,
              .draft_step = nullptr,
              .num_draft_tokens = 0,
              .proposals = {.ids = lists.ids, .logits = lists.logits, .per_draft = lists.count},
              .proposal_rows = nullptr,
              .is_by_row = true});
  project(ctx, {.num_rows = drafts.num_rows, .max_rows = max_rows}, w.selector,
          {.x = activations.normed,
           .y = scratch.projected,
           .x_dtype = activations.dtype,
           .y_dtype = DType::kFloat32});
  ctx.run(score_pairs, ScorePairsParams{.num_seqs = drafts.num_seqs,
                                        .max_seqs = drafts.max_seqs,
                                        .num_drafts = drafts.num_drafts,
                                        .lists = lists,
                                        .newest = drafts.newest,
                                        .projected = scratch.projected,
                                        .predecessors = w.predecessors,
                                        .successors = w.successors,
                                        .vocab_size = config().vocab_size,
                                        .rank = block().selector.rank,
                                        .dtype = decoder_.weights().dtype});
}

template <class Ctx>
void BlockDrafter::estimate_drafts(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                                   const Activations& activations, const float* gathered,
                                   float* probability) const {
  const RowCount rows{.num_rows = num_rows, .max_rows = max_rows};
  if (block().confidence_before_norm) {
    Residual<Ctx>(ctx, rows, config(), activations).sum_to(gathered, activations.embedded);
  }
  if (block().confidence != ConfidenceHead::kHidden) return;
  estimate(ctx, rows, /*first_row=*/0, /*e=*/nullptr, activations, probability);
}

template <class Ctx>
void BlockDrafter::estimate(Ctx& ctx, const RowCount& rows, int64_t first_row, const float* e,
                            const Activations& activations, float* probability) const {
  const DraftHeadWeights& w = decoder_.weights().head;
  const bool is_before_norm = block().confidence_before_norm;
  const void* const h = is_before_norm ? activations.embedded : activations.normed;
  const DType dtype = is_before_norm ? DType::kFloat32 : activations.dtype;
  ctx.run(estimate_acceptance,
          EstimateAcceptanceParams{.num_rows = rows.num_rows,
                                   .max_rows = rows.max_rows,
                                   .h = rows_from(h, first_row, dtype),
                                   .e = e,
                                   .weight = w.confidence,
                                   .bias = w.confidence_bias,
                                   .probability = probability,
                                   .hidden = config().hidden,
                                   .rank = e != nullptr ? block().markov_rank : 0,
                                   .dtype = dtype});
}

// Instantiates every member template for one context.
#define PACELINE_INSTANTIATE_BLOCK_DRAFTER(Ctx)                                                   \
  template void BlockDrafter::write_context<Ctx>(                                                 \
      Ctx&, const PassRows&, std::span<const GroupMetadata>, const Activations&, const void*)     \
      const;                                                                                      \
  template void BlockDrafter::forward<Ctx>(Ctx&, const PassRows&, std::span<const GroupMetadata>, \
                                           const Activations&) const;                             \
  template void BlockDrafter::logits<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,          \
                                          const Activations&, float*, float*, LogitIds) const;    \
  template void BlockDrafter::begin_chain<Ctx>(Ctx&, const int32_t*, const ChainedDraft&,         \
                                               const Activations&, const BlockHeadScratch&,       \
                                               float*) const;                                     \
  template void BlockDrafter::add_markov<Ctx>(Ctx&, const ChainedDraft&, const Activations&,      \
                                              const BlockHeadScratch&, float*, const DrawParams*) \
      const;                                                                                      \
  template void BlockDrafter::score_candidates<Ctx>(                                              \
      Ctx&, const AllDrafts&, const Activations&, const float*, int32_t, const BlockHeadScratch&) \
      const;                                                                                      \
  template void BlockDrafter::estimate_drafts<Ctx>(                                               \
      Ctx&, const int32_t*, int32_t, const Activations&, const float*, float*) const;
PACELINE_INSTANTIATE_BLOCK_DRAFTER(CpuContext)
#ifdef PACELINE_CUDA
PACELINE_INSTANTIATE_BLOCK_DRAFTER(CudaContext)
#endif
#undef PACELINE_INSTANTIATE_BLOCK_DRAFTER

}  // namespace paceline
