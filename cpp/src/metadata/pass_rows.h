// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rows of one pass over a model. All pointers are device memory that is allocated once. The ops
// of speculate/ and metadata/ write it; metadata, model and sample ops read it.

#include <cstdint>

#include "base/host_device.h"

namespace paceline {

// One pass (verify, draft_first or draft_step): a row is a token at a position of a sequence.
struct PassRows {
  int32_t* num_rows;   // [1]
  int32_t* token_ids;  // [capacity]
  int32_t* positions;  // [capacity]; 0 for inert rows
  int32_t* seq_slot;   // [capacity] sequence slot of the row; -1: inert (writes the null block)
  int32_t capacity;
  // The rows of one sequence of the batch are adjacent.
  const int32_t* num_seqs;    // [1]
  const int32_t* row_indptr;  // [max_seqs + 1] sequence i has rows [row_indptr[i], row_indptr[i+1])
  int32_t max_seqs;
  int32_t max_rows_per_seq;
  // Of the pass over a block drafter's blocks, else null: [capacity] positions of the first and of
  // the last row of the row's block. A block is the rows of one sequence.
  int32_t* block_first = nullptr;
  int32_t* block_last = nullptr;
};

// Early stop: a sequence may stop drafting before it has k drafts. The draft that causes the stop
// is still verified, unless StoreBlockDraftsParams::stops_before says otherwise.
struct DraftStop {
  float* probabilities;    // [max_seqs] the drafter's probability of the token that the running
                           // pass drew, or a confidence head's; null: no early stop
  float threshold;         // a probability below it ends the row's drafting
  int32_t* keep_drafting;  // [1] 1 while another draft step has rows to work on; written by
                           // begin_draft_steps and advance_draft_step, read by the WHILE driver;
                           // null: not written
};

PACELINE_HOST_DEVICE inline void set_keep_drafting(const DraftStop& stop, bool keeps_drafting) {
  if (stop.keep_drafting != nullptr) *stop.keep_drafting = keeps_drafting ? 1 : 0;
}

// Whether drafting ends for row `row`, whose draft has just been drawn.
PACELINE_HOST_DEVICE inline bool stops(const DraftStop& stop, int32_t row) {
  return stop.probabilities != nullptr && stop.probabilities[row] < stop.threshold;
}

}  // namespace paceline
