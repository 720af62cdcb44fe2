// SPDX-License-Identifier: Apache-2.0
#pragma once

// The plan of one iteration. The scheduler writes it, the batch builder reads it, and the executor
// keeps it until it has read the results of the iteration.

#include <cstdint>
#include <vector>

#include "request/sequence.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct PlannedSequence {
  Sequence* sequence = nullptr;
  int64_t epoch = 0;  // epoch of the sequence at launch
  RowKind kind = RowKind::kDecode;
  int32_t start = 0;     // prefill kinds only: position of the first row
  int32_t num_rows = 0;  // rows in the verify pass
  bool resets_state = false;
  int32_t num_drafts = 0;  // most drafts for the next window, or kLeftOut
  int32_t num_missed = 0;  // tokens that the drafter has missed and gets in this iteration
  int32_t num_kept = 0;    // see StagedInputs
  // Position of the first of these rows if they are not all that it has missed; or kNoPart.
  int32_t catch_up_start = kNoPart;
  bool is_followed = true;   // the drafter has seen all tokens after this iteration
  bool is_cacheable = true;  // and its KV is as if it had missed none
  // Prefill kinds only: tokens that the sequence takes over from the prefix cache in this
  // iteration, whose history the device gets from the host.
  int32_t num_adopted = 0;
  // Prefill kinds only: number of leading rows that compute logprobs of the token after them, for
  // prompt_logprobs.
  int32_t num_prompt_rows = 0;
};

struct IterationPlan {
  int64_t iteration = 0;
  // Set before planning: the most drafts of any sequence. Planning lowers it to the k' of the
  // batch, which is 0 if no sequence drafts.
  int32_t num_drafts = 0;
  // Set before planning: tokens with which the drafter may catch up in all. With a bound it gets
  // all tokens of a sequence or none.
  int32_t max_catch_up = INT32_MAX;
  // Set before planning: about how many prompt rows there may be in all, if a sequence decodes
  // beside them: the iteration has a multiple of SchedulerOptions::row_step.
  int32_t max_prompt_rows = INT32_MAX;
  // Set before planning: no drafts pay. So prompts that begin are computed by the target alone, if
  // the drafter may miss them (SchedulerOptions::may_miss_prompts), and hidden states are kept for
  // sequences that have just begun only.
  bool skips_prompts = false;
  bool has_prefill = false;   // some sequence has rows that are not kDecode
  bool is_whole = true;       // no sequence catches up or is left out
  bool keeps_hidden = false;  // see Batch
  // The first pass runs, without drafts, for chunks of prompts and the sequences that decode
  // beside them.
  bool follows_chunks = false;
  std::vector<PlannedSequence> sequences;  // ordered by kind, then by arrival
  std::vector<TableWrite> table_writes;    // new block table entries, each at most once
  std::vector<SequenceFork> forks;      // each sequence slot occurs once, and none is also a parent
  std::vector<BlockCopy> block_copies;  // block copies of the forks; no destination is a source
};

}  // namespace paceline
