// SPDX-License-Identifier: Apache-2.0
#pragma once

// The small ops between the passes of an iteration: which tokens go through the target, which
// through the drafter's first pass, and how a draft step hands over to the next. Everything that
// the host cannot know when it launches is worked out here.

#include <cstdint>

#include "metadata/pass_rows.h"

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

// Rows of the drafter's first pass, after acceptance: the newest known tokens, as many as the
// staged first_indptr says. For a decoding sequence of a draft model these are the last accepted
// token and the new one; the drafter's other KV is already right.
struct AssembleFirstRowsParams {
  StagedInputs inputs;
  SequenceState sequences;
  PassRows rows;
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

}  // namespace paceline
