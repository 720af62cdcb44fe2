// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rows of one pass over a model, and the state they are made from. All pointers are device
// memory allocated once; the ops of speculate/ and sample/ write them, metadata and model read.

#include <cstdint>

#include "base/host_device.h"

namespace paceline {

struct BlockCopy;     // kv/sequence_blocks.h
struct SequenceFork;  // scheduler/iteration_plan.h

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

// What the device knows of each sequence, by slot. The device is the truth: the host learns of it
// an iteration late. Written by slot resets (upload), assemble_verify_rows, accept and the draft
// ops.
struct SequenceState {
  int32_t* known_len;        // [max_seqs] tokens of prompt and output; the last has no KV yet once
                             // the sequence decodes
  int32_t* limit;            // [max_seqs] length at which the sequence ends
  int32_t* is_active;        // [max_seqs] 1 until it ends on the device
  uint64_t* seed;            // [max_seqs]
  float* temperature;        // [max_seqs]
  int32_t* num_stop_ids;     // [max_seqs]
  int32_t* stop_ids;         // [max_seqs, kMaxStopIds]
  int32_t* history;          // [max_seqs, history_stride] token ids by position
  int64_t history_stride;    // max_model_len
  int32_t* draft_tokens;     // [max_seqs, num_draft_tokens]
  int32_t* draft_len;        // [max_seqs] drafts there are to verify
  int32_t num_draft_tokens;  // k
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

// The device copy of IterationInputs; same meaning, fixed addresses.
struct StagedInputs {
  int32_t* num_seqs;         // [1]
  int32_t* num_drafting;     // [1]
  int32_t* num_verify_rows;  // [1]
  int32_t* num_first_rows;   // [1]
  int32_t* num_logit_rows;   // [1]
  int32_t* seq_slot;         // [max_seqs]
  int32_t* kind;             // [max_seqs] RowKind
  int32_t* prefill_start;    // [max_seqs]
  int32_t* next_token;       // [max_seqs]
  int32_t* verify_indptr;    // [max_seqs + 1]
  int32_t* first_indptr;     // [max_seqs + 1]
  int32_t* logit_indptr;     // [max_seqs + 1]
  int32_t* prefill_tokens;   // [max_verify_rows]
  int32_t* logit_rows;       // [max_logit_rows]
  int32_t* num_resets;       // [1]
  int32_t* reset_seq_slots;  // [max_seqs] slots that begin a sequence, or begin it again

  int32_t* num_all_logit_rows;  // [1] num_logit_rows + num_prompt_rows
  int32_t* prompt_targets;      // [max_prompt_rows]
  int32_t* num_forks;           // [1]
  SequenceFork* forks;          // [max_seqs]
  int32_t* num_block_copies;    // [1]
  BlockCopy* block_copies;      // [max_seqs * groups]
};

}  // namespace paceline
