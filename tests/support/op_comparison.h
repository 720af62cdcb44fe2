// SPDX-License-Identifier: Apache-2.0
#pragma once

// The comparison of a CUDA op with the CPU op, which is the specification.

#include "support/op_cases.h"

namespace paceline::testing {

// The arrays of a case before and after its op, as one backend sees them.
struct BeforeAndAfter {
  ArrayBytes before;
  ArrayBytes after;
};

[[nodiscard]] BeforeAndAfter run_on_cpu(const OpInstance& op);

// Expects all arrays of the case to agree, and that there was something to compare. What the CPU op
// did not write must be unchanged.
void expect_agreement(const OpInstance& op, const BeforeAndAfter& cpu, const BeforeAndAfter& cuda);

}  // namespace paceline::testing
