// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lays planned sequences out as ragged rows.

#include "batch/batch.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"

namespace paceline {

// Fills `batch`, whose inputs have been bound to memory. Allocates nothing but score copies.
void build_batch(const IterationPlan& plan, const BatchShape& shape, Batch& batch);

}  // namespace paceline
