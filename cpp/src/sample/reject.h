// SPDX-License-Identifier: Apache-2.0
#pragma once

// What `standard` and `block` acceptance do around the draw: the law that a draft is drawn from is
// kept until the draft is judged, and the row at which the drafts end is turned into what the
// target's law has left, for one more draw.
//
// Order of an iteration: after the target's rows have been adjusted, truncated and drawn from
// (sample/logits.h), softmax_sums, reject_drafts, draw from the residual rows, accept; and for each
// draft select_proposals, then draw from what it has selected.

#include <cstdint>

#include <paceline/config.h>

#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// The laws that drafts were drawn from: softmax, at the request's temperature, over the drafter's
// highest logits. That is the whole law of the draft, not an approximation of one, so the verdict
// is exact with any number of proposals, and a window costs what that number does, not the
// vocabulary. Device arrays; written by select_proposals, read by draw and reject_drafts. `ids`
// null: there are none, each draft was certain.
struct Proposals {
  int32_t* ids = nullptr;   // [max_seqs, num_draft_tokens, per_draft] token ids; -1: none
  float* logits = nullptr;  // the same shape: before temperature; -inf where there is none
  int32_t per_draft = 0;    // 1 to kMaxDraftProposals
};

// Of each row, the ids with the `per_draft` highest logits: their tokens and logits, in ascending
// order of the ids. Of equal logits the lowest ids come in. Ids that draw could not draw do not
// count; if there are fewer than per_draft, the rest is -1 and -inf.
struct SelectProposalsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;  // [max_rows, logits_stride]
  int64_t logits_stride;
  int32_t vocab_limit;        // ids [0, vocab_limit) may be drawn
  const int32_t* row_index;   // [max_rows] row of seq_slot that row i belongs to
  const int32_t* seq_slot;    // per pass row: sequence slot, of one row at most; -1: inert
  const int32_t* token_map;   // token of each id, as in DrawParams
  int32_t token_limit;        // with token_map
  int64_t token_map_stride;   // with token_map
  const int32_t* draft_step;  // [1] which draft of its sequence each row makes; null: the first
  int32_t num_draft_tokens;   // k
  Proposals proposals;        // written at (slot, draft)
  int32_t* proposal_rows;     // [max_rows] slot * k + draft: where in `proposals`; -1 of inert rows
};
void select_proposals(CpuContext&, const SelectProposalsParams&);
void select_proposals(CudaContext&, const SelectProposalsParams&);

// The highest logit of each row and the sum of its weights exp((logit - highest) / temperature), as
// truncate_rules.h has them. Integers: the sum has no order, and a token's chance, its weight over
// the sum, is the same bits on both backends. NaN counts as -inf. Rows of temperature 0, inert rows
// and rows whose highest logit is infinite, or that have none, get the sum 0.
struct SoftmaxSumsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;  // [max_rows, logits_stride]
  int64_t logits_stride;
  int32_t vocab_limit;        // at most kMaxTruncatedVocab
  const int32_t* row_index;   // [max_rows] row of seq_slot that row i belongs to
  const int32_t* seq_slot;    // per pass row: sequence slot; -1: inert
  const float* temperatures;  // [max_seqs] by sequence slot
  float* highest;             // [max_rows]; -inf where the sum is 0
  uint64_t* sums;             // [max_rows]
};
void softmax_sums(CpuContext&, const SoftmaxSumsParams&);
void softmax_sums(CudaContext&, const SoftmaxSumsParams&);

// How many drafts of each sequence are kept (rejection_rules.h), and, where not all are, what is
// left to draw the next token from: of the row at which they end, the logits of the proposals are
// turned, in place, into those of max(share * target - drafter, 0); all others keep theirs, for
// there the drafter's law is 0. At temperature 0 a draft is kept while it equals the target's draw,
// which then comes next. The same holds where a row has no sum.
struct RejectDraftsParams {
  StagedInputs inputs;
  SequenceState sequences;
  AcceptMethod method;           // kStandard or kBlock
  const int32_t* target_tokens;  // [max_logit_rows] the target's draws
  float* logits;                 // [max_logit_rows, logits_stride] the target's; updated as above
  int64_t logits_stride;
  int32_t vocab_limit;
  const float* highest;   // [max_logit_rows] by softmax_sums
  const uint64_t* sums;   // [max_logit_rows] by softmax_sums
  Proposals proposals;    // of the drafts
  int32_t* num_accepted;  // [max_seqs] by batch row; 0 where no draft is judged
  // [max_seqs] by batch row: the row of logits to draw the next token from, and its row of the
  // pass; -1 and 0: none, the target's own draw stands.
  int32_t* residual_rows;
  int32_t* residual_pass_rows;
  int32_t max_seqs;  // of this pass
};
void reject_drafts(CpuContext&, const RejectDraftsParams&);
void reject_drafts(CudaContext&, const RejectDraftsParams&);

}  // namespace paceline
