// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of requests. No value is clamped: one that is not allowed is refused with its name, the
// value seen and the values allowed.

#include <cstdint>

#include <paceline/request.h>

namespace paceline {

struct RequestBounds {
  int32_t max_model_len = 0;
  int32_t vocab_size = 0;
  int32_t max_logprobs = 0;
};

// Checks everything except whether the blocks of the request fit the pool. Throws InvalidArgument.
void check_request(const Request& request, const RequestBounds& bounds);

}  // namespace paceline
