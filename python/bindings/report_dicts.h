// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an executor reports, as Python dicts with the fields of the C++ structs.

#include <paceline/executor.h>

#include "bindings.h"

namespace paceline::python {

[[nodiscard]] py::dict memory_report_to_dict(const MemoryReport& report);
[[nodiscard]] py::dict stats_to_dict(const ExecutorStats& stats);
[[nodiscard]] py::dict times_to_dict(const IterationTimes& times);

}  // namespace paceline::python
