// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one iteration will do: desk to tray. Written by the scheduler, read by the batch builder,
// kept by the executor until the iteration's results are in.

#include <cstdint>
#include <vector>

#include "kv/sequence_blocks.h"
#include "request/sequence.h"

namespace paceline {

// Rows of one sequence in the verify pass.
enum class RowKind : int32_t {
  kDecode = 0,          // k+1 rows: the last known token and the drafts
  kPrefillFinal = 1,    // the last chunk of the known tokens; its last row draws the next token
  kPrefillPartial = 2,  // an earlier chunk
  kScore = 3,           // a chunk whose logits are returned; draws nothing
};

struct PlannedSequence {
  Sequence* sequence = nullptr;
  int64_t epoch = 0;  // of the sequence at launch
  RowKind kind = RowKind::kDecode;
  int32_t start = 0;     // prefill kinds: position of the first row
  int32_t num_rows = 0;  // in the verify pass
  bool resets_state = false;
  // Prefill kinds: the first so many rows have the token after them rated, for prompt_logprobs.
  int32_t num_prompt_rows = 0;
};

// A sequence of the plan that takes over the first positions of another one: the device copies
// history and block tables from slot to slot, and the blocks that are shared in part.
struct SequenceFork {
  int32_t parent_seq_slot;
  int32_t seq_slot;
  int32_t num_tokens;  // positions [0, num_tokens); the fork's first row is at num_tokens
};

struct IterationPlan {
  int64_t iteration = 0;
  std::vector<PlannedSequence> sequences;  // ordered by kind, then by arrival
  std::vector<TableWrite> table_writes;    // new block table entries
  std::vector<SequenceFork> forks;         // each slot once; no slot is also a parent's
  std::vector<BlockCopy> block_copies;     // of the forks; no destination is a source
};

}  // namespace paceline
