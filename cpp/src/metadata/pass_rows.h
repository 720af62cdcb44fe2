// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rows of one pass over a model, and the state they are made from. All pointers are device
// memory allocated once; the ops of speculate/ and sample/ write them, metadata and model read.

#include <cstdint>

#include "base/host_device.h"

namespace paceline {

// One pass (verify, draft_first or draft_step): a row is a token at a position of a sequence.
struct PassRows {
  int32_t* num_rows;   // [1]
  int32_t* token_ids;  // [capacity]
  int32_t* positions;  // [capacity]; 0 for inert rows
  int32_t* seq_slot;   // [capacity] slot of the row's sequence, -1: inert (writes the null block)
  int32_t capacity;
  // Which rows belong to one sequence of the batch; they lie side by side.
  const int32_t* num_seqs;    // [1]
  const int32_t* row_indptr;  // [max_seqs + 1] sequence i has rows [row_indptr[i], row_indptr[i+1])
  int32_t max_seqs;
  int32_t max_rows_per_seq;
};

// When the drafter stops before its k tokens. A token that was drawn stays drafted and is verified;
// what stops is further drafting for that sequence.
struct DraftStop {
  float* probabilities;    // [max_seqs] the drafter's probability of what the running step drew,
                           // written by draw; null: no early stop
  float threshold;         // a probability below it ends the row's drafting
  int32_t* keep_drafting;  // [1] 1 while another draft step has rows to work on; written by
                           // begin_draft_steps and advance_draft_step, read by the WHILE driver;
                           // null: nobody asks
};

PACELINE_HOST_DEVICE inline void set_keep_drafting(const DraftStop& stop, bool keeps_drafting) {
  if (stop.keep_drafting != nullptr) *stop.keep_drafting = keeps_drafting ? 1 : 0;
}

// Whether row `row`, whose draft has just been drawn, drafts no further.
PACELINE_HOST_DEVICE inline bool stops(const DraftStop& stop, int32_t row) {
  return stop.probabilities != nullptr && stop.probabilities[row] < stop.threshold;
}

}  // namespace paceline
