// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ops of `standard` and `block` acceptance around the draw. The distribution that a draft is
// sampled from is stored until the draft is verified, and the row of the first rejected draft is
// turned into the residual distribution, from which one more token is drawn.
//
// Order in an iteration: after the target's rows have been adjusted, truncated and sampled from
// (sample/logits.h): softmax_sums, reject_drafts, draw from the residual rows, accept; and for each
// draft: select_proposals, then draw from the selected proposals.

#include <cstdint>

#include <paceline/config.h>

#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// The distributions that drafts were sampled from: the softmax, at the request's temperature, over
// the drafter's highest logits. This is the draft's whole distribution, not an approximation, so
// the verdict is exact with any number of proposals, and the cost of a window depends on that
// number and not on the vocabulary. Device arrays, written by select_proposals, read by draw and
// reject_drafts. If `ids` is null there are none, and every draft has probability 1.
struct Proposals {
  int32_t* ids = nullptr;   // [max_seqs, num_draft_tokens, per_draft] token ids; -1: no proposal
  float* logits = nullptr;  // same shape, before temperature; -inf without a proposal
  int32_t per_draft = 0;    // 1 to kMaxDraftProposals
};

// Selects, in each row, the `per_draft` ids with the highest logits and stores their tokens and
// logits, in ascending order of the ids. Among equal logits the lowest ids are selected. Ids that
// draw would not draw are excluded. If fewer than per_draft ids remain, the other entries are -1
// and -inf.
struct SelectProposalsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;  // [max_rows, logits_stride]
  int64_t logits_stride;
  int32_t vocab_limit;        // ids [0, vocab_limit) may be drawn
  const int32_t* row_index;   // [max_rows] row of seq_slot for row i
  const int32_t* seq_slot;    // per pass row: sequence slot, at most one row each; -1: inert
  const int32_t* token_map;   // token of each id, as in DrawParams
  int32_t token_limit;        // used with token_map
  int64_t token_map_stride;   // used with token_map
  const int32_t* draft_step;  // [1] index of the draft that the rows make; null: 0
  int32_t num_draft_tokens;   // k
  Proposals proposals;        // written at (sequence slot, draft)
  int32_t* proposal_rows;  // [max_rows] seq_slot * k + draft: row of `proposals`; -1 for inert rows
  // The list of row i is row i of `proposals`, empty for an inert row. Several rows may then be of
  // one sequence, and draft_step, num_draft_tokens and proposal_rows are not used.
  bool is_by_row = false;
};
void select_proposals(CpuContext&, const SelectProposalsParams&);
void select_proposals(CudaContext&, const SelectProposalsParams&);

// The highest logit of each row and the sum of the softmax weights exp((logit - highest) /
// temperature), as truncate_rules.h defines them. The weights are integers, so the sum does not
// depend on its order, and the probability of a token, its weight divided by the sum, has the same
// bits on both backends. NaN counts as -inf. The sum is 0 for rows of temperature 0, inert rows,
// and rows whose highest logit is infinite or that have none above -inf.
struct SoftmaxSumsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;  // [max_rows, logits_stride]
  int64_t logits_stride;
  int32_t vocab_limit;        // at most kMaxTruncatedVocab
  const int32_t* row_index;   // [max_rows] row of seq_slot for row i
  const int32_t* seq_slot;    // per pass row: sequence slot; -1: inert
  const float* temperatures;  // [max_seqs] by sequence slot
  float* highest;             // [max_rows]; -inf if the sum is 0
  uint64_t* sums;             // [max_rows]
};
void softmax_sums(CpuContext&, const SoftmaxSumsParams&);
void softmax_sums(CudaContext&, const SoftmaxSumsParams&);

// Decides how many drafts of each sequence are accepted (rejection_rules.h). If a draft is
// rejected, the op turns the logits of its row, in place, into those of the residual distribution
// max(share * target - drafter, 0), from which the recovered token is drawn. Only the logits of the
// proposals change, because elsewhere the drafter's probability is 0. At temperature 0, and in rows
// whose sum is 0, a draft is accepted if it equals the target's draw, and that draw is the next
// token.
struct RejectDraftsParams {
  StagedInputs inputs;
  SequenceState sequences;
  AcceptMethod method;           // kStandard or kBlock
  const int32_t* target_tokens;  // [max_logit_rows] tokens that the target drew
  float* logits;  // [max_logit_rows, logits_stride] the target's logits; updated as above
  int64_t logits_stride;
  int32_t vocab_limit;
  const float* highest;   // [max_logit_rows] by softmax_sums
  const uint64_t* sums;   // [max_logit_rows] by softmax_sums
  Proposals proposals;    // distributions of the drafts
  int32_t* num_accepted;  // [max_seqs] by batch row; 0 if no draft is verified
  // [max_seqs] by batch row: the row of logits from which the recovered token is drawn, and its row
  // of the pass; -1 and 0: none, the target's own draw is emitted.
  int32_t* residual_rows;
  int32_t* residual_pass_rows;
  int32_t max_seqs;  // in this pass
};
void reject_drafts(CpuContext&, const RejectDraftsParams&);
void reject_drafts(CudaContext&, const RejectDraftsParams&);

}  // namespace paceline
