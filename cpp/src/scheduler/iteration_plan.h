// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one iteration will do: desk to tray. Written by the scheduler, read by the batch builder,
// kept by the executor until the iteration's results are in.

#include <cstdint>
#include <vector>

#include "request/sequence.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"

namespace paceline {

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

struct IterationPlan {
  int64_t iteration = 0;
  std::vector<PlannedSequence> sequences;  // ordered by kind, then by arrival
  std::vector<TableWrite> table_writes;    // new block table entries, each at most once
  std::vector<SequenceFork> forks;         // each slot once; no slot is also a parent's
  std::vector<BlockCopy> block_copies;     // of the forks; no destination is a source
};

}  // namespace paceline
