// SPDX-License-Identifier: Apache-2.0
#pragma once

// A request as the sequences that the scheduler knows: one for each of its samples.

#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/request.h>

#include "request/sequence.h"

namespace paceline {

// All samples of a request, in order; null where one has ended.
using Samples = std::vector<std::unique_ptr<Sequence>>;

struct SampleBounds {
  int32_t max_model_len = 0;
  int32_t vocab_size = 0;
  int32_t num_draft_tokens = 0;  // k
};

// The samples of a request that has been checked; its tokens and lists are moved, not copied.
[[nodiscard]] Samples make_samples(Request request, const SampleBounds& bounds);

}  // namespace paceline
