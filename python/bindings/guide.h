// SPDX-License-Identifier: Apache-2.0
#pragma once

// Python objects as guides. The library calls, copies and destroys them on threads without the GIL,
// so calls and destructors take it.

#include <memory>

#include <paceline/guide.h>

#include "bindings.h"

namespace paceline::python {

// `object.constrain(emitted, drafts, max_drafts, masks)` takes two lists of token ids, an int and
// the address of the zeroed masks, and returns the drafts; see TokenConstraint.
std::shared_ptr<TokenConstraint> make_constraint(py::object object);

// `object(tokens, max_drafts)` takes a list of token ids and an int, and returns a list of ids.
std::shared_ptr<HostDrafter> make_drafter(py::object object);
// The object of a drafter that make_drafter has made; None for null.
py::object object_of(const std::shared_ptr<HostDrafter>& drafter);

}  // namespace paceline::python
