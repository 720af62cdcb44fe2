// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/config.h>

#include "bindings.h"

namespace paceline::python {

// A dict with the fields of ExecutorOptions, those of its SpeculativeOptions flattened. Absent keys
// keep their default. Throws ValueError for an unknown key or a value of a wrong type.
ExecutorOptions options_from_dict(const py::dict& dict);

// Every field, as options_from_dict takes it.
py::dict options_to_dict(const ExecutorOptions& options);

}  // namespace paceline::python
