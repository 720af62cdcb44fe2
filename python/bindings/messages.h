// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "bindings.h"

namespace paceline::python {

// How an error message shows a value: its repr, shortened; its type where repr raises.
std::string shorten(py::handle value);

}  // namespace paceline::python
