// SPDX-License-Identifier: Apache-2.0
#pragma once

// The small ops between the passes of an iteration: they choose the rows of the target's verify
// pass and of the drafter's first pass, and connect one draft step to the next. They compute
// everything that the host cannot know when it launches the iteration.

#include <cstdint>

#include "metadata/pass_rows.h"
#include "wire/batch_shape.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Where hidden states of the target are kept for tokens that the drafter has missed: after the
// rows of the verify pass, in the same memory. The state of a position is in row first_row +
// seq_slot * num_tokens + position % num_tokens, until a later position takes its place.
struct KeptHidden {
  int32_t first_row = 0;
  int32_t num_tokens = 0;  // of a sequence; 0: none are kept
  int32_t zero_row = 0;    // a row of zeros, for states that are no longer kept
};

// The rows of the verify pass. A decoding sequence has the last known token and its drafts; a
// prefilling one has its chunk, whose tokens are also written to the history. Rows whose predicted
// token would lie at or beyond the limit, or beyond the available drafts, are inert, and so are
// rows of ended sequences.
struct AssembleVerifyRowsParams {
  StagedInputs inputs;
  SequenceState sequences;
  PassRows rows;
};
void assemble_verify_rows(CpuContext&, const AssembleVerifyRowsParams&);
void assemble_verify_rows(CudaContext&, const AssembleVerifyRowsParams&);

// The rows of the drafter's first pass, after acceptance.
// kNewest: the newest known tokens, as many as the staged first_indptr says. For a decoding
// sequence of a draft model these are the last accepted token and the new one; the rest of the
// drafter's KV is already correct, unless the drafter has missed tokens: these come before. With
// follows_windows they are all tokens that the verify window has emitted, and at least these two:
// prompt lookup may have drafted what the model has not seen. Other rows of the window are inert.
// kWindow: the rows of the verify pass at their positions, each with the token at the next
// position, which acceptance has decided. Rows of rejected drafts are inert. What the drafter wrote
// there is overwritten, from the target's hidden states, before anything reads it. Rows beyond
// those of the verify pass are for tokens that the drafter has missed, and come before. kLast: one
// row per drafting sequence, at the position before the newest token, with the newest token as
// input; hidden_rows gives the row of the verify pass at that position. Rows of ended sequences are
// inert, except those that write the KV of a chunk: a sequence may end with the first token of its
// output, and others may still fork from it. Rows of decoding sequences that are left out are
// inert, too.
struct AssembleFirstRowsParams {
  StagedInputs inputs;
  SequenceState sequences;
  PassRows rows;
  FirstRows first_rows;
  const SequenceResult* results;  // [max_seqs] by batch row; kNewest: only with follows_windows
  int32_t* last_row;  // [max_seqs] the row of each drafting sequence that predicts the first draft
  // [capacity of rows] the row of the target's hidden states for each row; kLast, and kWindow where
  // it is not row i for row i
  int32_t* hidden_rows = nullptr;
  KeptHidden kept{};  // with kWindow and hidden_rows: of tokens that the drafter has missed
  bool follows_windows = false;  // see BatchShape
};
void assemble_first_rows(CpuContext&, const AssembleFirstRowsParams&);
void assemble_first_rows(CudaContext&, const AssembleFirstRowsParams&);

// Runs between the first pass and the first draft step: writes column 0 of the drafts, sets the
// step counter to 1, and creates the rows of the draft step from the accepted lengths.
struct BeginDraftStepsParams {
  StagedInputs inputs;
  SequenceState sequences;
  const int32_t* drawn;         // [max_seqs] first drafts
  PassRows rows;                // rows of the draft step
  int32_t* current_draft_step;  // [1] set to 1
  DraftStop stop;
  int32_t draw_ahead = 1;          // distance from a row's position to that of the token it draws
  bool advances_positions = true;  // false: rows stay at the positions of the first pass
};
void begin_draft_steps(CpuContext&, const BeginDraftStepsParams&);
void begin_draft_steps(CudaContext&, const BeginDraftStepsParams&);

// The rows of a block drafter's blocks, after acceptance. The block of drafting sequence i has
// `rows_per_seq` rows: the newest token at its position, then `mask_token` at the positions that
// follow. Rows that predict a token at or beyond the limit, or a draft beyond those that the
// sequence may have, are inert, and so are those of ended sequences. The row that predicts draft j
// of sequence i is at index j * num_seqs + i of predicting_rows; sequences that are not there have
// row 0.
struct AssembleBlockRowsParams {
  StagedInputs inputs;
  SequenceState sequences;
  PassRows rows;             // with block_first and block_last
  int32_t* row_indptr;       // [max_seqs + 1] that of `rows`
  int32_t* predicting_rows;  // [num_drafts * num_seqs]
  int32_t* num_predicting;   // [1] set to num_drafts * num_seqs
  int32_t* newest_tokens;    // [num_seqs] the first token of each block
  int32_t num_seqs;          // of the pass, at least as many as draft
  int32_t num_drafts;
  int32_t rows_per_seq;
  int32_t mask_token;
  int32_t first_predicting_row;  // of a block
};
void assemble_block_rows(CpuContext&, const AssembleBlockRowsParams&);
void assemble_block_rows(CudaContext&, const AssembleBlockRowsParams&);

// Stores the drafts of blocks: draft j of drafting sequence i is drawn[j * num_seqs + i], and
// `stop` has its probability at the same index. A draft that stops is the last one or, with
// `stops_before`, the first that is left out.
struct StoreBlockDraftsParams {
  StagedInputs inputs;
  SequenceState sequences;
  const int32_t* drawn;  // [num_drafts * num_seqs]
  DraftStop stop;
  bool stops_before;
  int32_t num_seqs;
  int32_t num_drafts;
};
void store_block_drafts(CpuContext&, const StoreBlockDraftsParams&);
void store_block_drafts(CudaContext&, const StoreBlockDraftsParams&);

// Writes the tokens that the draft step has drawn to column `current_draft_step` of draft_tokens.
struct StoreDraftParams {
  const int32_t* current_draft_step;  // [1]
  PassRows rows;
  SequenceState sequences;
  const int32_t* drawn;  // [max_seqs]
  DraftStop stop;        // when a row stops, its draft_len is cut to the drafts made so far
};
void store_draft(CpuContext&, const StoreDraftParams&);
void store_draft(CudaContext&, const StoreDraftParams&);

// Keeps the hidden states of the tokens that this iteration has emitted, for a drafter that does
// not see them now. Runs after acceptance. Sequences that do not decode or have ended keep none.
struct KeepHiddenParams {
  StagedInputs inputs;
  SequenceState sequences;
  const SequenceResult* results;  // [max_seqs] by batch row
  int32_t max_seqs;               // in this pass
  int32_t* hidden;                // rows of the verify pass, and those of `kept`
  int32_t row_words;              // 4-byte words of a row
  KeptHidden kept;
};
void keep_hidden(CpuContext&, const KeepHiddenParams&);
void keep_hidden(CudaContext&, const KeepHiddenParams&);

// Prompt lookup: finds the latest earlier occurrence of the last n tokens of a sequence, for the
// longest n in [min_tokens, max_tokens] that has one, and proposes the tokens that followed it.
// Proposes up to max_drafts tokens, as far as they are known and fit the limit. Without a match
// there are no drafts or, with keeps_drafts, those that a model has made stay. A sequence whose
// `sources` lack kLookup is left as it is, and one whose `sources` lack kModel keeps no drafts.
struct ProposeNgramParams {
  StagedInputs inputs;
  SequenceState sequences;
  int32_t max_seqs;  // in this pass
  int32_t min_tokens;
  int32_t max_tokens;
  bool keeps_drafts = false;
};
void propose_ngram(CpuContext&, const ProposeNgramParams&);
void propose_ngram(CudaContext&, const ProposeNgramParams&);

}  // namespace paceline
