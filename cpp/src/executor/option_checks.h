// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/config.h>
#include <paceline/model.h>

namespace paceline {

// Throws InvalidArgument, naming the option, its value and the values allowed, unless an executor
// can run `target` with `draft` (null: none) and these options. Changes no option.
void check_options(const ExecutorOptions& options, const Model& target, const Model* draft);

}  // namespace paceline
