// SPDX-License-Identifier: Apache-2.0
#pragma once

// The small ops between the passes of an iteration: which tokens go through the target, which
// through the drafter's first pass, and how a draft step hands over to the next. Everything that
// the host cannot know when it launches is worked out here.

#include <cstdint>

#include "metadata/pass_rows.h"
#include "wire/batch_shape.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Rows of the verify pass: for a decoding sequence the last known token and its drafts, for a
// prefilling one the chunk, whose tokens also enter the history. Rows whose drawn token would lie
// at or beyond the limit, or beyond the drafts there are, are inert; so are those of ended
// sequences.
struct AssembleVerifyRowsParams {
  StagedInputs inputs;
  SequenceState sequences;
  PassRows rows;
};
void assemble_verify_rows(CpuContext&, const AssembleVerifyRowsParams&);
void assemble_verify_rows(CudaContext&, const AssembleVerifyRowsParams&);

// Rows of the drafter's first pass, after acceptance.
// kNewest: the newest known tokens, as many as the staged first_indptr says. For a decoding
// sequence of a draft model these are the last accepted token and the new one; the drafter's other
// KV is already right.
// kWindow: the rows of the verify pass at their positions, each with the token one further on,
// which acceptance has settled. Rows of rejected drafts are inert; so what the drafter wrote there
// is written again, from what the target says, before anything reads it.
// kLast: one row a drafting sequence, at the position before the newest token's, with that token;
// hidden_rows says which row of the verify pass was there.
// Rows of ended sequences are inert, but for those that write the KV of a chunk: a sequence may end
// with the first token of its output, and others fork from it all the same.
struct AssembleFirstRowsParams {
  StagedInputs inputs;
  SequenceState sequences;
  PassRows rows;
  FirstRows first_rows;
  const SequenceResult* results;   // [max_seqs] by batch row; not for kNewest
  int32_t* last_row;               // [max_seqs] of each drafting sequence: the row that draws
  int32_t* hidden_rows = nullptr;  // [capacity of rows] kLast only
};
void assemble_first_rows(CpuContext&, const AssembleFirstRowsParams&);
void assemble_first_rows(CudaContext&, const AssembleFirstRowsParams&);

// Between the first pass and the first draft step: column 0 is written, the step counter set to 1,
// and the rows of the draft step are made from the accepted lengths.
struct BeginDraftStepsParams {
  StagedInputs inputs;
  SequenceState sequences;
  const int32_t* drawn;         // [max_seqs] first drafts
  PassRows rows;                // of the draft step
  int32_t* current_draft_step;  // [1] set to 1
  DraftStop stop;
  int32_t draw_ahead = 1;          // from a row's position to that of the token it draws
  bool advances_positions = true;  // else the rows stay where the first pass's were
};
void begin_draft_steps(CpuContext&, const BeginDraftStepsParams&);
void begin_draft_steps(CudaContext&, const BeginDraftStepsParams&);

// Column `current_draft_step` of draft_tokens takes what the step has drawn.
struct StoreDraftParams {
  const int32_t* current_draft_step;  // [1]
  PassRows rows;
  SequenceState sequences;
  const int32_t* drawn;  // [max_seqs]
  DraftStop stop;        // a row that stops has its draft_len cut to what there is
};
void store_draft(CpuContext&, const StoreDraftParams&);
void store_draft(CudaContext&, const StoreDraftParams&);

// Prompt lookup: the drafts of a sequence are the tokens that followed the last n of its tokens
// when they occurred before, for the longest n in [min_tokens, max_tokens] that did, and its latest
// occurrence. Up to k of them, as far as they are known and fit; none without a match.
struct ProposeNgramParams {
  StagedInputs inputs;
  SequenceState sequences;
  int32_t max_seqs;  // of this pass
  int32_t min_tokens;
  int32_t max_tokens;
};
void propose_ngram(CpuContext&, const ProposeNgramParams&);
void propose_ngram(CudaContext&, const ProposeNgramParams&);

}  // namespace paceline
