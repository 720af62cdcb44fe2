// SPDX-License-Identifier: Apache-2.0
#include "graph/rejection.h"

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"

namespace paceline {

RejectionBuffers allocate_rejection(DeviceArena& arena, const BatchShape& shape,
                                    AcceptMethod method, bool samples_drafts,
                                    int32_t num_proposals) {
  RejectionBuffers b;
  const bool rejects = method == AcceptMethod::kStandard || method == AcceptMethod::kBlock;
  if (!rejects || shape.num_draft_tokens == 0) return b;
  const int64_t seqs = shape.max_seqs;
  b.highest = arena.allocate<float>(shape.max_logit_rows, "draws");
  b.sums = arena.allocate<uint64_t>(shape.max_logit_rows, "draws");
  b.num_accepted = arena.allocate<int32_t>(seqs, "draws");
  b.residual_rows = arena.allocate<int32_t>(seqs, "draws");
  b.residual_pass_rows = arena.allocate<int32_t>(seqs, "draws");
  b.recovered_tokens = arena.allocate<int32_t>(seqs, "draws");
  if (!samples_drafts) return b;
  const int32_t per_draft = num_proposals > 0 ? num_proposals : kDefaultDraftProposals;
  const int64_t count = seqs * shape.num_draft_tokens * per_draft;
  b.proposals = {.ids = arena.allocate<int32_t>(count, "proposals"),
                 .logits = arena.allocate<float>(count, "proposals"),
                 .per_draft = per_draft};
  b.proposal_rows = arena.allocate<int32_t>(seqs, "proposals");
  return b;
}

template <class Ctx>
DrawParams propose_draft(Ctx& ctx, const RejectionBuffers& b, const SequenceState& sequences,
                         const DrawParams& coupled, const int32_t* steps) {
  DrawParams params = coupled;
  if (b.proposals.ids == nullptr) {
    params.temperatures = nullptr;
    return params;
  }
  ctx.run(select_proposals, SelectProposalsParams{.num_rows = coupled.num_rows,
                                                  .max_rows = coupled.max_rows,
                                                  .logits = coupled.logits,
                                                  .logits_stride = coupled.logits_stride,
                                                  .vocab_limit = coupled.vocab_limit,
                                                  .row_index = coupled.row_index,
                                                  .seq_slot = coupled.seq_slot,
                                                  .token_map = coupled.token_map,
                                                  .token_limit = coupled.token_limit,
                                                  .token_map_stride = coupled.token_map_stride,
                                                  .draft_step = steps,
                                                  .num_draft_tokens = sequences.num_draft_tokens,
                                                  .proposals = b.proposals,
                                                  .proposal_rows = b.proposal_rows});
  params.logits = b.proposals.logits;
  params.logits_stride = b.proposals.per_draft;
  params.vocab_limit = b.proposals.per_draft;
  params.token_map = b.proposals.ids;
  params.token_map_stride = b.proposals.per_draft;
  params.logit_rows = b.proposal_rows;
  params.stream = NoiseStream::kDraft;
  params.salts = sequences.known_len;
  return params;
}

template <class Ctx>
void reject(Ctx& ctx, const RejectionBuffers& b, const VerifiedWindows& w) {
  ctx.run(softmax_sums, SoftmaxSumsParams{.num_rows = &w.inputs.counts->num_logit_rows,
                                          .max_rows = w.num_logit_rows,
                                          .logits = w.logits,
                                          .logits_stride = w.vocab_size,
                                          .vocab_limit = w.vocab_size,
                                          .row_index = w.inputs.logit_rows,
                                          .seq_slot = w.rows.seq_slot,
                                          .temperatures = w.sequences.temperature,
                                          .highest = b.highest,
                                          .sums = b.sums});
  ctx.run(reject_drafts, RejectDraftsParams{.inputs = w.inputs,
                                            .sequences = w.sequences,
                                            .method = w.method,
                                            .target_tokens = w.target_tokens,
                                            .logits = w.logits,
                                            .logits_stride = w.vocab_size,
                                            .vocab_limit = w.vocab_size,
                                            .highest = b.highest,
                                            .sums = b.sums,
                                            .proposals = b.proposals,
                                            .num_accepted = b.num_accepted,
                                            .residual_rows = b.residual_rows,
                                            .residual_pass_rows = b.residual_pass_rows,
                                            .max_seqs = w.num_seqs});
  ctx.run(draw, DrawParams{.num_rows = &w.inputs.counts->num_seqs,
                           .max_rows = w.num_seqs,
                           .logits = w.logits,
                           .logits_stride = w.vocab_size,
                           .vocab_limit = w.vocab_size,
                           .row_index = b.residual_pass_rows,
                           .seq_slot = w.rows.seq_slot,
                           .positions = w.rows.positions,
                           .seeds = w.sequences.seed,
                           .temperatures = w.sequences.temperature,
                           .tokens = b.recovered_tokens,
                           .logit_rows = b.residual_rows,
                           .stream = NoiseStream::kResidual,
                           .salts = w.sequences.known_len});
}

template DrawParams propose_draft<CpuContext>(CpuContext&, const RejectionBuffers&,
                                              const SequenceState&, const DrawParams&,
                                              const int32_t*);
template void reject<CpuContext>(CpuContext&, const RejectionBuffers&, const VerifiedWindows&);
#ifdef PACELINE_CUDA
template DrawParams propose_draft<CudaContext>(CudaContext&, const RejectionBuffers&,
                                               const SequenceState&, const DrawParams&,
                                               const int32_t*);
template void reject<CudaContext>(CudaContext&, const RejectionBuffers&, const VerifiedWindows&);
#endif

}  // namespace paceline
