// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lays out planned sequences as ragged rows.

#include "batch/batch.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"

namespace paceline {

// Fills `batch`, whose inputs `Runner::bind` has set. Allocates only the entries of score_copies.
void build_batch(const IterationPlan& plan, const BatchShape& shape, Batch& batch);

}  // namespace paceline
