// SPDX-License-Identifier: Apache-2.0
#include <paceline/guide.h>

namespace paceline {

// Here, so that the type information of the interfaces has one place in the library.
TokenConstraint::~TokenConstraint() = default;
HostDrafter::~HostDrafter() = default;

}  // namespace paceline
