// SPDX-License-Identifier: Apache-2.0
#pragma once

// The acceptance that AcceptMethod::kSynthetic imposes.

#include <array>
#include <cstdint>

#include "wire/limits.h"

namespace paceline {

// By position, the probability that a draft is accepted if those before it are, such that a window
// with k drafts emits `length` tokens on average, the bonus token included (1 <= length <= k + 1).
//
// `is_even`: the probability is the same for all positions, as with a drafter, so that windows with
// fewer drafts emit a share of the tokens that a drafter would give, too. Otherwise the first
// floor(length) - 1 drafts are always accepted and at most one more sometimes, so that the number
// of tokens varies least.
[[nodiscard]] std::array<float, kMaxDraftTokens> synthetic_rates(double length, int32_t k,
                                                                 bool is_even);

}  // namespace paceline
