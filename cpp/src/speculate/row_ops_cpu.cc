// SPDX-License-Identifier: Apache-2.0
#include "device/cpu_context.h"
#include "speculate/row_ops.h"
#include "speculate/sequence_rows.h"

namespace paceline {

void assemble_verify_rows(CpuContext&, const AssembleVerifyRowsParams& p) {
  *p.rows.num_rows = p.inputs.counts->num_verify_rows;
  for (int32_t i = 0; i < p.inputs.counts->num_seqs; ++i) {
    assemble_verify_sequence(p, i, /*worker=*/0, /*num_workers=*/1);
  }
}

void assemble_first_rows(CpuContext&, const AssembleFirstRowsParams& p) {
  *p.rows.num_rows = p.inputs.counts->num_first_rows;
  for (int32_t i = 0; i < p.inputs.counts->num_seqs; ++i) {
    assemble_first_sequence(p, i, /*worker=*/0, /*num_workers=*/1);
  }
}

void begin_draft_steps(CpuContext&, const BeginDraftStepsParams& p) {
  const int32_t num_drafting = p.inputs.counts->num_drafting;
  *p.rows.num_rows = num_drafting;
  bool is_any_live = false;
  for (int32_t i = 0; i < num_drafting; ++i) is_any_live |= begin_draft_sequence(p, i);
  *p.current_draft_step = 1;
  set_keep_drafting(p.stop, is_any_live && p.sequences.num_draft_tokens > 1);
}

void assemble_block_rows(CpuContext&, const AssembleBlockRowsParams& p) {
  *p.rows.num_rows = p.inputs.counts->num_drafting * p.rows_per_seq;
  *p.num_predicting = p.num_drafts * p.num_seqs;
  p.row_indptr[0] = 0;
  for (int32_t i = 0; i < p.num_seqs; ++i) assemble_block_sequence(p, i);
}

void store_block_drafts(CpuContext&, const StoreBlockDraftsParams& p) {
  for (int32_t i = 0; i < p.inputs.counts->num_drafting; ++i) store_block_sequence(p, i);
  set_keep_drafting(p.stop, false);
}

void store_draft(CpuContext&, const StoreDraftParams& p) {
  const int32_t column = *p.current_draft_step;
  for (int32_t i = 0; i < *p.rows.num_rows; ++i) store_draft_sequence(p, i, column);
}

void keep_hidden(CpuContext&, const KeepHiddenParams& p) {
  for (int32_t i = 0; i < p.inputs.counts->num_seqs; ++i) {
    keep_hidden_of_sequence(p, i, /*worker=*/0, /*num_workers=*/1);
  }
}

void propose_ngram(CpuContext&, const ProposeNgramParams& p) {
  for (int32_t i = 0; i < p.inputs.counts->num_drafting; ++i) {
    const int32_t seq_slot = p.inputs.seq_slot[i];
    store_ngram(p, seq_slot, best_ngram(p, seq_slot, /*worker=*/0, /*num_workers=*/1), /*worker=*/0,
                /*num_workers=*/1);
  }
}

}  // namespace paceline
