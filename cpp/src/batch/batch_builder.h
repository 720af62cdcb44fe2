// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "batch/iteration_inputs.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"

namespace paceline {

// Sizes every array once; `build_batch` then allocates nothing.
void reserve_inputs(IterationInputs& inputs, const BatchShape& shape);

// Lays the planned sequences out as ragged rows.
void build_batch(const IterationPlan& plan, const BatchShape& shape, IterationInputs& inputs);

}  // namespace paceline
