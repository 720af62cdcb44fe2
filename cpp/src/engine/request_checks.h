// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of requests. No value is clamped: one that is not allowed is refused with its name, the
// value seen and the values allowed.

#include <cstdint>

#include <paceline/request.h>

#include "wire/draft_source.h"

namespace paceline {

struct RequestBounds {
  int32_t max_model_len = 0;
  int32_t vocab_size = 0;
  int32_t num_layers = 0;   // of the target
  int32_t num_streams = 1;  // of the target
  int32_t max_logprobs = 0;
  int32_t num_draft_tokens = 0;    // k
  SourceMethods methods;           // that draft
  bool allows_constraints = true;  // not with synthetic acceptance, nor without logits
};

// Whether a request generates nothing and returns values at the positions of its prompt.
[[nodiscard]] inline bool is_score(const Request& request) {
  return request.score_prompt || !request.hidden_layers.empty();
}

// Checks everything except whether the blocks of the request fit the pool. Throws InvalidArgument.
void check_request(const Request& request, const RequestBounds& bounds);

}  // namespace paceline
