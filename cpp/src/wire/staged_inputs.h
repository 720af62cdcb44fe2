// SPDX-License-Identifier: Apache-2.0
#pragma once

// The device's copy of what the host says about one iteration.

#include <cstdint>

#include "wire/blocks.h"

namespace paceline {

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
