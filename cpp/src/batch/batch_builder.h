// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "batch/iteration_inputs.h"

namespace paceline {

struct BatchShape {
  int32_t max_seqs = 0;
  int32_t max_verify_rows = 0;
  int32_t max_logit_rows = 0;
  int32_t num_draft_tokens = 0;       // k
  int32_t first_rows_per_decode = 0;  // rows of a decoding sequence in the drafter's first pass
};

// Sizes every array once; `build_batch` then allocates nothing.
void reserve_inputs(IterationInputs& inputs, const BatchShape& shape);

// Lays the planned sequences out as ragged rows.
void build_batch(const StepPlan& plan, const BatchShape& shape, IterationInputs& inputs);

}  // namespace paceline
