// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one iteration did to each sequence, by batch row. The accept op writes it on the device,
// end_iteration copies it to the ring entry, and the executor reads it there. The drafts that
// follow are published for sequences whose verify windows the host makes.

#include <cstdint>

#include "wire/draft_source.h"
#include "wire/limits.h"

namespace paceline {

enum class SequenceOutcome : int32_t {
  kRunning = 0,
  kStop = 1,      // a stop token was emitted
  kLength = 2,    // the length limit was reached
  kNoLogits = 3,  // a row has no finite logit: the request fails, the engine goes on
};

struct SequenceResult {
  int32_t emitted_len = 0;    // tokens emitted; 0 for inert rows and unfinished prefill
  int32_t accepted_len = 0;   // accepted drafts among the emitted tokens
  int32_t drafted_len = 0;    // drafts that acceptance decided on
  int32_t discarded_len = 0;  // drafts after a stop token or the limit: no decision
  DraftSource source = DraftSource::kModel;  // of the drafts; without drafts it means nothing
  SequenceOutcome outcome = SequenceOutcome::kRunning;
  int32_t tokens[kMaxDraftTokens + 1] = {};
};

// What the drafter proposes for the next verify window of a sequence.
struct ProposedDrafts {
  int32_t count = 0;
  int32_t tokens[kMaxDraftTokens] = {};
};

}  // namespace paceline
