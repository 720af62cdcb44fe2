// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/config.h>
#include <paceline/model.h>

#include "speculate/speculator.h"

namespace paceline {

// Throws InvalidArgument, naming the option, its value and the values allowed, unless the options
// are valid as far as that needs no models: their ranges and the conditions between them. So
// callers can refuse options before they load anything. Conditions that depend on the method are
// checked unless `method` is null, because only the drafter's checkpoint tells it. Changes no
// option.
void check_options(const ExecutorOptions& options, const DraftMethod* method);

// Throws InvalidArgument, naming the option, its value and the values allowed, unless an executor
// can run `target` with `draft` (null: none) and these options, which includes the check above.
void check_options(const ExecutorOptions& options, const Model& target, const Model* draft);

}  // namespace paceline
