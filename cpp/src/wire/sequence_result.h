// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scales to results: what one iteration did, by batch row. Written by the accept op on the device,
// copied into a ring entry, read by the executor.

#include <cstdint>

#include "wire/limits.h"

namespace paceline {

enum class SequenceOutcome : int32_t {
  kRunning = 0,
  kStop = 1,      // a stop token was emitted
  kLength = 2,    // the length limit was reached
  kNoLogits = 3,  // no finite logit in a row: the request fails, the engine goes on
};

struct SequenceResult {
  int32_t emitted_len = 0;    // tokens emitted; 0 for inert rows and unfinished prefill
  int32_t accepted_len = 0;   // of those, drafts that were kept
  int32_t drafted_len = 0;    // drafts judged
  int32_t discarded_len = 0;  // drafts never judged
  SequenceOutcome outcome = SequenceOutcome::kRunning;
  int32_t tokens[kMaxDraftTokens + 1] = {};
};

}  // namespace paceline
